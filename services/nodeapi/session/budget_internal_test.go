package session

import (
	"strconv"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// is returns a proof with that result.
func is(proven bool) func() bool { return func() bool { return proven } }

// TestTheJoinStateIsVerifiedOnceTheUnprovenBudgetIsUsedUp checks that openings within the unproven budget cost no check
// of a signature, and that an agent goes on beside it by its proof.
func TestTheJoinStateIsVerifiedOnceTheUnprovenBudgetIsUsedUp(t *testing.T) {
	b := newBudgets(Limits{OpenBurst: 3, OpenEvery: 10 * time.Second})
	now := time.Unix(1000, 0)
	p := payer{node: "node", serial: "01", source: "192.0.2.1/32"}
	checks := 0
	proof := func() bool { checks++; return true }
	for range 3 {
		if wait := b.charge(p, proof, now); wait != 0 || checks != 0 {
			t.Fatalf("within the budget: wait %s, %d checks", wait, checks)
		}
	}
	for i := range 3 {
		if wait := b.charge(p, proof, now); wait != 0 || checks != i+1 {
			t.Fatalf("beyond it: wait %s, %d checks", wait, checks)
		}
	}
	if b.charge(p, proof, now) != 10*time.Second {
		t.Error("with both used up the stream is not refused")
	}
	b.noteDecision(p, fault.New(commonv1.Reason_REASON_SERIAL_UNKNOWN, ""), now)
	if checks = 0; b.charge(p, proof, now.Add(time.Minute)) != 0 || checks != 1 {
		t.Errorf("a certificate that was refused: %d checks", checks)
	}
}

func TestBudgetsOfOneCertificateAreApart(t *testing.T) {
	b := newBudgets(Limits{OpenBurst: 3, OpenEvery: 10 * time.Second})
	now := time.Unix(1000, 0)
	drain := func(p payer, proven bool) int {
		for n := 0; ; n++ {
			if b.charge(p, is(proven), now) > 0 {
				return n
			}
		}
	}
	thief := payer{node: "node", serial: "01", source: "192.0.2.1/32"}
	if got := drain(thief, false); got != 3 {
		t.Errorf("%d unproven openings", got)
	}
	if wait := b.exhausted(thief, now); wait != 0 {
		t.Errorf("the certificate is shut out for %s although its node may come", wait)
	}
	elsewhere := thief
	elsewhere.source = "192.0.2.2/32"
	if got := drain(elsewhere, false); got != 3 {
		t.Errorf("%d unproven openings from another address", got)
	}
	if got := drain(thief, true); got != 3 {
		t.Errorf("%d proven openings beside them", got)
	}
	if wait := b.exhausted(thief, now); wait != 10*time.Second {
		t.Errorf("with nothing left the wait is %s", wait)
	}
	next := thief
	next.serial = "02"
	if got := drain(next, false); got != 3 {
		t.Errorf("%d openings of the node's next certificate", got)
	}
	shut := payer{node: "held", serial: "03", source: thief.source, often: true}
	if drain(shut, true); b.charge(shut, is(true), now.Add(oftenEvery)) != 0 {
		t.Error("a node that is shut out may not ask at the pace that it is told")
	}
}

func TestARefusedSerialHasTheSmallestBudget(t *testing.T) {
	b := newBudgets(Limits{OpenBurst: 3, OpenEvery: 10 * time.Second})
	now := time.Unix(1000, 0)
	p := payer{node: "node", serial: "01", source: "192.0.2.1/32"}
	// A refusal that the content of a Hello can cause does not count against the serial.
	for _, reason := range []commonv1.Reason{
		commonv1.Reason_REASON_CHALLENGE_FAILED, commonv1.Reason_REASON_IDENTITY_MISMATCH,
		commonv1.Reason_REASON_JOIN_STATE_LOST, commonv1.Reason_REASON_UNAVAILABLE,
	} {
		if b.noteDecision(p, fault.New(reason, ""), now); b.isRefused(p.certificate(), now) {
			t.Errorf("%s counts against the serial", reason)
		}
	}
	b.noteDecision(p, fault.New(commonv1.Reason_REASON_SERIAL_UNKNOWN, ""), now)
	if b.charge(p, is(false), now) != 0 || b.charge(p, is(false), now) != refusedEvery {
		t.Error("a refused serial may ask more than once")
	}
	other := p
	other.source = "192.0.2.2/32"
	if b.charge(other, is(false), now) == 0 {
		t.Error("a refused serial may ask again from another address")
	}
	// After a restore of the database one opening with a serial may be refused and another welcomed: a stream that
	// presents the join state is charged to the proven budget.
	if b.charge(p, is(true), now) != 0 {
		t.Error("a refused serial keeps a proven stream out")
	}
	if b.noteDecision(p, nil, now); b.isRefused(p.certificate(), now) {
		t.Error("an admitted serial stays refused")
	}
	b.noteDecision(p, fault.New(commonv1.Reason_REASON_SERIAL_SUPERSEDED, ""), now)
	if b.isRefused(p.certificate(), now.Add(refusedFor+time.Second)) {
		t.Error("a refusal is remembered for ever")
	}
}

func TestTablesOfBudgetsAreBounded(t *testing.T) {
	o := newOpens(1, time.Hour)
	o.buckets.most = 100
	now := time.Unix(1000, 0)
	key := func(i int) openKey { return keyOf("n", strconv.Itoa(i), "") }
	for i := range 1000 {
		if o.take(key(i), now) != 0 {
			t.Fatalf("key %d is refused", i)
		}
	}
	if n := len(o.buckets.entries); n != 100 || o.buckets.order.Len() != 100 {
		t.Errorf("%d entries", n)
	}
	if o.peek(key(999), now) == 0 || o.peek(key(0), now) != 0 {
		t.Error("not the one used longest ago was forgotten")
	}
	o.take(key(1), now.Add(2*time.Hour))
	if n := len(o.buckets.entries); n != 1 {
		t.Errorf("%d entries are kept of keys that are full again", n)
	}
}

func TestSources(t *testing.T) {
	for remote, want := range map[string]string{
		"192.0.2.7:1234": "192.0.2.7/32", "[2001:db8:1:2:3:4:5:6]:1234": "2001:db8:1:2::/64",
		"[::ffff:192.0.2.7]:1": "192.0.2.7/32", "[fe80::1%eth0]:1": "fe80::/64", "pipe": "pipe",
	} {
		if got := sourceOf(remote); got != want {
			t.Errorf("source of %s is %s, want %s", remote, got, want)
		}
	}
}
