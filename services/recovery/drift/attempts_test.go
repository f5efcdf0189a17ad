package drift_test

import (
	"context"
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
func (k *kit) attempt(n *machine, way string, outcome commonv1.Reason) {
	k.t.Helper()
	k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		_, err := events.Append(ctx, tx, events.Event{
			Kind: "enrollment.attempted", AggregateType: "enrollment_attempt", AggregateID: n.id() + "/" + names.Of(outcome),
			AggregateVersion: 1, Payload: &recoveryv1.EnrollmentAttempted{NodeId: n.id(), Way: way, Outcome: outcome},
			Correlation: events.Correlation{CorrelationID: "attempt-0001"},
		})
		return err
	}))
	k.put()
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
	// What was refused before a session is over with the session.
	k.attempt(n, "recovery", commonv1.Reason_REASON_TOKEN_CONSUMED)
	k.round()
	k.back(n)
	k.round()
	k.lose(n)
	k.round()
	k.wantReasons(n.id(), tokenMissing, unspecified, tokenMissing, unspecified)
}
