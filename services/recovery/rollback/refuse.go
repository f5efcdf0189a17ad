package rollback

import (
	"context"
	"errors"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

const reasonRollback = commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK

// Refusal returns the fault with which requests are refused in the mode.
func Refusal() *fault.Error { return fault.New(reasonRollback, "") }

// Refuse returns Refusal if the mode is active. People's commands and launches call it in the transaction of their
// change.
func Refuse(ctx context.Context, q pg.Querier) error {
	active, err := Active(ctx, q)
	if err != nil {
		return err
	}
	if active {
		return Refusal()
	}
	return nil
}

// Soften returns the reason with which an agent is refused. In the mode, a reason that would end a workload, or make
// the agent wait for a person or take another identity, becomes control_plane_rollback, on which the agent waits: the
// row that the refusal follows from may be older than the agent.
func Soften(reason commonv1.Reason, active bool) commonv1.Reason {
	if active && ends(fault.RowOf(reason).Action) {
		return reasonRollback
	}
	return reason
}

// SoftenError is Soften for a refusal that is an error; the mode is read only if it matters.
func SoftenError(ctx context.Context, q pg.Querier, err error) error {
	if _, decided := fault.As(err); !decided || !ends(fault.ActionOf(err)) {
		return err
	}
	active, readErr := Active(ctx, q)
	switch {
	case readErr != nil:
		return errors.Join(err, readErr)
	case active:
		return fault.New(reasonRollback, "", fault.Cause(err))
	}
	return err
}

// ends reports whether a refused agent would stop for good, wait for a person, or take another identity.
func ends(action commonv1.Action) bool {
	return action == commonv1.Action_ACTION_STOP || action == commonv1.Action_ACTION_REBUNDLE ||
		action == commonv1.Action_ACTION_RECOVER
}
