package operation

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
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
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

const (
	kRetryRelease = commonv1.OperationKind_OPERATION_KIND_RETRY_RELEASE
	kForceRelease = commonv1.OperationKind_OPERATION_KIND_FORCE_RELEASE
)

// Allocations serves AllocationService: the two ways out of release_failed. Both begin or resume a run like any other,
// so that the code that cleans up exists once.
type Allocations struct{ server *Server }

// NewAllocations returns the service of allocations of s.
func NewAllocations(s *Server) *Allocations { return &Allocations{server: s} }

// RetryRelease has a run clean up again what a failed release has left.
func (a *Allocations) RetryRelease(ctx context.Context,
	req *lifecyclev1.RetryReleaseRequest,
) (*lifecyclev1.RetryReleaseResponse, error) {
	s, res := a.server, &lifecyclev1.RetryReleaseResponse{}
	entry := audit.Entry{
		Action: "allocation.retry_release", Reason: req.GetReason(), SubjectType: "allocation",
		SubjectID: req.GetAllocationId(),
	}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		f, err := s.failedReleaseOf(ctx, tx, req.GetAllocationId(), !req.GetDryRun())
		if err != nil {
			return err
		}
		if err := f.refusal(); err != nil {
			return err
		}
		if req.GetDryRun() {
			res.Allocation = f.allocated.Proto()
			res.Operation = foretold(f.workspace, kRetryRelease, retryReleaseConsequence)
			return nil
		}
		if res.Operation, err = s.retryRelease(ctx, tx, f); err != nil {
			return err
		}
		if res.Allocation, err = allocationNow(ctx, tx, f.allocated); err != nil {
			return err
		}
		return f.record(ctx, tx, entry, res.GetOperation())
	})
	if err != nil && req.GetDryRun() {
		return nil, err // a refused question changes nothing and is no attempt
	}
	if err != nil {
		return nil, s.deps.Audit.Refuse(ctx, entry, err)
	}
	s.deps.Core.Committed()
	return res, nil
}

// ForceRelease releases an allocation on a person's attestation.
func (a *Allocations) ForceRelease(ctx context.Context,
	req *lifecyclev1.ForceReleaseRequest,
) (*lifecyclev1.ForceReleaseResponse, error) {
	s, res := a.server, &lifecyclev1.ForceReleaseResponse{}
	entry := audit.Entry{
		Action: "allocation.force_release", Reason: req.GetReason(), SubjectType: "allocation",
		SubjectID: req.GetAllocationId(),
		Details: map[string]any{
			"fenced_proof": req.GetFencedProof(), "expected_fence": req.GetExpectedFence(),
			"ack_orphans": req.GetAckOrphans(),
		},
	}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		res.Claims = nil
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		f, err := s.failedReleaseOf(ctx, tx, req.GetAllocationId(), !req.GetDryRun())
		if err != nil {
			return err
		}
		for _, c := range f.claims {
			res.Claims = append(res.Claims, c.Proto())
		}
		res.Allocation = f.allocated.Proto()
		if err := f.refusal(); err != nil {
			return err
		}
		if f.allocated.Fence != req.GetExpectedFence() {
			return fault.New(commonv1.Reason_REASON_CONFLICT,
				fmt.Sprintf("the allocation has changed since: its fence is %d, and %d was expected", f.allocated.Fence,
					req.GetExpectedFence()),
				fault.Unmet(fmt.Sprintf("the fence is %d, not %d", f.allocated.Fence, req.GetExpectedFence())),
				fault.Remedy("look at the allocation again, and force the fence that you see"))
		}
		if req.GetDryRun() {
			res.Operation = foretold(f.workspace, kForceRelease, f.forceConsequence())
			return nil
		}
		if err := f.acknowledged(req.GetAckOrphans()); err != nil {
			return err
		}
		w := &spec.Attestation{Proof: names.Of(req.GetFencedProof()), By: rpc.ActorFrom(ctx), Reason: req.GetReason()}
		if res.Operation, err = s.startRelease(ctx, tx, f, kForceRelease, w); err != nil {
			return err
		}
		if res.Allocation, err = allocationNow(ctx, tx, f.allocated); err != nil {
			return err
		}
		return f.record(ctx, tx, entry, res.GetOperation())
	})
	if err != nil && req.GetDryRun() {
		return nil, err // a refused question changes nothing and is no attempt
	}
	if err != nil {
		return nil, s.deps.Audit.Refuse(ctx, entry, err)
	}
	s.deps.Core.Committed()
	return res, nil
}

const retryReleaseConsequence = "cleans up again what the release has left; the allocation ends released, or " +
	"release_failed again"

// failedRelease is an allocation with what must be known to release it.
type failedRelease struct {
	allocated allocation.Allocation
	workspace workspace.Row
	run       runs.Run
	open      bool
	claims    []claims.Claim // not given up yet, and may have to be
}

