package operation

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// The kinds of operations, for short.
const (
	kRetry        = commonv1.OperationKind_OPERATION_KIND_RETRY
	kRecreate     = commonv1.OperationKind_OPERATION_KIND_RECREATE
	kDecommission = commonv1.OperationKind_OPERATION_KIND_DECOMMISSION
	kCancel       = commonv1.OperationKind_OPERATION_KIND_CANCEL
	kReset        = commonv1.OperationKind_OPERATION_KIND_RESET
	kRetryUndo    = commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO
	kSkipUndo     = commonv1.OperationKind_OPERATION_KIND_SKIP_UNDO
)

// operate carries out a request on a workspace that exists.
func (s *Server) operate(ctx context.Context, req *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation,
	error,
) {
	if person, ok := rpc.PersonFrom(ctx); ok && req.GetOverride() && !person.Operator() {
		return nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "an override is for operators")
	}
	if person, ok := rpc.PersonFrom(ctx); ok && (req.GetKind() == kSkipUndo || req.GetKind() == kRetryUndo) &&
		!person.Operator() {
		return nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "only an operator helps an operation that is stuck",
			fault.Remedy("ask an operator: what is left may stand on a machine that others share"))
	}
	if err := needsReason(req); err != nil {
		return nil, err
	}
	if err := mayProve(ctx, req); err != nil {
		return nil, err
	}
	if req.GetExpectedEpoch() != 0 && req.GetKind() != kRecreate {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "an expected epoch goes with a recreation alone")
	}
	h := s.joinHintOf(ctx, req)
	if op, ok := s.joinFast(ctx, req, h); ok {
		return op, nil
	}
	var op *lifecyclev1.Operation
	var err error
	// Another caller's operation may begin and end between two reads of this request: then there is nothing to join and
	// nothing to refuse.
	for range operateTries {
		if op, err = s.operateOnce(ctx, req, h.runID); !fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
			break
		}
	}
	s.updateLock(ctx, h, op, err)
	return op, err
}

// needsReason refuses a request that destroys something for good, or that overrides a limit, if it has no reason. A dry
// run needs no reason.
func needsReason(req *lifecyclev1.RequestOperationRequest) error {
	destructive := req.GetKind() == kDecommission || req.GetKind() == kRecreate || req.GetKind() == kSkipUndo
	if req.GetDryRun() || strings.TrimSpace(req.GetReason()) != "" || !(destructive || req.GetOverride()) {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_REASON_REQUIRED, names.Of(req.GetKind())+" needs a reason in words")
}

// operateTries bounds how often a request reads a workspace again that changes while the request reads it.
const operateTries = 8

// ofOneMoment returns the refusal err only if the workspace still has the version of was, and a conflict otherwise: the
// workspace and its run are read one after the other, and a refusal that was true at neither moment must not be
// returned. Every change of the run changes the workspace's version with it.
func (s *Server) ofOneMoment(ctx context.Context, tx pgx.Tx, was workspace.Row, err error) error {
	if _, refused := fault.As(err); !refused {
		return err
	}
	now, readErr := workspace.Get(ctx, tx, was.ID)
	if readErr != nil {
		return readErr
	}
	if now.Version != was.Version {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "the workspace moved while the request was looked at")
	}
	return err
}

func (s *Server) operateOnce(ctx context.Context, req *lifecyclev1.RequestOperationRequest,
	runID string,
) (*lifecyclev1.Operation, error) {
	var op *lifecyclev1.Operation
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		w, err := tenants.Workspace(ctx, tx, req.GetWorkspaceId())
		if err != nil {
			return err
		}
		if req.GetDryRun() {
			if err := rollback.Refuse(ctx, tx); err != nil {
				return err
			}
			op, err = s.dryRun(ctx, tx, w, req)
			return err
		}
		key, wanted := req.GetIdempotencyKey(), keyOf(req, w.ID)
		if key != "" {
			if err := lockKey(ctx, tx, w.TenantID, key); err != nil {
				return err
			}
			var ok bool
			if op, ok, err = s.replay(ctx, tx, w.TenantID, key,
				func(was string) (bool, error) { return was == wanted, nil }); err != nil || ok {
				return err
			}
		}
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		if op, err = s.verb(ctx, tx, w, req, runID); err != nil {
			return s.ofOneMoment(ctx, tx, w, err)
		}
		if err := s.decided(ctx, tx, w.TenantID, req, op); err != nil || key == "" || op.GetOperationId() == "" {
			return err
		}
		return keepKey(ctx, tx, w.TenantID, key, wanted, op.GetOperationId())
	})
	if err != nil {
		return nil, err
	}
	s.deps.Core.Committed()
	return op, nil
}

