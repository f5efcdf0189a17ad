package judge_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// attempt has a node's attempt to enrol reported.
func (k *kit) attempt(n *machine, way string, outcome commonv1.Reason,
	change ...func(*recoveryv1.EnrollmentAttempted),
) {
	k.t.Helper()
	attempted := &recoveryv1.EnrollmentAttempted{NodeId: n.id(), Way: way, Outcome: outcome}
	for _, c := range change {
		c(attempted)
	}
	k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		_, err := events.Append(ctx, tx, events.Event{
			Kind: "enrollment.attempted", AggregateType: "enrollment_attempt", AggregateID: n.id() + "/" + names.Of(outcome),
			AggregateVersion: 1, Payload: attempted, Correlation: events.Correlation{CorrelationID: "attempt-0001"},
		})
		return err
	}))
	k.put()
}

// TestAnOldJoinStateIsACopy: an attempt whose caller has proven the recovery key, with the join state of a copy, is a
// security matter while the node is not connected, and puts no node on hold.
func TestAnOldJoinStateIsACopy(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.lose(n)
	k.listen(time.Second)
	k.attempt(n, "bootstrap", commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED)
	k.round()
	k.wantReasons(n.id())
	k.attempt(n, "recovery", commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED)
	k.attempt(n, "recovery", commonv1.Reason_REASON_TOKEN_EXPIRED) // does not hide it
	k.round()
	v := k.wantReasons(n.id(), cloned)
	if v.GetSeverity() != p0 || v.GetUserState() != securityDue || v.GetCorrelationId() != "attempt-0001" {
		t.Errorf("verdict %v", v)
	}
	k.wantIncidents("identity_suspected", "a refused request, which holds no node", "")
	if n := k.count(`SELECT count(*) FROM events.event WHERE kind = 'node_identity.changed'`); n != 1 {
		t.Errorf("%d events of identities", n)
	}
	k.back(n)
	k.round()
	k.wantReasons(n.id(), cloned, unspecified)
	k.attempt(n, "recovery", commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED)
	k.round()
	k.wantReasons(n.id(), cloned, unspecified) // it is connected
}

// TestRecoveryThatThePolicyRefuses: an attempt that the policy refused does not bring the node back, for as long as the
// policy may be the same.
func TestRecoveryThatThePolicyRefuses(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.lose(n)
	k.listen(time.Second)
	k.attempt(n, "recovery", commonv1.Reason_REASON_AUTO_RECOVERY_OFF)
	k.round()
	if v := k.wantReasons(n.id(), blocked); v.GetUserState() != operator {
		t.Errorf("verdict %v", v)
	}
	k.listen(time.Hour + 5*time.Minute) // its agent tries again after an hour
	k.put()
	k.round()
	if v := k.last(n); v.GetReason() != blocked {
		t.Errorf("verdict %v", v)
	}
	k.listen(25 * time.Minute)
	k.put()
	k.round()
	if v := k.last(n); v.GetReason() != agentDown {
		t.Errorf("verdict %v", v)
	}
}

// TestARefusedRecoveryTokenIsMissing: a recovery token that was refused for its age, or because it has ended, is
// missing, while the node is not connected and until it has another certificate.
func TestARefusedRecoveryTokenIsMissing(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.attempt(n, "recovery", commonv1.Reason_REASON_TOKEN_EXPIRED)
	k.round()
	k.wantReasons(n.id()) // it is connected
	k.lose(n)
	k.listen(time.Second)
	k.attempt(n, "bootstrap", commonv1.Reason_REASON_TOKEN_EXPIRED)
	k.attempt(n, "recovery", commonv1.Reason_REASON_RECOVERY_LIMIT_REACHED)
	k.round()
	v := k.wantReasons(n.id(), tokenMissing)
	if v.GetCorrelationId() != "attempt-0001" {
		t.Errorf("correlation %q", v.GetCorrelationId())
	}
	k.attempt(n, "recovery", commonv1.Reason_REASON_UNSPECIFIED)
	k.round()
	if v := k.wantReasons(n.id(), tokenMissing, unspecified); v.GetReason() != unspecified {
		t.Errorf("after a recovery: %v", v)
	}
	// Refusals from before a session do not count any more once it is admitted.
	k.attempt(n, "recovery", commonv1.Reason_REASON_TOKEN_CONSUMED)
	k.round()
	k.back(n)
	k.round()
	k.lose(n)
	k.round()
	k.wantReasons(n.id(), tokenMissing, unspecified, tokenMissing, unspecified)
}

// TestARefusedRecoveryTokenCountsForAsLongAsIsSet: five seconds in place of until the node is back. A copy is not
// forgotten.
func TestARefusedRecoveryTokenCountsForAsLongAsIsSet(t *testing.T) {
	k := newKit(t)
	k.evidence.RefusedFresh = 5 * time.Second
	k.judge = k.another()
	n, copied := k.up(), k.up()
	k.lose(n)
	k.lose(copied)
	k.listen(time.Second)
	k.attempt(n, "recovery", commonv1.Reason_REASON_TOKEN_CONSUMED)
	k.attempt(copied, "recovery", commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED)
	k.round()
	k.wantReasons(n.id(), tokenMissing)
	k.listen(6 * time.Second)
	k.put()
	k.round()
	if v := k.last(n); v.GetEnded().GetReason() != tokenMissing {
		t.Errorf("verdict %v", v)
	}
	k.wantReasons(copied.id(), cloned)
}

// TestAHostThatHasLostItsTokenDoesNotRecover: recovery's own records have a token that it would accept, and the host
// says, with proof, that it has none to send. What is not proven changes no verdict.
func TestAHostThatHasLostItsTokenDoesNotRecover(t *testing.T) {
	for name, lost := range map[string]bool{
		"the host says that it has no recovery token to send":                                              false,
		"the host says that it has lost its recovery key, without which its recovery token proves nothing": true,
	} {
		k := newKit(t)
		n := k.refused(k.tokened)
		k.wantReasons(n.id(), certExpired)
		k.attempt(n, "recovery", commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING,
			func(a *recoveryv1.EnrollmentAttempted) { a.Unverified, a.KeyLost = true, lost })
		k.round()
		k.wantReasons(n.id(), certExpired)
		if rows := k.count(`SELECT count(*) FROM recovery.evidence WHERE source = 'enrollment'`); rows != 0 {
			t.Errorf("a claim that is not proven is kept as evidence: %d rows", rows)
		}
		k.attempt(n, "recovery", commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING,
			func(a *recoveryv1.EnrollmentAttempted) { a.KeyLost = lost })
		k.round()
		v := k.wantReasons(n.id(), certExpired, tokenMissing)
		if v.GetUserState() != operator || !slices.ContainsFunc(v.GetEvidence(), func(e *recoveryv1.Evidence) bool {
			return e.GetDetail() == name
		}) {
			t.Errorf("verdict %v", v)
		}
		k.put(k.refusal(n.id(), expired)) // its token in recovery's records is still good
		k.listen(3 * time.Minute)
		k.put(k.refusal(n.id(), expired))
		k.round()
		k.wantReasons(n.id(), certExpired, tokenMissing)
		k.back(n)
		k.round()
		k.wantReasons(n.id(), certExpired, tokenMissing, unspecified)
	}
}
