package operation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

const noProof = commonv1.FencedProof_FENCED_PROOF_UNSPECIFIED

// mayProve refuses a proof from a caller who may not give one.
func mayProve(ctx context.Context, req *lifecyclev1.RequestOperationRequest) error {
	if req.GetFencedProof() == noProof {
		return nil
	}
	if req.GetKind() != kRecreate {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "a fenced proof goes with a recreation alone")
	}
	if person, ok := rpc.PersonFrom(ctx); !ok || !person.Operator() {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "a fenced proof is an operator's word")
	}
	if strings.TrimSpace(req.GetReason()) == "" {
		return fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "a fenced proof needs a reason in words")
	}
	return nil
}

// ofEpoch refuses a recreation that was decided about another epoch than the present one: another operation has
// replaced that instance already.
func ofEpoch(w workspace.Row, req *lifecyclev1.RequestOperationRequest) error {
	if req.GetExpectedEpoch() == 0 || req.GetExpectedEpoch() == w.Epoch {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_CONFLICT,
		fmt.Sprintf("the recreation was asked of epoch %d, and the workspace is in epoch %d", req.GetExpectedEpoch(),
			w.Epoch),
		fault.Unmet(fmt.Sprintf("the workspace is in epoch %d, not %d", w.Epoch, req.GetExpectedEpoch())),
		fault.Remedy("look at the workspace again, and ask anew if its present epoch is to be replaced"))
}

var forgetPlace = pg.Define(pg.RoleLifecycle, "operation.forget_place", `
		UPDATE lifecycle.workspace SET node_id = NULL, node_name = '', endpoints = '[]', register_failures = 0,
			version = version + 1 WHERE id = $1`)

