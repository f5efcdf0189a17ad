package fleet

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// ReleaseBrake releases the brake on a person's decision, so that automatic recoveries go on. If the brake is not
// engaged the request is refused, since its reason would be recorded without a release.
func (f *Fleet) ReleaseBrake(ctx context.Context,
	req *recoveryv1.ReleaseBrakeRequest,
) (*recoveryv1.ReleaseBrakeResponse, error) {
	out := &recoveryv1.ReleaseBrakeResponse{}
	by := rpc.ActorFrom(ctx)
	err := pg.InTx(ctx, f.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		b, err := readBrake(ctx, tx, true)
		if err != nil {
			return err
		}
		if !b.Engaged {
			return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the fleet brake is not engaged",
				fault.Unmet("no fleet brake is engaged that could be released"),
				fault.Remedy("nothing is to be done: automatic remedies are at work"))
		}
		now, err := Clock(ctx, tx)
		if err != nil {
			return err
		}
		if err := release(ctx, tx, b, by, req.GetReason(), now); err != nil {
			return err
		}
		if out.Pos, err = b.save(ctx, tx, true); err != nil {
			return err
		}
		out.Brake = b.Proto()
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("release the brake: %w", err)
	}
	f.deps.Wake.Notify()
	f.deps.Logger.WarnContext(ctx, "the fleet brake was released", slog.String("by", by),
		slog.String("reason", req.GetReason()))
	return out, nil
}
