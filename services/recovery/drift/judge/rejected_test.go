package judge_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	expired   = commonv1.Reason_REASON_CERTIFICATE_EXPIRED
	untrusted = commonv1.Reason_REASON_CERTIFICATE_UNTRUSTED
	invalid   = commonv1.Reason_REASON_CERTIFICATE_INVALID
)

// refusal returns what a replica reports of a client that claims to be a node and was refused just now.
func (k *kit) refusal(node string, reason commonv1.Reason) *nodev1.IngressRejected {
	k.t.Helper()
	at := timestamppb.New(k.now())
	return &nodev1.IngressRejected{
		RejectionId: ids.New(), ReplicaId: k.replica, ClaimedNodeId: node, ClaimedSan: "spiffe://mesh.test/node/" + node,
		Serial: "4711", Reason: reason, FirstSeenAt: at, LastSeenAt: at, Count: 1, RemoteAddress: "203.0.113.7",
	}
}

// issued records that recovery issued a certificate to a node, which is its current one and ends after the given time.
func (k *kit) issued(node, serial, issuer string, life time.Duration) {
	k.t.Helper()
	db := k.db.Pool(pg.RoleRecovery)
	_, err := db.Exec(k.ctx, `INSERT INTO recovery.identity (node_id, name, state) VALUES ($1, $2, 'pending')
		ON CONFLICT DO NOTHING`, node, "n-"+node)
	k.must(err)
	_, err = db.Exec(k.ctx, `INSERT INTO recovery.serial (serial, node_id, node_instance_id, chain_pem, issuer_fingerprint,
		state, not_before, not_after) VALUES ($1, $2, $3, '', $4, 'current', mesh.clock() - interval '1 minute',
		mesh.clock() + make_interval(secs => $5))`, serial, node, ids.New(), issuer, life.Seconds())
	k.must(err)
}

// TestRefusedClientsAreEvidenceOfADisconnectedNode checks what follows from each reason of a refusal, and that it ends
// when no client has been refused for some minutes.
func TestRefusedClientsAreEvidenceOfADisconnectedNode(t *testing.T) {
	for _, tt := range []struct {
		name     string
		reason   commonv1.Reason
		ours     time.Duration // the life of the certificate in recovery's records; zero: none
		recorded string        // its issuer
		claimed  string
		want     commonv1.DriftReason
		severity commonv1.Severity
	}{
		{"expired", expired, 0, "", "", certExpired, p1},
		{"invalid", invalid, 0, "", "", rejected, p1},
		{"untrusted, of no certificate of ours", untrusted, 0, "", "f00d", rejected, p1},
		{"untrusted, of our current certificate", untrusted, time.Hour, "f00d", "f00d", certUntrusted, p0},
		{"untrusted, of our current certificate without its issuer", untrusted, time.Hour, "f00d", "", rejected, p1},
		{"untrusted, with our serial and another issuer", untrusted, time.Hour, "f00d", "beef", rejected, p1},
		{"untrusted, of ours and past its time", untrusted, -time.Second, "f00d", "f00d", rejected, p1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKit(t)
			k.preflight("unknown", "", "") // it has not proven that the ingress trusts the authority
			n := k.up()
			k.tokened(n)
			if tt.ours != 0 {
				k.issued(n.id(), "4711", tt.recorded, tt.ours)
			}
			k.listen(10 * time.Second)
			k.lose(n)
			k.round()
			k.wantReasons(n.id())
			k.listen(5 * time.Second)
			f := k.refusal(n.id(), tt.reason)
			f.IssuerFingerprint = tt.claimed
			k.put(f)
			k.round()
			v := k.wantReasons(n.id(), tt.want)
			if v.GetSeverity() != tt.severity || v.GetCorrelationId() != f.GetRejectionId() ||
				!v.GetObservedAt().AsTime().Equal(f.GetFirstSeenAt().AsTime()) {
				t.Errorf("verdict %v", v)
			}
			found := false
			for _, e := range v.GetEvidence() {
				found = found || e.GetSource() == ingress && e.GetReason() == tt.want &&
					e.GetFreshUntil().AsTime().Equal(k.now().Add(5*time.Minute)) && e.GetDetail()[:11] == "unverified:"
			}
			if !found {
				t.Errorf("evidence %v", v.GetEvidence())
			}
			k.listen(5*time.Minute + time.Second)
			k.put() // reads the event of the verdict: while events are unread for long, silence does not count
			k.round()
			if v := k.wantReasons(n.id(), tt.want, agentDown); v.GetEnded().GetReason() != tt.want {
				t.Errorf("ended: %v", v.GetEnded())
			}
		})
	}
}

// TestARejectionCountsForAsLongAsIsSet: five seconds in place of five minutes.
func TestARejectionCountsForAsLongAsIsSet(t *testing.T) {
	k := newKit(t)
	k.evidence.RejectedFresh = 5 * time.Second
	k.judge = k.another()
	n := k.up()
	k.tokened(n)
	k.listen(10 * time.Second)
	k.lose(n)
	k.round()
	k.listen(time.Second)
	k.put(k.refusal(n.id(), expired))
	k.round()
	k.wantReasons(n.id(), certExpired)
	k.listen(6 * time.Second)
	k.put()
	k.round()
	if v := k.verdicts(n.id()); len(v) != 2 || v[1].GetEnded().GetReason() != certExpired {
		t.Errorf("the verdicts are %v", v)
	}
}