// recreate ends the instance of the present epoch and provisions the next, in one run; a request joins an open run that
// serves it. For the watchdog alone, an open run whose instance does not come is cancelled first.
func (s *Server) recreate(
	ctx context.Context, tx pgx.Tx, w workspace.Row, req *lifecyclev1.RequestOperationRequest, runID, by string,
) (*lifecyclev1.Operation, error) {
	run, open, err := runs.Live(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	if open && req.GetFencedProof() != noProof && run.State != names.Of(commonv1.RunState_RUN_STATE_STUCK) {
		return s.prove(ctx, tx, w, run, req, by)
	}
	in, parent := spec.NewInput(w.Tenant, w.Name, w.Spec), ""
	from, instead := recreatableFrom(), false
	if open {
		if instead, err = s.replaceable(ctx, tx, w, run, req); err != nil {
			return nil, err
		}
	}
	if instead {
		if err := s.cancelFirst(ctx, tx, run, by, req.GetReason()); err != nil {
			return nil, err
		}
		parent = run.ID
		from = []commonv1.WorkspaceState{
			commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
			commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING,
		}
	}
	if !open || instead {
		if err := ofEpoch(w, req); err != nil {
			return nil, err
		}
		v, err := s.recreatable(ctx, tx, w, from, req.GetFencedProof() != noProof)
		if err != nil {
			return nil, err
		}
		if !v.possible() {
			return nil, v.refusal()
		}
		if req.GetFencedProof() != noProof {
			in.Attestation = &spec.Attestation{Proof: names.Of(req.GetFencedProof()), By: by, Reason: req.GetReason()}
		}
	}
	started, err := s.deps.Core.Start(ctx, tx, saga.StartRequest{
		WorkspaceID: w.ID, Kind: kRecreate, Definition: provision.DefinitionRecreate, RunID: runID, Input: in, Requester: by,
		CorrelationID: cmp.Or(req.GetCorrelationId(), obs.From(ctx).CorrelationID), NextEpoch: true,
		OfEpoch:   req.GetExpectedEpoch(),
		JoinKinds: []commonv1.OperationKind{commonv1.OperationKind_OPERATION_KIND_CREATE, kRetry},
		From:      from, ParentRunID: parent,
	})
	if err != nil || started.Joined {
		return answer(w.ID, started), err
	}
	// From here on the workspace shows no place: no client is sent to an instance that is about to end, and the refused
	// registrations of that instance do not concern the next one.
	_, err = pg.Exec(ctx, tx, forgetPlace, w.ID)
	if err != nil {
		return nil, fmt.Errorf("clear endpoints: %w", err)
	}
	if _, started.Pos, err = workspace.Announce(ctx, tx, w.ID); err != nil {
		return nil, fmt.Errorf("report workspace: %w", err)
	}
	return answer(w.ID, started), nil
}

// recreation is the judgement whether a workspace can be recreated, and what that would do.
type recreation struct {
	reason      commonv1.Reason // of the first thing that is unmet
	unmet       []string
	help        string
	conflicting string
	consequence string
}

func (r *recreation) possible() bool { return len(r.unmet) == 0 }

func (r *recreation) lacks(reason commonv1.Reason, help, conflicting, text string) {
	if r.possible() {
		r.reason, r.help, r.conflicting = reason, help, conflicting
	}
	r.unmet = append(r.unmet, text)
}

func (r *recreation) refusal() error {
	options := []fault.Option{fault.Unmet(r.unmet...)}
	switch {
	case r.help != "":
		options = append(options, fault.Remedy(r.help))
	case r.reason == commonv1.Reason_REASON_PRECONDITION_FAILED:
		options = append(options, fault.Remedy(whatIsPossible))
	}
	if r.conflicting != "" {
		options = append(options, fault.Conflicting(r.conflicting))
	}
	return fault.New(r.reason, "this workspace cannot be recreated now", options...)
}

// recreatableFrom returns the states from which every caller may have a workspace recreated.
func recreatableFrom() []commonv1.WorkspaceState {
	return []commonv1.WorkspaceState{
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	}
}

// recreatable judges a workspace on which no operation is open, or only one that is about to be cancelled; from are the
// states in which the workspace may be. The facts may change before the run gets there: the run checks them again.
func (s *Server) recreatable(ctx context.Context, tx pgx.Tx, w workspace.Row, from []commonv1.WorkspaceState,
	proven bool,
) (*recreation, error) {
	r := &recreation{}
	if !slices.ContainsFunc(from, func(state commonv1.WorkspaceState) bool { return names.Of(state) == w.State }) {
		r.lacks(commonv1.Reason_REASON_PRECONDITION_FAILED, "", "", "the workspace is "+w.State+", not active or failed")
		return r, nil
	}
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, spec); err != nil {
		return nil, fmt.Errorf("read spec: %w", err)
	}
	// A run that fails for good undoes everything: one that would fail for certain is not begun.
	if err := s.deps.Catalogue.Check(spec); err != nil {
		f := fault.From(err)
		r.lacks(f.Reason, f.Remedy, "", "the mesh does not offer any more what the workspace asks for: "+f.Public)
	}
	if err := s.valuesOpen(w); err != nil {
		f, ok := fault.As(err)
		if !ok {
			return nil, err
		}
		r.lacks(f.Reason, f.Remedy, "", "an environment value of the workspace does not open: "+f.Public)
	}
	if err := s.roomForRetry(ctx, tx, w); err != nil {
		f, ok := fault.As(err)
		if !ok {
			return nil, err
		}
		for _, u := range f.Unmet {
			r.lacks(f.Reason, f.Remedy, "", u)
		}
	}
	a, held, err := allocation.Live(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	if held && a.State == commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		r.lacks(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE, "retry the release of the allocation, or force it", a.ID,
			fmt.Sprintf("what epoch %d left behind is not cleaned up: the release of allocation %s has failed", a.Epoch, a.ID))
	}
	claims, err := claims.Live(ctx, tx, w.ID, allocation.KindInstance, allocation.KindWorkload, allocation.KindStorage)
	if err != nil {
		return nil, err
	}
	var away map[string]string
	if !placement.HasOwnInstance(spec.GetPlacement()) {
		if away, err = s.machinesAway(ctx, tx, r, claims, w.Epoch, proven); err != nil {
			return nil, err
		}
	}
	if !proven {
		away = nil
	}
	if held && a.NodeID != "" && !placement.HasOwnInstance(spec.GetPlacement()) && away[a.NodeID] == "" {
		if err := hostAsAccepted(ctx, tx, r, a); err != nil {
			return nil, err
		}
	}
	r.consequence = recreateConsequence(w, spec, claims, slices.Sorted(maps.Values(away)), held && away[a.NodeID] == "")
	if len(away) > 0 && (!held || away[a.NodeID] != "") && r.possible() {
		// The workspace begins anew on another machine, so there must be one; without it the run would destroy data that
		// cannot be restored.
		if err := allocation.HasRoom(ctx, tx, spec.GetGpus()); err != nil {
			stepErr, ok := errors.AsType[*saga.StepError](err)
			if !ok {
				return nil, err
			}
			r.lacks(stepErr.Reason, "", "", "no other machine has room for the workspace: "+stepErr.Public)
		}
	}
	return r, nil
}

// machineOfClaimRow is a machine that a claim is on, and whether its agent is admitted and connected.
type machineOfClaimRow struct {
	Name    string `db:"name"`
	Answers bool   `db:"answers"`
}

