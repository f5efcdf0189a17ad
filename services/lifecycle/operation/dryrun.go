package operation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func (s *Server) dryRun(ctx context.Context, tx pgx.Tx, w workspace.Row,
	req *lifecyclev1.RequestOperationRequest,
) (*lifecyclev1.Operation, error) {
	run, open, err := runs.Live(ctx, tx, w.ID)
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
			return nil, notNow(o)
		}
		return foretold(w, o.GetKind(), o.GetConsequence()), nil
	}
	return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "there is no such operation")
}

// whatIsPossible is the remedy of a refusal for which the workspace's state alone is the reason.
const whatIsPossible = "`gpuaas workspaces actions WS` shows what is possible now"

// notNow returns the refusal of a dry run of an operation that is not possible.
func notNow(o *lifecyclev1.ActionOption) error {
	options := []fault.Option{fault.Unmet(o.GetUnmet()...)}
	if o.GetReason() == commonv1.Reason_REASON_PRECONDITION_FAILED {
		options = append(options, fault.Remedy(whatIsPossible))
	}
	return fault.New(o.GetReason(), names.Of(o.GetKind())+" is not possible now", options...)
}

// foretold returns the answer to a dry run that would join nothing. It has no operation and no epoch: no operation was
// begun, and a caller would take the workspace's own operation and epoch for those of the request.
func foretold(w workspace.Row, kind commonv1.OperationKind, consequence string) *lifecyclev1.Operation {
	return &lifecyclev1.Operation{
		WorkspaceId: w.ID, Kind: kind, State: w.WorkspaceState(), DryRun: true, Consequence: consequence,
	}
}
