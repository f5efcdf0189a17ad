package gate_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// cordons applies verdicts under a policy; the defaults unless a test has set k.set.
func (k *kit) cordons() gate.Cordons {
	set := policy.Defaults()
	if k.set != nil {
		set = *k.set
	}
	return gate.Cordons{Logger: testkit.Logger(k.t), Policy: policy.Fixed{Set: set}}
}

// cordoned returns how many of the nodes are cordoned.
func (k *kit) cordoned(nodes []string) int {
	k.t.Helper()
	count := 0
	for _, node := range nodes {
		if k.get(node).Cordoned {
			count++
		}
	}
	return count
}

func (k *kit) nodes(count int) []string {
	k.t.Helper()
	out := make([]string, count)
	for i := range out {
		out[i] = k.node()
	}
	return out
}

// TestVerdictsDoNotCordonTheFleet: a driver that is rolled out to twenty nodes at once, or read wrongly by an agent of
// ours, leaves them in service. The cordons wait, and are set once few nodes are still concerned.
func TestVerdictsDoNotCordonTheFleet(t *testing.T) {
	k := newKit(t)
	nodes := k.nodes(20)
	k.applyVerdict(nodes[0], 1, runtimeDrift, 0, true)
	var batch []events.Record
	for _, node := range nodes[1:] {
		batch = append(batch, k.verdict(node, 1, runtimeDrift, 0, true))
	}
	k.applied(batch...)
	if got := k.cordoned(nodes); got != 1 {
		t.Fatalf("%d of 20 nodes are cordoned, want the one that was alone", got)
	}
	k.applyVerdict(nodes[1], 2, runtimeDrift, 0, true) // repeated
	k.personCordons(nodes[1], true)
	k.personCordons(nodes[1], false) // it passes to no cordon that waits
	batch = nil
	for _, node := range nodes[4:] {
		batch = append(batch, k.verdict(node, 2, 0, runtimeDrift, false))
	}
	k.applied(batch[1:]...)
	if got := k.cordoned(nodes); got != 1 {
		t.Fatalf("%d nodes are cordoned while five of twenty differ, want one", got)
	}
	k.applied(batch[0])
	// The cordons that waited are set with the next verdict on any node.
	k.applyVerdict(k.node(), 1, commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, 0, false)
	for _, node := range nodes[:4] {
		k.wantCordon(node, byVerdict)
	}
	if got := k.cordoned(nodes); got != 4 {
		t.Errorf("%d nodes are cordoned, want 4", got)
	}
}

// TestAWithheldCordonEndsWithItsVerdict checks that a withheld cordon whose verdict has ended is not set later.
func TestAWithheldCordonEndsWithItsVerdict(t *testing.T) {
	k := newKit(t)
	nodes := k.nodes(3)
	k.applied(k.verdict(nodes[0], 1, runtimeDrift, 0, true), k.verdict(nodes[1], 1, runtimeDrift, 0, true),
		k.verdict(nodes[2], 1, runtimeDrift, 0, true))
	if got := k.cordoned(nodes); got != 0 {
		t.Fatalf("%d nodes are cordoned, want none", got)
	}
	k.applyVerdict(nodes[0], 2, 0, runtimeDrift, false)
	k.wantCordon(nodes[0], "")
	k.wantCordon(nodes[1], byVerdict)
	k.wantCordon(nodes[2], byVerdict)
}

// TestGatesShowTheCordonsThatWait: each with the reason and since when, in its events too, until it is set or its
// verdict is over. The gauge counts them.
func TestGatesShowTheCordonsThatWait(t *testing.T) {
	k := newKit(t)
	registry := prometheus.NewRegistry()
	waiting, err := gate.NewWaiting(registry)
	if err != nil {
		t.Fatal(err)
	}
	want := func(what string, nodes []string, wait int) {
		t.Helper()
		shown := 0
		for _, node := range nodes {
			g := k.get(node)
			list := testkit.Events(t, k.db.Pool(pg.RoleLifecycle), "kind = 'gate.changed' AND aggregate_id = $1", node)
			last := list[len(list)-1]
			none := g.WaitingCordon == ""
			if none != (g.WaitingCordonSince == nil) || none != (last.Text("waiting_cordon_since") == "") ||
				last.Text("waiting_cordon") != g.WaitingCordon || last.AggregateVersion != g.Version {
				t.Errorf("%s: the gate has %q since %v, its last event %v", what, g.WaitingCordon, g.WaitingCordonSince, last)
			}
			if strings.Contains(g.WaitingCordon, "the host is not as it was accepted") {
				shown++
			}
		}
		c := k.cordons()
		c.Waiting = waiting
		if err := c.Measure(k.ctx, k.db.Pool(pg.RoleLifecycle)); err != nil {
			t.Fatal(err)
		}
		families, err := registry.Gather()
		if err != nil || len(families) != 1 {
			t.Fatal(families, err)
		}
		if n := families[0].GetMetric()[0].GetGauge().GetValue(); shown != wait || int(n) != wait {
			t.Errorf("%s: %d cordons are shown as waiting, %v counted, want %d", what, shown, n, wait)
		}
	}
	nodes := k.nodes(4)
	var batch []events.Record
	for _, node := range nodes {
		batch = append(batch, k.verdict(node, 1, runtimeDrift, 0, true))
	}
	k.applied(batch...)
	want("four of four differ", nodes, 4)
	since := k.get(nodes[1]).WaitingCordonSince
	k.applyVerdict(nodes[0], 2, 0, runtimeDrift, false)
	want("one is over", nodes, 3)
	if now := k.get(nodes[1]).WaitingCordonSince; !now.Equal(*since) {
		t.Errorf("it waits since %v, then since %v", since, now)
	}
	k.personCordons(nodes[1], true)
	want("a person cordons one", nodes, 3)
	k.applyVerdict(nodes[2], 2, 0, runtimeDrift, false)
	want("two are left, which are few", nodes, 0)
	k.wantCordon(nodes[3], byVerdict)
}

