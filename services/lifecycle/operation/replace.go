package operation

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// The service and the requester of a recreation that may cancel a stalled run, and the prefix of such a run's reason.
const (
	watchdogService   = "recovery"
	watchdogRequester = "watchdog"
	stepStalled       = "step_stalled"
)

// byWatchdog reports whether the watchdog makes the request on its own behalf, and not on that of a person.
func byWatchdog(ctx context.Context, req *lifecyclev1.RequestOperationRequest) bool {
	peer, ok := rpc.PeerFrom(ctx)
	_, person := rpc.PersonFrom(ctx)
	return ok && !person && peer.ID.Kind == pki.KindService && peer.ID.Name == watchdogService &&
		req.GetRequester() == watchdogRequester
}

var instanceWithoutSession = pg.Define(pg.RoleLifecycle, "operation.instance_without_session", `SELECT EXISTS (
			SELECT 1 FROM lifecycle.instance i WHERE i.workspace_id = $1 AND i.epoch = $2 AND i.state = $3)
		AND NOT EXISTS (
			SELECT 1 FROM lifecycle.node_gate g WHERE g.workspace_id = $1 AND g.epoch = $2 AND `+gate.ConnectedSQL+`)
		AND `+gate.ListeningSQL)

// replaceable reports whether the watchdog's recreation cancels an open run first, instead of joining it. It does if
// the run waits, stalled, for an instance of the workspace's own that was launched and has no session while a replica
// of nodeapi listens: such a wait ends with the run's deadline alone, since the instance that would end it is gone, and
// nothing of the tenant's runs yet. Any other stalled run may go on by itself and is joined. A run that a driver is
// driving at this moment is a conflict: a moment later it waits again, or has gone on.
func (s *Server) replaceable(
	ctx context.Context, tx pgx.Tx, w workspace.Row, run runs.Run, req *lifecyclev1.RequestOperationRequest,
) (bool, error) {
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, spec); err != nil {
		return false, fmt.Errorf("read spec: %w", err)
	}
	ofThisEpoch := req.GetExpectedEpoch() == 0 || req.GetExpectedEpoch() == w.Epoch
	if !byWatchdog(ctx, req) || !joinable(run) || !ofThisEpoch || run.Epoch != w.Epoch ||
		!placement.HasOwnInstance(spec.GetPlacement()) || run.StepName() != provision.StepStorage ||
		!strings.HasPrefix(run.StuckReason, stepStalled) {
		return false, nil
	}
	gone, err := pg.Value[bool](ctx, tx, instanceWithoutSession, w.ID, w.Epoch,
		names.Of(commonv1.InstanceState_INSTANCE_STATE_LIVE))
	if err != nil {
		return false, fmt.Errorf("look for the instance's session: %w", err)
	}
	if gone && run.State != names.Of(commonv1.RunState_RUN_STATE_WAITING) {
		return false, fault.New(commonv1.Reason_REASON_CONFLICT,
			"a driver is looking after the operation at this moment")
	}
	return gone, nil
}

// cancelFirst cancels the run that a recreation replaces. It belongs in the transaction of that recreation: no crash
// leaves one without the other, and no other request comes between them.
func (s *Server) cancelFirst(ctx context.Context, tx pgx.Tx, run runs.Run, by, reason string) error {
	reason = cmp.Or(reason, "its instance does not connect")
	_, err := s.deps.Core.CancelParked(ctx, tx, run.ID, provision.StepStorage, by, reason)
	return err
}

// replaces returns the answer to a dry run of a recreation that cancels an open run first.
func replaces(w workspace.Row, run runs.Run) *lifecyclev1.Operation {
	return foretold(w, kRecreate, fmt.Sprintf("cancels operation %s (%s), which waits for an instance that does not "+
		"connect; "+
		"then ends that instance and provisions the next epoch", run.ID, run.Kind))
}
