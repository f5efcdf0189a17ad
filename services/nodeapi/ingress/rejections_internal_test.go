package ingress

import (
	"context"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type counts struct{ rejected, forgotten int }

func (c *counts) IngressRejected(string) { c.rejected++ }

func (c *counts) IngressForgotten() { c.forgotten++ }

// kit is a set of rejections whose clocks are the test's.
type kit struct {
	*Rejections

	counts counts
	at     time.Time
	exist  map[string]bool
}

func newKit() *kit {
	k := &kit{at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), exist: map[string]bool{}}
	k.Rejections = New(Deps{
		ReplicaID: "r1", TrustDomain: "mesh.test", Metrics: &k.counts, Wake: func() {},
		Known: func(id string) bool { return k.exist[id] },
		Now:   func() time.Time { return k.at },
	})
	k.elapsed = func() time.Time { return k.at }
	return k
}

func (k *kit) refuse(node string, reason pki.RejectReason) {
	id := pki.NodeID("mesh.test", node)
	k.Refused(pki.Reject{
		Reason: reason, Claimed: pki.Claim{SAN: id.String(), ID: id, Serial: "a1"}, Remote: "203.0.113.7:4711",
	})
}

// TestInventedNamesPushOutNothing checks that a flood of claimed names is bounded in memory and in events, that what is
// pushed out is counted, and that the rejections of a node that exists are as they were.
func TestInventedNamesPushOutNothing(t *testing.T) {
	k := newKit()
	node := ids.New()
	k.exist[node] = true
	k.refuse(node, pki.RejectExpired)
	const flood = 10_000
	wrote := 0
	for i := range flood {
		k.refuse(ids.New(), pki.RejectUnknownAuthority)
		if i%100 == 0 { // a write a second
			k.at = k.at.Add(pace)
			due, _ := k.take(k.at)
			wrote += len(due)
		}
	}
	k.refuse(node, pki.RejectExpired)
	if n := len(k.unknown.entries) + len(k.known.entries); n > 257 || k.unknown.recent.Len() != len(k.unknown.entries) {
		t.Errorf("%d entries are kept", n)
	}
	for range flood { // while the database is away nothing is taken
		k.refuse(ids.New(), pki.RejectUnknownAuthority)
	}
	if n := len(k.unknown.waiting); n > 2*k.unknown.most {
		t.Errorf("%d entries wait", n)
	}
	if k.counts.rejected != 2*flood+2 || k.counts.forgotten < 2*flood-k.unknown.most {
		t.Errorf("counted %+v", k.counts)
	}
	if most := 2*flood/100 + 3; wrote > most {
		t.Errorf("%d events, more than %d", wrote, most)
	}
	for _, e := range k.known.entries {
		if e.fact.GetCount() != 2 || e.fact.GetClaimedNodeId() != node {
			t.Errorf("of the node that exists: %v", e.fact)
		}
	}
}

// TestAtMostOneEventAMinute checks the cadence of the events of one claimed node and reason.
func TestAtMostOneEventAMinute(t *testing.T) {
	k := newKit()
	node := ids.New()
	k.exist[node] = true
	var versions []int64
	first := k.at
	for range 600 { // ten minutes, one second each
		k.refuse(node, pki.RejectExpired)
		due, _ := k.take(k.at)
		for _, d := range due {
			versions = append(versions, d.fact.GetVersion())
			if !d.fact.GetFirstSeenAt().AsTime().Equal(first) || !d.fact.GetLastSeenAt().AsTime().Equal(k.at) ||
				d.fact.GetCount() != int64(k.at.Sub(first)/time.Second)+1 {
				t.Errorf("at %s: %v", k.at, d.fact)
			}
		}
		k.at = k.at.Add(time.Second)
	}
	if len(versions) != 10 {
		t.Errorf("%d events in ten minutes", len(versions))
	}
	for i := 1; i < len(versions); i++ {
		if versions[i] <= versions[i-1] {
			t.Errorf("versions %v", versions)
		}
	}
	// A last rejection is written when its minute is over, without another.
	k.refuse(node, pki.RejectExpired)
	due, next := k.take(k.at)
	if len(due) != 1 {
		k.at = k.at.Add(next)
		due, _ = k.take(k.at)
	}
	if len(due) != 1 {
		t.Errorf("%d due after %s", len(due), next)
	}
	// After a pause it begins anew.
	k.at = k.at.Add(forgetAfter + time.Second)
	k.refuse(node, pki.RejectExpired)
	if due, _ = k.take(k.at); len(due) != 1 || due[0].fact.GetCount() != 1 {
		t.Errorf("after a pause: %v", due)
	}
}