func (s *Server) verb(ctx context.Context, tx pgx.Tx, w workspace.Row, req *lifecyclev1.RequestOperationRequest,
	runID string,
) (*lifecyclev1.Operation, error) {
	by := requester(ctx, req)
	core := s.deps.Core
	switch req.GetKind() {
	case kCancel, kRetryUndo, kSkipUndo:
		return s.onOpenRun(ctx, tx, w, req.GetKind(), by, req.GetReason())
	case kReset:
		after, pos, err := core.Reset(ctx, tx, w.ID)
		if err != nil {
			return nil, err
		}
		return &lifecyclev1.Operation{
			OperationId: after.RunID, WorkspaceId: w.ID, Kind: kReset, Epoch: after.Epoch,
			State: after.WorkspaceState(), Pos: pos,
		}, nil
	case kRetry:
		if err := s.roomForRetry(ctx, tx, w); err != nil {
			return nil, err
		}
		if err := s.valuesOpen(w); err != nil {
			return nil, err
		}
		out, err := core.Retry(ctx, tx, saga.RetryRequest{
			WorkspaceID: w.ID, Definition: provision.DefinitionProvision, Input: spec.NewInput(w.Tenant, w.Name, w.Spec),
			Requester: by, CorrelationID: obs.From(ctx).CorrelationID, Limit: s.deps.Policy.Current().SagaRetryLimit(),
			Override: req.GetOverride(), Reason: req.GetReason(),
		})
		if err != nil {
			return nil, err
		}
		op := answer(w.ID, out.Started)
		op.Advice = out.Advice
		return op, nil
	case kRecreate:
		return s.recreate(ctx, tx, w, req, runID, by)
	case kDecommission:
		return s.decommission(ctx, tx, w, by)
	default:
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT,
			names.Of(req.GetKind())+" is asked of an allocation, not of a workspace",
			fault.Remedy("use `allocations retry-release` or `allocations force-release` with the allocation's id"))
	}
}

// valuesOpen refuses a workspace whose environment values cannot be opened: a run that deploys it would fail for
// certain.
func (s *Server) valuesOpen(w workspace.Row) error {
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, spec); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	return s.deps.Secrets.Opens(spec, secretenv.Owner{TenantID: w.TenantID, WorkspaceID: w.ID})
}

// roomForRetry enforces the tenant's quota for a failed workspace that is provisioned again.
func (s *Server) roomForRetry(ctx context.Context, tx pgx.Tx, w workspace.Row) error {
	if w.State != names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED) {
		return nil // the retry itself is refused with the reason, or joins
	}
	t, err := tenants.For(ctx, tx, w.TenantID, true)
	if err != nil {
		return err
	}
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, spec); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	return tenants.Within(ctx, tx, t, w.ID, spec)
}

// onOpenRun applies the verb kind to the run that owns the workspace.
func (s *Server) onOpenRun(ctx context.Context, tx pgx.Tx, w workspace.Row, kind commonv1.OperationKind, by,
	reason string,
) (*lifecyclev1.Operation, error) {
	run, open, err := runs.Live(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	if !open {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "no operation on this workspace is open",
			fault.Unmet("no operation is open to "+strings.ReplaceAll(names.Of(kind), "_", " ")),
			fault.Remedy("nothing is under way, so there is nothing to stop or to help; `gpuaas workspaces actions WS` shows "+
				"what is possible now"))
	}
	var v saga.Verb
	switch kind {
	case kCancel:
		v, err = s.deps.Core.Cancel(ctx, tx, run.ID, by, reason)
	case kRetryUndo:
		v, err = s.deps.Core.RetryUndo(ctx, tx, run.ID, by)
	default:
		// A claim that is given up keeps its machine occupied, and gates come before runs in the order of locks.
		if err := gate.LockOfWorkspace(ctx, tx, w.ID); err != nil {
			return nil, err
		}
		var orphans []claims.Claim
		if v, orphans, err = s.deps.Core.SkipUndo(ctx, tx, run.ID, by, reason); err == nil {
			err = allocation.KeepOccupied(ctx, tx, w.ID, orphans, reason, by)
		}
	}
	if err != nil {
		return nil, err
	}
	after, err := workspace.Get(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	return verbAnswer(after, v), nil
}

// decommission ends a workspace. From `stuck` it closes that run and begins its own in the same transaction; any other
// open run must be cancelled first.
func (s *Server) decommission(ctx context.Context, tx pgx.Tx, w workspace.Row, by string) (*lifecyclev1.Operation,
	error,
) {
	if w.State == names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_STUCK) {
		run, open, err := runs.Live(ctx, tx, w.ID)
		if err != nil {
			return nil, err
		}
		if open {
			if _, err := s.deps.Core.CloseStuck(ctx, tx, run.ID); err != nil {
				return nil, err
			}
		}
	}
	started, err := s.deps.Core.Start(ctx, tx, saga.StartRequest{
		WorkspaceID: w.ID, Kind: kDecommission, Definition: provision.DefinitionDecommission,
		Input: spec.NewInput(w.Tenant, w.Name, w.Spec), Requester: by, CorrelationID: obs.From(ctx).CorrelationID,
		DesiredState: "decommissioned",
		From: []commonv1.WorkspaceState{
			commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
			commonv1.WorkspaceState_WORKSPACE_STATE_STUCK,
		},
	})
	if err != nil {
		return nil, err
	}
	return answer(w.ID, started), nil
}
