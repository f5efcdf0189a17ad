package operation

import (
	"context"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// joinHint is one request among many for the same workspace: the id that its run gets if this request begins the run,
// and the answer of the lock store.
type joinHint struct {
	workspaceID string
	runID       string
	outcome     lock.Outcome
}

// joinHintOf asks the lock store which run serves the workspace, for the kinds that join each other. The lock store
// only saves time: without it, or if it is wrong, the database decides.
func (s *Server) joinHintOf(ctx context.Context, req *lifecyclev1.RequestOperationRequest) joinHint {
	h := joinHint{workspaceID: req.GetWorkspaceId(), runID: ids.New()}
	if (req.GetKind() == kRecreate || req.GetKind() == kRetry) && !req.GetDryRun() {
		h.outcome = s.deps.Lock.Acquire(ctx, h.workspaceID, h.runID)
	}
	return h
}

// joinableRun reads the run that may serve a join, of the workspace $1 and the kinds $2: the run that is named, $3, or
// the run that owns the workspace.
var joinableRun = pg.DefineDynamic(pg.RoleLifecycle, "operation.joinable_run", func(named bool) string {
	if named {
		return joinableSQL + ` AND r.id = $3`
	}
	return joinableSQL
}, false, true)

const joinableSQL = `SELECT r.id::text, r.tenant_id::text, r.kind, r.epoch, w.state AS workspace_state
	FROM lifecycle.saga_run r JOIN lifecycle.workspace w ON w.id = r.workspace_id
	WHERE r.workspace_id = $1 AND r.phase = 'do' AND r.cancel_requested_at IS NULL AND r.kind = ANY ($2)
		AND r.state IN ('pending', 'running', 'waiting')
		AND NOT mesh.rolled_back()`

// joinFast returns a join by one read: of the run that the lock store named, by its primary key, or, where the lock
// store names none, of the run that owns the workspace. It returns false, and the caller goes on to the full
// transaction, for a request with an idempotency key, which only that transaction stores, for a request with a proof,
// which the transaction has to apply, and for the watchdog, for which the transaction may cancel the run instead of
// joining it.
func (s *Server) joinFast(ctx context.Context, req *lifecyclev1.RequestOperationRequest,
	h joinHint,
) (*lifecyclev1.Operation, bool) {
	if byWatchdog(ctx, req) || h.outcome.Kind == lock.Won || req.GetIdempotencyKey() != "" || req.GetDryRun() ||
		req.GetFencedProof() != noProof || !slices.Contains(bringing(), names.Of(req.GetKind())) {
		return nil, false
	}
	args := []any{h.workspaceID, bringing()}
	if h.outcome.Kind == lock.Held {
		args = append(args, h.outcome.RunID)
	}
	run, err := pg.One[struct {
		ID       string `db:"id"`
		TenantID string `db:"tenant_id"`
		Kind     string `db:"kind"`
		Epoch    int64  `db:"epoch"`
		State    string `db:"workspace_state"`
	}](ctx, s.deps.DB, joinableRun.For(h.outcome.Kind == lock.Held), args...)
	if err != nil {
		return nil, false // not conclusive: the full transaction decides, and returns the error
	}
	if person, ok := rpc.PersonFrom(ctx); ok && person.TenantID != "" && person.TenantID != run.TenantID {
		return nil, false
	}
	return joined(workspace.Row{ID: h.workspaceID, State: run.State},
		runs.Run{ID: run.ID, Kind: run.Kind, Epoch: run.Epoch}), true
}

// updateLock makes the lock store name the run that serves the request, so that the next request finds that run at
// once.
func (s *Server) updateLock(ctx context.Context, h joinHint, op *lifecyclev1.Operation, err error) {
	named := h.outcome.RunID
	switch h.outcome.Kind {
	case lock.Unknown:
		return
	case lock.Won:
		named = h.runID
	case lock.Held:
	}
	serves := ""
	if err == nil && !op.GetReplayed() && op.GetKind() != commonv1.OperationKind_OPERATION_KIND_DECOMMISSION {
		serves = op.GetOperationId()
	}
	if named == serves || serves == "" && h.outcome.Kind == lock.Held {
		return
	}
	s.deps.Lock.Release(ctx, h.workspaceID, named)
	if serves != "" {
		s.deps.Lock.Acquire(ctx, h.workspaceID, serves)
	}
}

// joinable reports whether a run brings its workspace up: one that is being undone, or stuck, serves no caller who
// wants the workspace.
func joinable(run runs.Run) bool {
	return run.Joinable() && slices.Contains(bringing(), run.Kind)
}

// bringing returns the kinds of runs at whose end the workspace is active. A request for one of these kinds is served
// by a run of any of them.
func bringing() []string {
	return []string{names.Of(commonv1.OperationKind_OPERATION_KIND_CREATE), names.Of(kRetry), names.Of(kRecreate)}
}

func joined(ws workspace.Row, run runs.Run) *lifecyclev1.Operation {
	return &lifecyclev1.Operation{
		OperationId: run.ID, WorkspaceId: ws.ID, Kind: run.OperationKind(), Joined: true, Epoch: run.Epoch,
		State: ws.WorkspaceState(),
	}
}
