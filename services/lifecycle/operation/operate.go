package operation

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

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
	"github.com/gpuaas/mesh/services/lifecycle/spec"
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
	s.settle(ctx, h, op, err)
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
func (s *Server) ofOneMoment(ctx context.Context, tx pgx.Tx, was saga.Workspace, err error) error {
	if _, refused := fault.As(err); !refused {
		return err
	}
	now, readErr := saga.GetWorkspace(ctx, tx, was.ID)
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
		w, err := s.workspaceFor(ctx, tx, req.GetWorkspaceId())
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

// keyOf returns the text that identifies the request that an idempotency key is used for.
func keyOf(req *lifecyclev1.RequestOperationRequest, workspaceID string) string {
	out := names.Of(req.GetKind()) + "/" + workspaceID
	if req.GetFencedProof() != noProof {
		out += "/" + names.Of(req.GetFencedProof())
	}
	return out
}

func (s *Server) verb(ctx context.Context, tx pgx.Tx, w saga.Workspace, req *lifecyclev1.RequestOperationRequest,
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
		state, _ := names.Parse[commonv1.WorkspaceState](after.State)
		return &lifecyclev1.Operation{
			OperationId: after.RunID, WorkspaceId: w.ID, Kind: kReset, Epoch: after.Epoch,
			State: state, Pos: pos,
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
func (s *Server) valuesOpen(w saga.Workspace) error {
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, spec); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	return s.deps.Secrets.Opens(spec, secretenv.Owner{TenantID: w.TenantID, WorkspaceID: w.ID})
}

// roomForRetry enforces the tenant's quota for a failed workspace that is provisioned again.
func (s *Server) roomForRetry(ctx context.Context, tx pgx.Tx, w saga.Workspace) error {
	if w.State != names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED) {
		return nil // the retry itself is refused with the reason, or joins
	}
	t, err := s.tenantFor(ctx, tx, w.TenantID, true)
	if err != nil {
		return err
	}
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, spec); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	return within(ctx, tx, t, w.ID, spec)
}