var (
	failedAllocation = pg.Define(pg.RoleLifecycle, "operation.failed_allocation",
		`SELECT `+allocation.Columns+` FROM lifecycle.allocation a WHERE a.allocation_id = $1`)
	allocationToFree = pg.Define(pg.RoleLifecycle, "operation.allocation_to_free",
		`SELECT `+allocation.Columns+` FROM lifecycle.allocation a WHERE a.allocation_id = $1 FOR UPDATE OF a`)
)

// failedReleaseOf reads an allocation and what stands with it. With change, all rows that the two verbs change are
// locked before, in the order of locks; without it nothing is locked: a query never waits for an operation that is
// under way.
func (s *Server) failedReleaseOf(ctx context.Context, tx pgx.Tx, allocationID string, change bool) (*failedRelease,
	error,
) {
	f := &failedRelease{}
	var err error
	read := failedAllocation
	if change {
		read = allocationToFree
		if err := lockBeforeAllocation(ctx, tx, allocationID); err != nil {
			return nil, err
		}
	}
	f.allocated, err = allocation.One(ctx, tx, read, allocationID)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, fault.NoSuch("allocation", allocationID)
	}
	if err != nil {
		return nil, fmt.Errorf("read allocation: %w", err)
	}
	if f.workspace, err = tenants.Workspace(ctx, tx, f.allocated.WorkspaceID); err != nil {
		return nil, err
	}
	if f.run, f.open, err = runs.Live(ctx, tx, f.allocated.WorkspaceID); err != nil {
		return nil, err
	}
	if f.claims, err = claims.Live(ctx, tx, f.allocated.WorkspaceID); err != nil {
		return nil, err
	}
	f.claims = slices.DeleteFunc(f.claims, func(c claims.Claim) bool {
		// rows of this database, released with the allocation
		return c.Kind == allocation.KindSlot || c.Kind == allocation.KindInstance &&
			!placement.HasOwnInstance(f.allocated.Placement)
	})
	return f, nil
}

var workspaceOfAllocation = pg.Define(pg.RoleLifecycle, "operation.workspace_of_allocation",
	`SELECT a.workspace_id::text FROM lifecycle.allocation a WHERE a.allocation_id = $1`)

// lockBeforeAllocation locks what comes before an allocation in the order of locks: the gates of the nodes that its
// workspace is on, the run that owns the workspace, and the workspace.
func lockBeforeAllocation(ctx context.Context, tx pgx.Tx, allocationID string) error {
	workspaceID, err := pg.Value[string](ctx, tx, workspaceOfAllocation, allocationID)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // the caller refuses it
	}
	if err != nil {
		return fmt.Errorf("read allocation: %w", err)
	}
	if err := gate.LockOfWorkspace(ctx, tx, workspaceID); err != nil {
		return err
	}
	if err := runs.LockLive(ctx, tx, workspaceID); err != nil {
		return err
	}
	if _, err := pg.Exec(ctx, tx, allocation.LockWorkspace, workspaceID); err != nil {
		return fmt.Errorf("lock workspace: %w", err)
	}
	return nil
}

// unmet returns the conditions that keep the allocation from being released.
func (f *failedRelease) unmet() []string {
	var out []string
	if f.allocated.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		out = append(out, "the allocation is "+names.Of(f.allocated.State)+", not release_failed")
	}
	if f.open && f.run.State != "stuck" {
		out = append(out, saga.IsOpen(&f.run))
	}
	return out
}

func (f *failedRelease) refusal() error {
	unmet := f.unmet()
	if len(unmet) == 0 {
		return nil
	}
	options := []fault.Option{fault.Unmet(unmet...)}
	if f.open {
		options = append(options, fault.Conflicting(f.run.ID))
	}
	if f.allocated.State != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED {
		options = append(options, fault.Remedy("only a release that failed is retried or forced; a workspace releases its "+
			"allocation by `gpuaas workspaces decommission WS --reason TEXT`"))
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "this allocation cannot be freed that way now",
		options...)
}

// acknowledged refuses unless the caller has named everything that may be left behind, and nothing else.
func (f *failedRelease) acknowledged(acks []string) error {
	var missing []string
	known := map[string]bool{}
	for _, c := range f.claims {
		known[c.ID] = true
		if !slices.Contains(acks, c.ID) {
			missing = append(missing, fmt.Sprintf("claim %s (%s %s) is not acknowledged with --ack-orphan", c.ID, c.Kind,
				c.Name))
		}
	}
	for _, id := range acks {
		if !known[id] {
			return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT,
				"claim "+id+" is not one that this release may leave behind",
				fault.Remedy("name the claims that a dry run lists"))
		}
	}
	if len(missing) > 0 {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "what may be left behind is not acknowledged",
			fault.Unmet(missing...),
			fault.Remedy("look at each claim, and name it with --ack-orphan"))
	}
	return nil
}

func (f *failedRelease) forceConsequence() string {
	return fmt.Sprintf("tries each undo for %s; up to %d claims that cannot be cleaned become orphans, the allocation "+
		"ends released, and its machine stays cordoned until "+
		"they are reaped", allocation.ForceGrace, len(f.claims))
}

