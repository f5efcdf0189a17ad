package judge_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
)

// fleetOf returns nodes that are connected, with rows of identities as recovery has them.
func (k *kit) fleetOf(count int) []*machine {
	k.t.Helper()
	out := make([]*machine, count)
	var messages []proto.Message
	for i := range out {
		out[i] = k.made()
		messages = append(messages, out[i].identity, out[i].session, out[i].gate)
	}
	k.put(messages...)
	k.round()
	for _, n := range out {
		_, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, `INSERT INTO recovery.identity
			(node_id, name, node_instance_id, state) VALUES ($1, $2, $3, 'active')`,
			n.id(), n.id(), n.identity.GetNodeInstanceId())
		k.must(err)
	}
	return out
}

// fill makes the disks of nodes full, all in one round.
func (k *kit) fill(nodes ...*machine) {
	k.t.Helper()
	k.disks(nodes, (*machine).full)
}

func (k *kit) empty(nodes ...*machine) {
	k.t.Helper()
	k.disks(nodes, func(n *machine) { n.gate.Host = nil })
}

func (k *kit) disks(nodes []*machine, change func(*machine)) {
	k.t.Helper()
	var gates []proto.Message
	for _, n := range nodes {
		change(n)
		gates = append(gates, n.gate)
	}
	k.put(gates...)
	k.listen(6 * time.Second)
	k.round()
}

func (k *kit) wantDrifts(when, want string) {
	k.t.Helper()
	k.wantIncidents("fleet_drift", when, want)
}