// TestTheShareThatVerdictsCordonIsThePolicys: with brake.fleet_fraction of a half, five of ten are not too many.
func TestTheShareThatVerdictsCordonIsThePolicys(t *testing.T) {
	k := newKit(t)
	set, err := policy.NewSet(map[string]string{policy.BrakeFleetFraction: "0.5"})
	if err != nil {
		t.Fatal(err)
	}
	k.set = &set
	nodes := k.nodes(10)
	var batch []events.Record
	for _, node := range nodes[:5] {
		batch = append(batch, k.verdict(node, 1, runtimeDrift, 0, true))
	}
	k.applied(batch...)
	if got := k.cordoned(nodes); got != 5 {
		t.Errorf("%d nodes are cordoned, want 5", got)
	}
}

// TestAWithheldCordonIsSetWithoutAnotherVerdict: the policy lets more nodes fail, or the fleet has grown, and no
// verdict changes afterwards.
func TestAWithheldCordonIsSetWithoutAnotherVerdict(t *testing.T) {
	k := newKit(t)
	nodes := k.nodes(10)
	var batch []events.Record
	for _, node := range nodes[:4] {
		batch = append(batch, k.verdict(node, 1, runtimeDrift, 0, true))
	}
	k.applied(batch...)
	k.release(0)
	if got := k.cordoned(nodes); got != 0 {
		t.Fatalf("%d of 10 nodes are cordoned, want none while four differ", got)
	}
	set, err := policy.NewSet(map[string]string{policy.BrakeFleetFraction: "0.5"})
	if err != nil {
		t.Fatal(err)
	}
	k.set = &set
	k.release(4)
	for _, node := range nodes[:4] {
		k.wantCordon(node, byVerdict)
	}
	before := fmt.Sprint(k.versions(nodes[0]))
	k.release(0)
	if after := fmt.Sprint(k.versions(nodes[0])); after != before {
		t.Errorf("a round without work changed the gate: versions %s, then %s", before, after)
	}
}

// TestMoreWithheldCordonsThanOneBatchAreSet: one call sets all.
func TestMoreWithheldCordonsThanOneBatchAreSet(t *testing.T) {
	k := newKit(t)
	nodes := k.nodes(220)
	var batch []events.Record
	for _, node := range nodes[:110] {
		batch = append(batch, k.verdict(node, 1, runtimeDrift, 0, true))
	}
	k.applied(batch...)
	set, err := policy.NewSet(map[string]string{policy.BrakeFleetFraction: "0.5"})
	if err != nil {
		t.Fatal(err)
	}
	k.set = &set
	k.release(110)
	if got := k.cordoned(nodes); got != 110 {
		t.Errorf("%d nodes are cordoned, want the 110 that differ", got)
	}
}

// TestACordonThatStandsIsNotWithheld: the hosts of a cordoned node differ in another way while too many nodes differ.
// Its cordon passes to a person's and comes back.
func TestACordonThatStandsIsNotWithheld(t *testing.T) {
	k := newKit(t)
	nodes := k.nodes(20)
	k.applyVerdict(nodes[0], 1, runtimeDrift, 0, true)
	var batch []events.Record
	for _, node := range nodes[1:8] {
		batch = append(batch, k.verdict(node, 1, runtimeDrift, 0, true))
	}
	k.applied(batch...)
	k.applyVerdict(nodes[0], 2, runtimeDrift, 0, false) // for another reason
	k.personCordons(nodes[0], true)
	k.personCordons(nodes[0], false)
	if g := k.get(nodes[0]); g.CordonedBy != byVerdict {
		t.Errorf("cordoned by %q, want by the verdict that had cordoned it before", g.CordonedBy)
	}
	if got := k.cordoned(nodes); got != 1 {
		t.Errorf("%d nodes are cordoned, want one", got)
	}
}

// release sets the cordons that waited, and checks how many.
func (k *kit) release(want int) {
	k.t.Helper()
	got, err := k.cordons().Release(k.ctx, k.db.Pool(pg.RoleLifecycle))
	if err != nil || got != want {
		k.t.Errorf("%d cordons that waited were set (%v), want %d", got, err, want)
	}
}