// onOpenRun applies the verb kind to the run that owns the workspace.
func (s *Server) onOpenRun(ctx context.Context, tx pgx.Tx, w saga.Workspace, kind commonv1.OperationKind, by,
	reason string,
) (*lifecyclev1.Operation, error) {
	run, open, err := saga.LiveRun(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	if !open {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "no operation on this workspace is open",
			fault.Unmet("no operation is open to "+strings.ReplaceAll(names.Of(kind), "_", " ")),
			fault.Remedy("nothing is under way, so there is nothing to stop or to help; `gpuaas workspaces actions WS` shows what is possible now"))
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
	after, err := saga.GetWorkspace(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	return verbAnswer(after, v), nil
}

// decommission ends a workspace. From `stuck` it closes that run and begins its own in the same transaction; any other
// open run must be cancelled first.
func (s *Server) decommission(ctx context.Context, tx pgx.Tx, w saga.Workspace, by string) (*lifecyclev1.Operation,
	error,
) {
	if w.State == names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_STUCK) {
		run, open, err := saga.LiveRun(ctx, tx, w.ID)
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

func (s *Server) dryRun(ctx context.Context, tx pgx.Tx, w saga.Workspace,
	req *lifecyclev1.RequestOperationRequest,
) (*lifecyclev1.Operation, error) {
	run, open, err := saga.LiveRun(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	brings := req.GetKind() == kRetry || req.GetKind() == kRecreate
	ends := req.GetKind() == kDecommission && run.Kind == names.Of(kDecommission)
	if open && req.GetKind() == kRecreate && req.GetFencedProof() == noProof {
		if instead, err := s.replaceable(ctx, tx, w, run, req); err != nil || instead {
			return replaces(w, run), err
		}
	}
	switch {
	case open && req.GetFencedProof() != noProof && run.State != "stuck":
		return s.prove(ctx, tx, w, run, req, requester(ctx, req))
	case open && (brings && joinable(run) || ends && run.Joinable()):
		op := joined(w, run)
		op.DryRun, op.Consequence = true, fmt.Sprintf("joins operation %s (%s), which is under way", run.ID, run.Kind)
		return op, nil
	case open && req.GetKind() == kCancel && run.State != "stuck" && (run.State == "compensating" || run.CancelAt != nil):
		return foretold(w, req.GetKind(),
			fmt.Sprintf("changes nothing: operation %s (%s) is being undone already", run.ID, run.Kind)), nil
	}
	if err := ofEpoch(w, req); err != nil {
		return nil, err
	}
	options, err := s.options(ctx, tx, w, req.GetFencedProof() != noProof, req.GetOverride())
	if err != nil {
		return nil, err
	}
	for _, o := range options {
		if o.GetKind() != req.GetKind() {
			continue
		}
		if !o.GetPossible() {
			return nil, fault.New(o.GetReason(), names.Of(o.GetKind())+" is not possible now", fault.Unmet(o.GetUnmet()...))
		}
		return foretold(w, o.GetKind(), o.GetConsequence()), nil
	}
	return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "there is no such operation")
}

// foretold returns the answer to a dry run that would join nothing. It has no operation and no epoch: no operation was
// begun, and a caller would take the workspace's own operation and epoch for those of the request.
func foretold(w saga.Workspace, kind commonv1.OperationKind, consequence string) *lifecyclev1.Operation {
	state, _ := names.Parse[commonv1.WorkspaceState](w.State)
	return &lifecyclev1.Operation{WorkspaceId: w.ID, Kind: kind, State: state, DryRun: true, Consequence: consequence}
}

var clockNow = pg.Define(pg.RoleLifecycle, "operation.clock_now", `SELECT mesh.clock()`)

// GetActions returns which verbs are possible now, and why the others are not.
func (s *Server) GetActions(ctx context.Context, req *lifecyclev1.GetActionsRequest) (*lifecyclev1.GetActionsResponse,
	error,
) {
	res := &lifecyclev1.GetActionsResponse{}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		w, err := s.workspaceFor(ctx, tx, req.GetWorkspaceId())
		if err != nil {
			return err
		}
		if res.Actions, err = s.options(ctx, tx, w, false, false); err != nil {
			return err
		}
		if err := rollback.Refuse(ctx, tx); fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
			for _, o := range res.GetActions() {
				o.Possible, o.Reason, o.Unmet = false, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK,
					slices.Concat(fault.From(err).Unmet, o.GetUnmet())
			}
		} else if err != nil {
			return err
		}
		var at timestamp
		if err := pg.QueryRow(ctx, tx, clockNow).Scan(&at); err != nil {
			return fmt.Errorf("read clock: %w", err)
		}
		res.ComputedAt = timestamppb.New(at.Time)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return res, nil
}

// condition is one thing that must hold for a verb, and the reason with which the verb is refused if it does not.
type condition struct {
	holds  bool
	text   string
	reason commonv1.Reason
}

// options computes every verb from the workspace and its open run. It is the one source for command line and console. A
// verb that is not possible has the reason with which a request for it would be refused: that of the first condition
// that is unmet.
func (s *Server) options(ctx context.Context, tx pgx.Tx, w saga.Workspace, proven,
	override bool,
) ([]*lifecyclev1.ActionOption, error) {
	run, open, err := saga.LiveRun(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	const unmet, inProgress, isStuck = commonv1.Reason_REASON_PRECONDITION_FAILED,
		commonv1.Reason_REASON_OPERATION_IN_PROGRESS, commonv1.Reason_REASON_RUN_STUCK
	stuck := open && run.State == "stuck"
	undoing := open && run.State == "compensating"
	isOpen := saga.IsOpen(&run)
	held := inProgress
	if stuck {
		held = isStuck
	}
	failed := condition{w.State == "failed", "the workspace is " + w.State + ", not failed", unmet}
	limit := s.deps.Policy.Current().SagaRetryLimit()
	retry := []condition{{!open, isOpen, held}, failed}
	if err := s.roomForRetry(ctx, tx, w); err != nil {
		f, ok := fault.As(err)
		if !ok {
			return nil, err
		}
		for _, u := range f.Unmet {
			retry = append(retry, condition{false, u, f.Reason})
		}
	}
	retry = append(retry, condition{
		w.ResetDone || w.State != "failed", "the workspace has not been reset since it failed",
		commonv1.Reason_REASON_NOT_RESET,
	}, condition{
		w.RetryUsed < limit || override,
		fmt.Sprintf("%d of %d retries are used: another needs an override with a reason", w.RetryUsed, limit),
		commonv1.Reason_REASON_RETRY_LIMIT_REACHED,
	})
	again, err := retryConsequence(ctx, tx, w, run, open)
	if err != nil {
		return nil, err
	}
	option := func(kind commonv1.OperationKind, consequence string, conditions ...condition) *lifecyclev1.ActionOption {
		o := &lifecyclev1.ActionOption{Kind: kind, Possible: true, Consequence: consequence}
		for _, c := range conditions {
			if c.holds {
				continue
			}
			if o.GetPossible() {
				o.Possible, o.Reason = false, c.reason
			}
			o.Unmet = append(o.Unmet, c.text)
		}
		return o
	}
	recreate, err := s.recreateOption(ctx, tx, w, run, open, proven)
	if err != nil {
		return nil, err
	}
	if text, ok := joinsInstead(run, open); ok {
		recreate.Consequence = text
	}
	releases, err := s.releaseOptions(ctx, tx, w)
	if err != nil {
		return nil, err
	}
	known := condition{!stuck || s.deps.Core.Drives(&run), "this build does not know the steps of the operation", unmet}
	endable := w.State == "active" || w.State == "failed" || w.State == "stuck"
	return append([]*lifecyclev1.ActionOption{
		option(kCancel, "stops the step under way and undoes what was made, in reverse; the workspace ends failed",
			condition{open, "no operation is open to cancel", unmet},
			condition{!stuck, "the operation is stuck: its undo has failed", isStuck},
			condition{!undoing, "the operation is being undone already", unmet},
			condition{
				!open || s.deps.Core.Cancellable(&run),
				"the open operation is a " + run.Kind + ", which cannot be cancelled", unmet,
			}),
		option(kReset, "archives the history of the runs and keeps what they made, so that a retry adopts it",
			condition{!open, isOpen, unmet}, failed),
		option(kRetry, again, retry...),
		option(kRetryUndo, "tries the undo that is exhausted again",
			condition{stuck, "no operation of the workspace is stuck", unmet}, known),
		option(kSkipUndo, "leaves what cannot be undone as an orphan claim and goes on",
			condition{stuck, "no operation of the workspace is stuck", unmet}, known),
		recreate,
		option(kDecommission, "removes workloads, schema, handle, storage and instance, for good",
			condition{!open || stuck, isOpen + ": cancel it first", inProgress},
			condition{endable || open, "the workspace is " + w.State +
				": one that is active, failed or stuck can be decommissioned", unmet}),
	}, releases...), nil
}

// joinsInstead returns the consequence of a request for an operation that is under way already, which joins it, and
// false if the request would be refused.
func joinsInstead(run saga.Run, open bool) (string, bool) {
	if !open || !joinable(run) {
		return "", false
	}
	return fmt.Sprintf("begins nothing: it joins operation %s (%s), which is under way", run.ID, run.Kind), true
}

// retryConsequence returns what a retry would do, and what the operator should consider before it.
func retryConsequence(ctx context.Context, tx pgx.Tx, w saga.Workspace, run saga.Run, open bool) (string, error) {
	if text, ok := joinsInstead(run, open); ok {
		return text, nil
	}
	const first = "provisions again under the same id and adopts what is there"
	if w.State != names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED) {
		return first, nil
	}
	claims, err := claims.Live(ctx, tx, w.ID)
	if err != nil {
		return "", err
	}
	advice, err := saga.RetryAdvice(ctx, tx, w.ID)
	if err != nil {
		return "", err
	}
	kinds := make([]string, 0, len(claims))
	for _, c := range claims {
		if !slices.Contains(kinds, c.Kind) {
			kinds = append(kinds, c.Kind)
		}
	}
	out := first + ": " + strings.Join(kinds, ", ")
	if len(kinds) == 0 {
		out = "provisions again under the same id, in the next epoch; nothing is left that it could adopt"
	}
	if advice != "" {
		out += ". " + advice
	}
	return out, nil
}