func (k *kit) wantIncidents(kind, when, want string) {
	k.t.Helper()
	var got string
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT coalesce(string_agg(concat_ws(' ', i.key, i.severity,
		i.count, cardinality(i.node_ids), CASE WHEN i.closed_at IS NULL THEN 'open' ELSE 'closed' END), ', '
		ORDER BY i.opened_at), '') FROM recovery.incident i WHERE i.kind = $1`, kind).Scan(&got))
	if got != want {
		k.t.Errorf("%s: incidents of kind %s are %q, want %q", when, kind, got, want)
	}
}

// incidentEvents returns how many events of incidents there are.
func (k *kit) incidentEvents() int {
	k.t.Helper()
	return k.count(`SELECT count(*) FROM events.event WHERE kind = 'incident.changed'`)
}

// TestManyNodesWithOneReasonAreOneIncident: of thirty nodes six may have a full disk at once. The seventh makes one
// incident, which names twenty nodes at most and keeps the verdicts on each; it goes on while half the share has it.
func TestManyNodesWithOneReasonAreOneIncident(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(30)
	k.fill(nodes[:6]...)
	k.wantDrifts("six of thirty", "")
	k.fill(nodes[6])
	k.wantDrifts("seven", "node_disk_full p1 7 7 open")
	for _, n := range nodes[:7] {
		k.wantReasons(n.id(), diskFull)
	}
	k.fill(nodes[7:25]...)
	k.wantDrifts("more than twice as many", "node_disk_full p1 25 20 open")
	k.empty(nodes[3:25]...)
	k.wantDrifts("half the share", "node_disk_full p1 25 20 open")
	k.empty(nodes[2])
	k.wantDrifts("less than half", "node_disk_full p1 25 20 closed")
	if n := k.incidentEvents(); n != 3 {
		t.Errorf("%d events of one incident, want 3", n)
	}
	before := k.digest()
	k.listen(time.Minute)
	if k.round(); k.digest() != before {
		t.Error("rounds without a change have written")
	}
}

// TestFailuresFarApartAreNoIncident checks that as many nodes with the same reason are no incident if it began on them
// over more than the window.
func TestFailuresFarApartAreNoIncident(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(30)
	for _, n := range nodes[:12] {
		k.fill(n)
		k.listen(time.Minute)
		k.round()
	}
	k.wantDrifts("one a minute", "")
}

// TestAFewNodesOfASmallFleetAreNoIncident: two may fail in any fleet. The third makes an incident.
func TestAFewNodesOfASmallFleetAreNoIncident(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(4)
	k.fill(nodes[:2]...)
	k.wantDrifts("two of four", "")
	k.fill(nodes[2])
	k.wantDrifts("three", "node_disk_full p1 3 3 open")
	k.empty(nodes[:3]...)
	k.wantDrifts("none", "node_disk_full p1 3 3 closed")
}

// TestTheShareOfTheFleetIsThePolicys: with brake.fleet_fraction of a half, ten of twenty are not too many.
func TestTheShareOfTheFleetIsThePolicys(t *testing.T) {
	k := newKit(t)
	var err error
	k.policy, err = policy.NewSet(map[string]string{policy.BrakeFleetFraction: "0.5"})
	k.must(err)
	k.judge = k.another()
	nodes := k.fleetOf(20)
	k.fill(nodes[:10]...)
	k.wantDrifts("ten of twenty", "")
	k.fill(nodes[10])
	k.wantDrifts("eleven", "node_disk_full p1 11 11 open")
}

// TestAnOutageIsNoIncidentOfItsNodes: while no replica of nodeapi listens nothing is concluded of its nodes. Those that
// do not come back after it are judged by themselves.
func TestAnOutageIsNoIncidentOfItsNodes(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(10)
	k.pass(10 * time.Minute)
	k.round()
	if v := k.verdicts(theFleet); len(v) != 1 || v[0].GetReason() != outage {
		t.Fatalf("verdicts on the control plane: %v", v)
	}
	k.wantDrifts("an outage", "")
	for _, n := range nodes {
		k.wantReasons(n.id())
	}
}

// TestAnIncidentThatReturnsSoonIsTheSame: nodes that lose and regain what they share every minute page once. After the
// window it is another incident.
func TestAnIncidentThatReturnsSoonIsTheSame(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(8)
	for n := range 4 {
		k.fill(nodes[:4+n]...)
		k.wantDrifts("it comes", fmt.Sprintf("node_disk_full p1 %d %[1]d open", 4+n))
		k.listen(time.Minute)
		k.empty(nodes...)
		k.wantDrifts("and goes", fmt.Sprintf("node_disk_full p1 %d %[1]d closed", 4+n))
	}
	k.listen(5*time.Minute + time.Second)
	k.fill(nodes[:3]...)
	k.wantDrifts("after the window", "node_disk_full p1 7 7 closed, node_disk_full p1 3 3 open")
}

// TestAnotherReplicaEndsAnIncident: the replica that opened it is gone, and another one, which has judged nothing
// since, finds that the fleet has grown to where that many may fail.
func TestAnotherReplicaEndsAnIncident(t *testing.T) {
	k := newKit(t)
	other := k.another()
	_, err := other.RunOnce(k.ctx) // it finds no incident
	k.must(err)
	nodes := k.fleetOf(6)
	k.fill(nodes[:3]...)
	k.wantDrifts("three of six", "node_disk_full p1 3 3 open")
	k.exec(`INSERT INTO recovery.identity (node_id, name, node_instance_id, state)
		SELECT gen_random_uuid(), 'more' || n, gen_random_uuid(), 'active' FROM generate_series(1, 60) n`)
	k.judge = other
	k.listen(31 * time.Second)
	k.round()
	k.wantDrifts("three of sixty-six", "node_disk_full p1 3 3 closed")
}

// TestPeoplesDecisionsAreNoIncident: nodes that are retired or fenced, as instances are at their end.
func TestPeoplesDecisionsAreNoIncident(t *testing.T) {
	k := newKit(t)
	for _, n := range k.fleetOf(8) {
		k.enter(n, retiredState, "")
	}
	k.round()
	k.wantDrifts("eight of eight retired", "")
}

// TestCopiesOfManyNodesAreP0: the severity is that of the reason.
func TestCopiesOfManyNodesAreP0(t *testing.T) {
	k := newKit(t)
	for _, n := range k.fleetOf(4) {
		k.enter(n, heldState, "cloned_identity_detected")
	}
	k.round()
	k.wantDrifts("four copies", "cloned_identity_detected p0 4 4 open")
	k.wantIncidents("identity_suspected", "beside that of many", "")
}

// TestACopyOfOneNodeIsAnIncidentForSecurity: it names the nodes that are on hold, and ends when none is any more. It
// goes on as the same if a node is soon after. One that a person has closed is opened again for other nodes alone.
func TestACopyOfOneNodeIsAnIncidentForSecurity(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(10)
	decide := func(n *machine, state commonv1.NodeIdentityState, alarm string) {
		t.Helper()
		k.exec(`UPDATE recovery.identity SET state = $2, alarm = $3 WHERE node_id = $1`, n.id(), names.Of(state), alarm)
		k.enter(n, state, alarm)
		k.listen(time.Minute)
		k.round()
	}
	want := func(when, want string) {
		t.Helper()
		k.wantIncidents("identity_suspected", when, want)
	}
	decide(nodes[0], heldState, "cloned_identity_detected")
	want("a copy", "cloned_identity_detected p0 1 1 open")
	decide(nodes[1], heldState, "cloned_identity_detected")
	want("another", "cloned_identity_detected p0 2 2 open")
	decide(nodes[0], activeState, "")
	want("one of two", "cloned_identity_detected p0 1 1 open")
	decide(nodes[1], activeState, "")
	want("none", "cloned_identity_detected p0 1 1 closed")
	decide(nodes[3], heldState, "cloned_identity_detected")
	want("one soon after", "cloned_identity_detected p0 1 1 open")
	decide(nodes[3], retiredState, "")
	want("none again", "cloned_identity_detected p0 1 1 closed")
	decide(nodes[2], heldState, "token_reuse")
	want("a token with two keys", "cloned_identity_detected p0 1 1 closed, token_reuse p0 1 1 open")
	k.exec(`UPDATE recovery.incident SET closed_at = mesh.clock(), closed_by = 'ada' WHERE closed_at IS NULL`)
	decide(nodes[4], heldState, "token_reuse")
	want("another after a person has closed it",
		"cloned_identity_detected p0 1 1 closed, token_reuse p0 1 1 closed, token_reuse p0 2 2 open")
	k.exec(`UPDATE recovery.incident SET closed_at = mesh.clock(), closed_by = 'ada' WHERE closed_at IS NULL`)
	decide(nodes[4], retiredState, "")
	want("fewer after a person has closed it",
		"cloned_identity_detected p0 1 1 closed, token_reuse p0 1 1 closed, token_reuse p0 2 2 closed")
	k.wantDrifts("few nodes", "")
}

// TestReplicasThatJudgeAtOnceOpenOneIncident: each of four replicas judges a part of the nodes; none sees enough of
// them by itself.
func TestReplicasThatJudgeAtOnceOpenOneIncident(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(12)
	judges := []*judge.Judge{k.judge, k.another(), k.another(), k.another()}
	for i := range nodes {
		nodes[i].full()
		k.put(nodes[i].gate)
	}
	k.listen(6 * time.Second)
	// One transaction locks most nodes while the others judge the rest.
	failed := make(chan error, len(judges))
	err := pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT FROM recovery.judgement WHERE node_id <> ALL ($1::uuid[]) FOR UPDATE`,
			[]string{nodes[0].id(), nodes[1].id()}); err != nil {
			return err
		}
		_, err := judges[0].RunOnce(k.ctx)
		return err
	})
	k.must(err)
	k.wantDrifts("two of twelve", "")
	for _, j := range judges {
		go func() {
			_, err := j.RunOnce(k.ctx)
			failed <- err
		}()
	}
	for range judges {
		k.must(<-failed)
	}
	k.wantDrifts("the rest", "node_disk_full p1 12 12 open")
}

// TestTheIncidentNamesItsNodesAndWhatToDo reads the incident as its event shows it.
func TestTheIncidentNamesItsNodesAndWhatToDo(t *testing.T) {
	k := newKit(t)
	nodes := k.fleetOf(3)
	k.fill(nodes...)
	k.must(k.sequencer.Drain(k.ctx))
	list, _, err := events.Read(k.ctx, k.db.Pool(pg.RoleRecovery), 0, []string{"incident.changed"}, 10)
	k.must(err)
	if len(list) != 1 {
		t.Fatalf("%d events, want 1", len(list))
	}
	i := &recoveryv1.Incident{}
	k.must(list[0].Decode(i))
	if len(i.GetNodeIds()) != 3 || i.GetSummary() == "" || i.GetNextAction() == "" || i.GetCount() != 3 {
		t.Error(fmt.Sprint(i))
	}
}
