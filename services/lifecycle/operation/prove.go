package operation

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// proofHelp is the remedy for a person whose attestation finds no run that could use it. It warns of a cancel, which
// undoes what a recreation keeps.
const proofHelp = "wait until it has ended or stands at \"" + provision.StepPrevious +
	"\", and give the proof again; a cancel would undo the storage too"

// prove gives a person's attestation to the recreation that is open, if that is at the step that ends the former epoch,
// which reads it. A recreation at another step, or another operation, would never read it: the request is refused then,
// since a person would rely on an attestation that was accepted and is never used.
func (s *Server) prove(
	ctx context.Context, tx pgx.Tx, w workspace.Row, run runs.Run, req *lifecyclev1.RequestOperationRequest, by string,
) (*lifecyclev1.Operation, error) {
	if run.Kind != names.Of(kRecreate) || !run.Joinable() || run.StepName() != provision.StepPrevious {
		return nil, fault.New(commonv1.Reason_REASON_OPERATION_IN_PROGRESS,
			"an operation that would not see the proof is open", fault.Conflicting(run.ID),
			fault.Unmet(fmt.Sprintf("%s at the step %q", saga.IsOpen(&run), run.StepName())), fault.Remedy(proofHelp))
	}
	if e := req.GetExpectedEpoch(); e >= run.Epoch {
		return nil, fault.New(commonv1.Reason_REASON_CONFLICT,
			fmt.Sprintf("the proof was given of epoch %d, and what has not ended is before epoch %d", e, run.Epoch),
			fault.Unmet(fmt.Sprintf("the proof is of epoch %d, not of one before %d", e, run.Epoch)),
			fault.Remedy("look at the workspace again, and leave the expected epoch out"))
	}
	in, wanted, err := spec.Read(run.Input)
	if err != nil {
		return nil, err
	}
	op := joined(w, run)
	op.DryRun = req.GetDryRun()
	if in.Attestation != nil {
		op.Consequence = "joins the operation under way, which has a proof already: " + in.Attestation.String()
		return op, nil
	}
	if !placement.HasOwnInstance(wanted.GetPlacement()) {
		if err := s.provable(ctx, tx, w, run, wanted); err != nil {
			return nil, err
		}
	}
	op.Consequence = "joins the operation under way and gives it the proof: what cannot be confirmed ended of earlier " +
		"epochs counts as ended, and is left behind as orphan claims"
	if req.GetDryRun() {
		return op, nil
	}
	in.Attestation = &spec.Attestation{Proof: names.Of(req.GetFencedProof()), By: by, Reason: req.GetReason()}
	v, err := s.deps.Core.Amend(ctx, tx, run.ID, provision.StepPrevious, in)
	if err != nil {
		return nil, err
	}
	op.Pos = v.Pos
	e := requested(req)
	e.Action += ".prove"
	e.WorkflowID, e.TenantID = run.ID, w.TenantID
	e.Details["epoch"] = run.Epoch
	_, err = s.deps.Audit.Record(ctx, tx, e)
	return op, err
}

var machinesAway = pg.Define(pg.RoleLifecycle, "operation.machines_away",
	`SELECT DISTINCT g.node_id::text FROM lifecycle.resource_claim c JOIN lifecycle.node_gate g USING (node_id)
		WHERE c.workspace_id = $1 AND c.epoch < $2 AND c.kind = ANY ($3) AND c.released_at IS NULL AND c.orphaned_at IS NULL
			AND NOT (g.admitted AND `+gate.ConnectedSQL+`)`)

// provable refuses an attestation that would not be used or would not help: some machine that has resources of the
// former epoch must not answer, and if it is the machine that the workspace would stay on, another must have room.
func (s *Server) provable(ctx context.Context, tx pgx.Tx, w workspace.Row, run runs.Run,
	spec *lifecyclev1.WorkspaceSpec,
) error {
	away, err := pg.Values[string](ctx, tx, machinesAway, w.ID, run.Epoch,
		[]string{allocation.KindInstance, allocation.KindWorkload, allocation.KindStorage})
	if err != nil {
		return fmt.Errorf("look for machines that are away: %w", err)
	}
	if len(away) == 0 {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"nothing is to be proven: every machine that holds the workspace answers", fault.Conflicting(run.ID),
			fault.Unmet("every machine that holds an earlier epoch answers"),
			fault.Remedy("let the operation go on: the agents end what is left"))
	}
	a, held, err := allocation.Live(ctx, tx, w.ID)
	if err != nil || !held || !slices.Contains(away, a.NodeID) {
		return err
	}
	if err = allocation.HasRoom(ctx, tx, spec.GetGpus()); err == nil {
		return nil
	}
	stepErr, ok := errors.AsType[*saga.StepError](err)
	if !ok {
		return err
	}
	return fault.New(stepErr.Reason, "without another place to go, the workspace would lose what it has",
		fault.Conflicting(run.ID),
		fault.Unmet("no other machine has room for the workspace: "+stepErr.Public),
		fault.Remedy("enrol a machine or free one, and give the proof again"))
}