// TestTheSameClaimHasTheSameID checks that the aggregate's id depends on replica, claimed node and reason alone.
func TestTheSameClaimHasTheSameID(t *testing.T) {
	node := ids.New()
	id := func(replica, node string, reason pki.RejectReason) string {
		k := newKit()
		k.deps.ReplicaID = replica
		k.refuse(node, reason)
		due, _ := k.take(k.at)
		return due[0].fact.GetRejectionId()
	}
	same := id("r1", node, pki.RejectExpired)
	if id("r1", node, pki.RejectExpired) != same {
		t.Error("another id for the same claim")
	}
	for _, other := range []string{
		id("r2", node, pki.RejectExpired), id("r1", ids.New(), pki.RejectExpired), id("r1", node, pki.RejectIdentity),
	} {
		if other == same {
			t.Error("two claims have one id")
		}
	}
}

// TestWhatIsNoClaimOfANode checks that names of services, of other meshes and of no form claim no node, and that what
// is not about a certificate is not kept.
func TestWhatIsNoClaimOfANode(t *testing.T) {
	k := newKit()
	for _, id := range []pki.ID{
		{}, pki.ServiceID("mesh.test", "recovery"), pki.NodeID("other.test", ids.New()), pki.NodeID("mesh.test", "x"),
	} {
		k.Refused(pki.Reject{Reason: pki.RejectIdentity, Claimed: pki.Claim{SAN: id.String(), ID: id}})
	}
	for _, reason := range []pki.RejectReason{
		pki.RejectNoCertificate, pki.RejectTimeout, pki.RejectClosed, pki.RejectProtocol, pki.RejectByPeer,
		pki.RejectOverload,
	} {
		k.Refused(pki.Reject{Reason: reason})
	}
	for range 2 {
		due, _ := k.take(k.at)
		for _, d := range due {
			if d.fact.GetClaimedNodeId() != "" || d.known {
				t.Errorf("claims a node: %v", d.fact)
			}
		}
	}
	if n := len(k.unknown.entries); n != 4 || k.counts.rejected != 4 {
		t.Errorf("%d entries, %d counted", n, k.counts.rejected)
	}
}

// TestWhatCouldNotBeWrittenWaits checks that a failed write is made up for, once.
func TestWhatCouldNotBeWrittenWaits(t *testing.T) {
	testkit.IO(t)
	k := newKit()
	db := testkit.DB(t)
	k.deps.DB, k.deps.Logger = db.Pool(pg.RoleNodeAPI), testkit.Logger(t)
	for i := range 3 {
		node := ids.New()
		k.exist[node] = i > 0
		k.refuse(node, pki.RejectExpired)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if next := k.flush(ended); next == 0 {
		t.Error("a failed write is not tried again")
	}
	k.flush(t.Context())
	k.flush(t.Context())
	list, err := testkit.ReadEvents(t.Context(), db.Pool(pg.RoleReadmodel), `kind = 'ingress.rejected'`)
	if err != nil || len(list) != 3 {
		t.Fatalf("%d events, %v", len(list), err)
	}
	named := 0
	for _, e := range list {
		if e.NodeID != "" {
			named++
		}
	}
	if named != 2 {
		t.Errorf("%d events stand in a node's timeline, not those 2 of nodes that exist", named)
	}
}