func (f *failedRelease) record(ctx context.Context, tx pgx.Tx, e audit.Entry, op *lifecyclev1.Operation) error {
	e.TenantID, e.WorkspaceID, e.AllocationID = f.allocated.TenantID, f.allocated.WorkspaceID, f.allocated.ID
	e.NodeID, e.WorkflowID = f.allocated.NodeID, op.GetOperationId()
	_, err := audit.Record(ctx, tx, e)
	return err
}

var allocationByID = pg.Define(pg.RoleLifecycle, "operation.allocation_by_id",
	`SELECT `+allocation.Columns+` FROM lifecycle.allocation a WHERE a.allocation_id = $1`)

func allocationNow(ctx context.Context, tx pgx.Tx, a allocation.Allocation) (*lifecyclev1.Allocation, error) {
	now, err := allocation.One(ctx, tx, allocationByID, a.ID)
	if err != nil {
		return nil, fmt.Errorf("read allocation: %w", err)
	}
	return now.Proto(), nil
}

// retryRelease resumes the stuck run, or begins a run of its own where none is open. Claims that were given up before
// are tried again too. The stuck run has passed the steps that would clean these up: then a run of its own, which
// begins with the first step, takes its place.
func (s *Server) retryRelease(ctx context.Context, tx pgx.Tx, f *failedRelease) (*lifecyclev1.Operation, error) {
	if err := claims.ReadoptOrphans(ctx, tx, f.workspace.ID, f.allocated.Epoch); err != nil {
		return nil, err
	}
	if err := allocation.AnnounceOrphans(ctx, tx, f.workspace.ID, f.allocated.Epoch); err != nil {
		return nil, err
	}
	if !f.open || f.allocated.Orphans > 0 {
		return s.startRelease(ctx, tx, f, kRetryRelease, nil)
	}
	v, err := s.deps.Core.RetryUndo(ctx, tx, f.run.ID, rpc.ActorFrom(ctx))
	if err != nil {
		return nil, err
	}
	after, err := workspace.Get(ctx, tx, f.workspace.ID)
	if err != nil {
		return nil, err
	}
	return verbAnswer(after, v), nil
}

// startRelease begins a run that cleans up. One that is stuck is closed in the same transaction.
func (s *Server) startRelease(ctx context.Context, tx pgx.Tx, f *failedRelease, kind commonv1.OperationKind,
	w *spec.Attestation,
) (*lifecyclev1.Operation, error) {
	definition := provision.DefinitionRelease
	if f.workspace.DesiredState == "decommissioned" || f.workspace.State == "decommissioned" || f.open &&
		f.run.Kind == "decommission" {
		definition = provision.DefinitionReleaseDecommissioned
	}
	if f.open {
		if _, err := s.deps.Core.CloseStuck(ctx, tx, f.run.ID); err != nil {
			return nil, err
		}
	}
	in := spec.NewInput(f.workspace.Tenant, f.workspace.Name, f.workspace.Spec)
	in.Attestation = w
	started, err := s.deps.Core.Start(ctx, tx, saga.StartRequest{
		WorkspaceID: f.workspace.ID, Kind: kind, Definition: definition, Input: in, Requester: rpc.ActorFrom(ctx),
		CorrelationID: obs.From(ctx).CorrelationID,
	})
	if err != nil {
		return nil, err
	}
	return answer(f.workspace.ID, started), nil
}

// releaseOptions returns the rows of the table of actions for the workspace's allocation.
func (s *Server) releaseOptions(ctx context.Context, tx pgx.Tx, w workspace.Row) ([]*lifecyclev1.ActionOption, error) {
	retry := &lifecyclev1.ActionOption{Kind: kRetryRelease, Consequence: retryReleaseConsequence}
	force := &lifecyclev1.ActionOption{
		Kind:        kForceRelease,
		Consequence: "frees the allocation on a person's word: what cannot be cleaned becomes orphan claims",
	}
	a, held, err := allocation.Live(ctx, tx, w.ID)
	if err != nil {
		return nil, err
	}
	unmet := []string{"no release of an allocation of the workspace has failed"}
	if held {
		f, err := s.failedReleaseOf(ctx, tx, a.ID, false)
		if err != nil {
			return nil, err
		}
		if unmet = f.unmet(); len(unmet) == 0 {
			force.Consequence = fmt.Sprintf("allocation %s, fence %d: %s", a.ID, a.Fence, f.forceConsequence())
			retry.Consequence = fmt.Sprintf("allocation %s: %s", a.ID, retryReleaseConsequence)
		}
	}
	for _, o := range []*lifecyclev1.ActionOption{retry, force} {
		o.Possible, o.Unmet = len(unmet) == 0, unmet
		if !o.GetPossible() {
			o.Reason = commonv1.Reason_REASON_PRECONDITION_FAILED
		}
	}
	return []*lifecyclev1.ActionOption{retry, force}, nil
}