// TestAClaimIsNoProofAgainstThePreflight checks that a client that shows a certificate of its own with the numbers of a
// live one makes no P0 while the preflight has proven that the ingress trusts the authority.
func TestAClaimIsNoProofAgainstThePreflight(t *testing.T) {
	for state, want := range map[string]commonv1.DriftReason{
		"ok": rejected, "unknown": certUntrusted, "mismatch": certUntrusted,
	} {
		t.Run(state, func(t *testing.T) {
			k := newKit(t)
			n := k.up()
			k.tokened(n)
			k.issued(n.id(), "4711", "f00d", time.Hour)
			_, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, `UPDATE recovery.ca_preflight SET state = $1`, state)
			k.must(err)
			k.listen(5 * time.Second)
			k.lose(n)
			k.listen(5 * time.Second)
			f := k.refusal(n.id(), untrusted)
			f.IssuerFingerprint = "f00d"
			k.put(f)
			k.round()
			k.wantReasons(n.id(), want)
		})
	}
}

// TestAConnectedNodeIsNotAffectedByClaims checks that a client that claims another's name changes nothing for a node
// that is connected, not even once it goes for a moment and returns.
func TestAConnectedNodeIsNotAffectedByClaims(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.issued(n.id(), "4711", "f00d", time.Hour)
	k.listen(5 * time.Second)
	for _, reason := range []commonv1.Reason{expired, untrusted, invalid} {
		k.put(k.refusal(n.id(), reason))
		k.round()
	}
	k.wantReasons(n.id())
	k.listen(5 * time.Second)
	before := k.refusal(n.id(), expired) // is reported when the session that follows it has ended
	k.back(n)
	k.listen(5 * time.Second)
	k.round()
	k.lose(n)
	k.round()
	k.wantReasons(n.id()) // what was refused before its last session is over
	k.put(before)
	k.round()
	k.wantReasons(n.id())
	late := k.refusal(n.id(), expired)
	late.FirstSeenAt = timestamppb.New(k.now().Add(-time.Hour))
	late.LastSeenAt = late.GetFirstSeenAt()
	k.put(late)
	k.round()
	k.wantReasons(n.id())
	k.tokened(n)
	late.LastSeenAt = timestamppb.New(k.now())
	k.put(late)
	k.round()
	if v := k.wantReasons(n.id(), certExpired); !v.GetObservedAt().AsTime().Equal(late.GetLastSeenAt().AsTime()) {
		t.Errorf("observed at %s, before it was heard last", v.GetObservedAt().AsTime())
	}
}

// TestRejectionsThatGoOnAreOneVerdict checks that reports of the same rejection neither change the verdict nor write a
// row each, and keep it; and that a milder claim does not hide a worse one.
func TestRejectionsThatGoOnAreOneVerdict(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.tokened(n)
	k.listen(5 * time.Second)
	k.lose(n)
	f := k.refusal(n.id(), expired)
	k.put(f)
	k.round()
	writes := 0
	for range 12 {
		k.listen(time.Minute)
		f = proto.CloneOf(f)
		f.LastSeenAt, f.Count = timestamppb.New(k.now()), f.GetCount()+40
		other := k.refusal(n.id(), invalid)
		k.append(f, other)
		evidence := k.evidenceOf(n.id())
		k.put()
		if k.evidenceOf(n.id()) != evidence {
			writes++
		}
		k.round()
	}
	k.wantReasons(n.id(), certExpired)
	if writes > 5 {
		t.Errorf("evidence was written %d times in 12 minutes", writes)
	}
}

// evidenceOf returns the row of evidence of the ingress about a node, with its place.
func (k *kit) evidenceOf(node string) string {
	k.t.Helper()
	var out string
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT e.reason || e.fresh_until FROM recovery.evidence e
		WHERE e.node_id = $1 AND e.source = 'ingress'`, node).Scan(&out))
	return out
}

// TestClaimsChangeNoIdentity checks that a wave of rejections of many nodes, connected and not, changes no identity and
// no connected node's verdict, and that claims of nodes that do not exist, or of reasons of a newer build, leave
// nothing.
func TestClaimsChangeNoIdentity(t *testing.T) {
	const count = 200
	k := newKit(t)
	nodes := make([]*machine, count)
	var all []proto.Message
	for i := range nodes {
		nodes[i] = k.made()
		all = append(all, nodes[i].identity, nodes[i].session)
	}
	k.put(all...)
	k.round()
	all = nil
	for i, n := range nodes {
		k.issued(n.id(), ids.New(), "f00d", time.Hour)
		k.tokened(n)
		if i%2 == 0 {
			n.session.State, n.session.LastSeenAt = closedState, timestamppb.New(k.now())
			n.session.ClosedAt = n.session.GetLastSeenAt()
			all = append(all, n.session)
		}
	}
	k.listen(5 * time.Second)
	k.put(all...)
	k.round()
	const states = `SELECT count(*) FROM recovery.identity WHERE state = 'pending'`
	seen := k.count(`SELECT count(*) FROM recovery.evidence`)
	k.put(k.refusal(ids.New(), untrusted), k.refusal("not an id", expired), k.refusal("", expired),
		k.refusal(nodes[0].id(), commonv1.Reason(4711)), &nodev1.IngressRejected{RejectionId: ids.New()})
	if now := k.count(`SELECT count(*) FROM recovery.evidence`); now != seen {
		t.Errorf("%d rows of evidence, %d before", now, seen)
	}
	all = nil
	for _, n := range nodes {
		all = append(all, k.refusal(n.id(), untrusted))
	}
	k.put(all...)
	k.round()
	if n := k.count(states); n != count {
		t.Errorf("%d identities are as they were, not %d", n, count)
	}
	if n := k.count(`SELECT count(*) FROM events.event WHERE kind = 'node_identity.changed'`); n != count {
		t.Errorf("%d events of identities", n)
	}
	for i, n := range nodes {
		if i%2 == 0 {
			k.wantReasons(n.id(), rejected)
		} else {
			k.wantReasons(n.id())
		}
	}
}
