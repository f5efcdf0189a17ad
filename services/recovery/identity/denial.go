package identity

import (
	"context"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

func (b *opening) denied(o *recoveryv1.OpenSession, r *Record, reason commonv1.Reason) *recoveryv1.OpenResult {
	result := &recoveryv1.OpenResult{
		SessionId: o.GetSessionId(), Verdict: recoveryv1.OpenVerdict_OPEN_VERDICT_DENIED, Denial: b.refusal(reason),
		Era: b.moment.Era,
	}
	if r != nil {
		result.FenceEpoch = r.FenceEpoch
	}
	return result
}

// refused returns a denial, like denied, for a Hello of which nothing is stored. A refusal because a record is missing
// is counted with the others of the batch.
func (b *opening) refused(o *recoveryv1.OpenSession, r *Record, reason commonv1.Reason,
	use judge.CertificateUse,
) *recoveryv1.OpenResult {
	result := b.denied(o, r, reason)
	b.suspects.add(o.GetNodeId(), reason, use, &result.Denial)
	return result
}

// refusal returns the denial that an agent is sent for a reason.
func (b *opening) refusal(reason commonv1.Reason) *commonv1.Denial {
	return denial(b.ctx, rollback.Soften(reason, b.moment.RolledBack))
}

func denial(ctx context.Context, reason commonv1.Reason) *commonv1.Denial {
	return fault.ToDenial(fault.New(reason, ""), obs.From(ctx).CorrelationID)
}