var machineOfClaim = pg.Define(pg.RoleLifecycle, "operation.machine_of_claim",
	`SELECT g.name, g.admitted AND `+gate.ConnectedSQL+` AS answers FROM lifecycle.node_gate g WHERE g.node_id = $1`)

// machinesAway checks whether the machines that the claims are on can confirm that the workspace's epochs have ended.
// It returns those that cannot: their names, by node id.
func (s *Server) machinesAway(ctx context.Context, tx pgx.Tx, r *recreation, claims []claims.Claim, epoch int64,
	proven bool,
) (map[string]string, error) {
	seen, away := map[string]bool{}, map[string]string{}
	for _, c := range claims {
		if c.NodeID == "" || seen[c.NodeID] {
			continue
		}
		seen[c.NodeID] = true
		machine, err := pg.One[machineOfClaimRow](ctx, tx, machineOfClaim, c.NodeID)
		if err != nil {
			return nil, fmt.Errorf("read gate: %w", err)
		}
		if machine.Answers {
			continue
		}
		away[c.NodeID] = machine.Name
		if !proven {
			r.lacks(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
				"bring the machine back, so that its agent can end the workloads; or give a fenced proof (powered_off, "+
					"network_isolated, reimaged or "+
					"operator_asserts) with a reason, as an operator", c.NodeID,
				fmt.Sprintf("machine %s does not answer, so the end of epoch %d cannot be confirmed; its workspaces are kept "+
					"until it does", machine.Name, epoch))
		}
	}
	return away, nil
}

// hostAsAccepted checks that workloads are started on the machine to which the slot and the storage bind the workspace.
func hostAsAccepted(ctx context.Context, tx pgx.Tx, r *recreation, a allocation.Allocation) error {
	why, err := gate.DiagnosisOnly(ctx, tx, a.NodeID)
	if err != nil || why == "" {
		return err
	}
	g, _, err := gate.Get(ctx, tx, a.NodeID)
	if err != nil {
		return err
	}
	r.lacks(commonv1.Reason_REASON_HOST_RUNTIME_DRIFT, "", a.NodeID,
		fmt.Sprintf("machine %s is %s; nothing is started on it until that ends", g.Name, why))
	return nil
}

// recreateConsequence returns what a recreation would do. away are the names of the machines that a person has given an
// attestation for, and stays is whether the slot and the storage are kept even so, since they are on another machine.
func recreateConsequence(w workspace.Row, spec *lifecyclev1.WorkspaceSpec, claims []claims.Claim, away []string,
	stays bool,
) string {
	first, kept := "", "schema and handle are kept"
	if len(away) > 0 {
		first = fmt.Sprintf("counts what the workspace has on %s as ended on the operator's word, leaves its workloads "+
			"and storage there as orphan claims and "+
			"cordons the machine; ", strings.Join(away, " and on "))
	}
	switch {
	case len(claims) == 0, len(away) > 0 && !stays:
	case placement.HasOwnInstance(spec.GetPlacement()):
		first += fmt.Sprintf("stops the workloads and ends the instance of epoch %d with the storage on it; ", w.Epoch)
	default:
		first += fmt.Sprintf("removes the workloads of epoch %d; ", w.Epoch)
		kept = "storage, schema and handle are kept, on the same machine"
	}
	if first != "" {
		first += "then "
	}
	if len(claims) == 0 {
		kept = "no instance and no workload are left to end; what is there of schema and handle is kept"
	}
	return first + "provisions the next epoch: " + kept +
		". If that fails for good or is cancelled everything else is undone, storage too; a schema that stood before is " +
		"kept with its data, and the workspace ends failed"
}

// recreateOption returns the row for a recreation in the table of actions.
func (s *Server) recreateOption(ctx context.Context, tx pgx.Tx, w workspace.Row, run runs.Run, open,
	proven bool,
) (*lifecyclev1.ActionOption, error) {
	if open {
		o := &lifecyclev1.ActionOption{
			Kind: kRecreate, Reason: commonv1.Reason_REASON_OPERATION_IN_PROGRESS,
			Consequence: "ends the instance and provisions the workspace in a new epoch",
			Unmet:       []string{saga.IsOpen(&run)},
		}
		if run.State == "stuck" {
			o.Reason = commonv1.Reason_REASON_RUN_STUCK
		}
		return o, nil
	}
	r, err := s.recreatable(ctx, tx, w, recreatableFrom(), proven)
	if err != nil {
		return nil, err
	}
	if r.consequence == "" {
		r.consequence = "ends the instance and provisions the workspace in a new epoch"
	}
	return &lifecyclev1.ActionOption{
		Kind: kRecreate, Possible: r.possible(), Unmet: r.unmet, Reason: r.reason,
		Consequence: r.consequence,
	}, nil
}
