package saga

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func (c *Core) refuseStart(ctx context.Context, tx pgx.Tx, req StartRequest) error {
	w, err := workspace.Get(ctx, tx, req.WorkspaceID)
	if err != nil {
		return err
	}
	if len(req.From) == 0 || slices.ContainsFunc(req.From,
		func(s commonv1.WorkspaceState) bool { return names.Of(s) == w.State }) {
		// Another operation changed the epoch, the reset or the count of retries: it began and ended while this one waited
		// for the lock. Or the epoch is not OfEpoch.
		return fault.New(commonv1.Reason_REASON_CONFLICT, "another operation on this workspace began and ended just now")
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		fmt.Sprintf("a workspace that is %s cannot begin %s", w.State, names.Of(req.Kind)),
		fault.Unmet("the workspace is "+w.State+", not "+among(req.From)),
		fault.Remedy("`gpuaas workspaces actions WS` shows what is possible now"))
}

// among returns the names of states as a list with a final "or".
func among(states []commonv1.WorkspaceState) string {
	out := make([]string, len(states))
	for i, s := range states {
		out[i] = names.Of(s)
	}
	if len(out) < 2 {
		return strings.Join(out, "")
	}
	return strings.Join(out[:len(out)-1], ", ") + " or " + out[len(out)-1]
}

func (c *Core) join(ctx context.Context, tx pgx.Tx, req StartRequest, live *runs.Run) (Started, error) {
	kind := live.OperationKind()
	if live.State == runs.Stuck {
		return Started{}, fault.New(commonv1.Reason_REASON_RUN_STUCK,
			"the workspace is held by a run that is stuck: "+live.StuckReason, fault.Conflicting(live.ID), isOpen(live),
			fault.Remedy(c.stuckRemedy(live)))
	}
	if kind != req.Kind && !slices.Contains(req.JoinKinds, kind) {
		return Started{}, fault.New(commonv1.Reason_REASON_OPERATION_IN_PROGRESS,
			fmt.Sprintf("%s is in progress on this workspace", live.Kind), fault.Conflicting(live.ID), isOpen(live),
			fault.Remedy(c.endRemedy(live)))
	}
	if !live.Joinable() {
		// A run that is being undone does not do what the request is for.
		return Started{}, fault.New(commonv1.Reason_REASON_OPERATION_IN_PROGRESS,
			fmt.Sprintf("%s on this workspace is being undone", live.Kind), fault.Conflicting(live.ID), isOpen(live),
			fault.Remedy("wait until it has ended, and ask again"))
	}
	w, err := workspace.Get(ctx, tx, req.WorkspaceID)
	if err != nil {
		return Started{}, err
	}
	return Started{
		RunID: live.ID, Kind: kind, Joined: true, Epoch: live.Epoch,
		State: w.WorkspaceState(),
	}, nil
}
