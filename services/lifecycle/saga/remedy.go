package saga

import (
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

func (c *Core) stuckFault(r *runs.Run) error {
	return fault.New(commonv1.Reason_REASON_RUN_STUCK, "the operation is stuck: "+r.StuckReason, fault.Conflicting(r.ID),
		fault.Unmet("the operation is stuck: "+r.StuckReason), fault.Remedy(c.stuckRemedy(r)))
}

// stuckRemedy returns the remedy for a stuck run. A run that this build cannot drive would be put aside again, so that
// no retry is offered for it.
func (c *Core) stuckRemedy(r *runs.Run) string {
	if !c.Drives(r) {
		return "decommission the workspace, force-release its allocation, or start a build that knows the operation's steps"
	}
	return "retry the undo, skip it with a reason, or decommission"
}

// isOpen returns IsOpen as an unmet condition of another operation.
func isOpen(r *runs.Run) fault.Option { return fault.Unmet(IsOpen(r)) }

// IsOpen returns a text that names an open run with its kind and state.
func IsOpen(r *runs.Run) string {
	return fmt.Sprintf("operation %s (%s) is open and %s", r.ID, r.Kind, r.State)
}

// endRemedy returns the remedy that brings a live run to its end.
func (c *Core) endRemedy(r *runs.Run) string {
	def, known := c.registry.Get(r.Definition, r.DefVersion)
	switch {
	case r.State == runs.Stuck:
		return c.stuckRemedy(r)
	case r.State == runs.Compensating, r.CancelAt != nil:
		return "it is being undone already: wait until the workspace is failed, and ask again"
	case known && def.Uncancellable:
		return r.Kind + " cannot be cancelled: wait until it has ended, and ask again"
	default:
		return "cancel it, wait until the workspace is failed (`gpuaas workspaces wait WS --for state=failed`), and ask again"
	}
}
