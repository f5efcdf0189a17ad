package reap

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// InstancesDeps are the dependencies of an Instances.
type InstancesDeps struct {
	DB         *pgxpool.Pool
	Drivers    map[commonv1.PlacementDriver]placement.Driver
	Identities allocation.Identities
	Audit      *audit.Log
	// Committed is called after each commit that wrote events.
	Committed func()
}

// Instances serves InstanceService: an operator uses it to end an instance that a placement runs and that this database
// cannot account for. Such an instance may run a tenant's work, so no sweep ends it; a person does, with a reason.
type Instances struct{ deps InstancesDeps }

// NewInstances returns a server with the given dependencies.
func NewInstances(deps InstancesDeps) *Instances { return &Instances{deps: deps} }

// listedInstance is an instance as the list of its placement has it.
type listedInstance struct {
	placement.Instance

	kind   commonv1.PlacementDriver
	driver placement.Driver
}

// EndInstance ends an instance that nothing in this database accounts for, and returns once its placement has confirmed
// the end.
func (s *Instances) EndInstance(ctx context.Context,
	req *lifecyclev1.EndInstanceRequest,
) (*lifecyclev1.EndInstanceResponse, error) {
	entry := audit.Entry{
		Action: "instance.end", Reason: req.GetReason(), SubjectType: "instance",
		SubjectID: req.GetInstance(),
	}
	res, err := s.end(ctx, req, &entry)
	if err != nil && !req.GetDryRun() {
		return nil, s.deps.Audit.Refuse(ctx, entry, err)
	}
	return res, err
}

func (s *Instances) end(ctx context.Context, req *lifecyclev1.EndInstanceRequest,
	entry *audit.Entry,
) (*lifecyclev1.EndInstanceResponse, error) {
	found, err := s.find(ctx, req.GetInstance())
	if err != nil {
		return nil, err
	}
	entry.Details = map[string]any{
		"epoch": found.Epoch, "placement": names.Of(found.kind),
		"provider_id": found.ProviderID, "workspace": found.WorkspaceID,
	}
	if ids.Valid(found.InstanceID) {
		entry.SubjectID = found.InstanceID
	}
	err = pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error { return s.mayEnd(ctx, tx, found, entry) })
	if err != nil {
		return nil, err
	}
	res := &lifecyclev1.EndInstanceResponse{Consequence: "ends the instance and everything that runs on it; the data " +
		"on it is lost"}
	if req.GetDryRun() {
		res.Instance = found.proto()
		return res, nil
	}
	// The identity first: its retirement can be repeated, whereas an instance that has ended is not found again by a
	// second request.
	if err := s.retire(ctx, found); err != nil {
		return nil, err
	}
	if err := found.driver.End(ctx, found.WorkspaceID, found.Epoch); err != nil {
		if _, typed := fault.As(err); typed {
			return nil, err
		}
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the placement did not confirm the end of the instance",
			fault.Cause(err),
			fault.Remedy("ask again: an end that is under way goes on"))
	}
	err = pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		i, pos, err := allocation.EndUnaccounted(ctx, tx, found.kind, found.Instance,
			"ended by "+rpc.ActorFrom(ctx)+": "+req.GetReason())
		if err != nil {
			return err
		}
		res.Pos = pos
		if p, ok := allocation.UnaccountedEvent(i).Payload.(*lifecyclev1.Instance); ok {
			res.Instance = p
		}
		_, err = audit.Record(ctx, tx, *entry)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("record end of instance: %w", err)
	}
	s.deps.Committed()
	return res, nil
}

// find looks an instance up in the lists of all placements, by its id, by the provider's id, or by workspace:epoch, as
// findings name it.
func (s *Instances) find(ctx context.Context, ref string) (listedInstance, error) {
	var ended *listedInstance
	for _, kind := range slices.Sorted(maps.Keys(s.deps.Drivers)) {
		driver := s.deps.Drivers[kind]
		list, err := driver.List(ctx)
		if err != nil {
			return listedInstance{}, fault.New(commonv1.Reason_REASON_UNAVAILABLE,
				"the placement "+names.Of(kind)+" did not list its instances", fault.Cause(err))
		}
		for _, b := range list {
			if ref != b.InstanceID && ref != b.ProviderID && ref != fmt.Sprintf("%s:%d", b.WorkspaceID, b.Epoch) {
				continue
			}
			found := listedInstance{Instance: b, kind: kind, driver: driver}
			if b.EndedAt.IsZero() {
				return found, nil
			}
			ended = &found
		}
	}
	if ended != nil {
		return listedInstance{}, fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the instance has ended",
			fault.Unmet("its placement lists it as ended"),
			fault.Remedy("nothing is left to do"))
	}
	return listedInstance{}, fault.New(commonv1.Reason_REASON_NOT_FOUND,
		"no placement lists an instance "+fault.Named(ref),
		fault.Remedy("take the id or the provider id from `gpuaas instances list --live`"))
}

// mayEnd refuses an instance that this database accounts for: a workspace that is in use ends its own instances, and so
// does an open operation.
func (s *Instances) mayEnd(ctx context.Context, tx pgx.Tx, found listedInstance, entry *audit.Entry) error {
	if !ids.Valid(found.WorkspaceID) {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the instance is of no mesh: its placement lists it without a workspace",
			fault.Remedy("end it at its provider"))
	}
	if err := rollback.Refuse(ctx, tx); err != nil {
		return err
	}
	if _, err := pg.Exec(ctx, tx, allocation.LockWorkspace, found.WorkspaceID); err != nil {
		return fmt.Errorf("lock workspace: %w", err)
	}
	owners, err := OwnersOf(ctx, tx, []placement.Instance{found.Instance})
	if err != nil {
		return err
	}
	verdict, why := Belongs(found.Instance, owners[0])
	if !owners[0].Known {
		return nil
	}
	w, err := workspace.Get(ctx, tx, found.WorkspaceID)
	if err != nil {
		return err
	}
	entry.TenantID, entry.WorkspaceID = w.TenantID, w.ID
	over := w.State == names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED) ||
		w.State == names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_FAILED)
	if over && verdict == Unknown {
		return nil
	}
	switch verdict {
	case Orphan:
		why = "the sweep of orphans ends it, since " + why
	case Owned, Gone:
		why = "it is the workspace's own"
	case Unknown:
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		fmt.Sprintf("the instance is of workspace %s, which is known here and %s: %s", w.Name, w.State, why),
		fault.Conflicting(w.ID),
		fault.Unmet("its workspace "+w.Name+" is known here and "+w.State+", and ends its instances itself"),
		fault.Remedy("recreate or decommission the workspace: that ends its instances, the superseded ones too"))
}

// retire ends the identity of the instance, if recovery has one.
func (s *Instances) retire(ctx context.Context, found listedInstance) error {
	if !placement.HasOwnInstance(found.kind) || !ids.Valid(found.InstanceID) {
		return nil
	}
	_, err := s.deps.Identities.RetireInstance(ctx, &recoveryv1.RetireInstanceRequest{
		InstanceId: found.InstanceID, WorkspaceId: found.WorkspaceID, Epoch: found.Epoch,
		Reason: "its instance is ended by a person",
	})
	if err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the identity of the instance is not retired yet",
			fault.Cause(err), fault.Remedy("ask again"))
	}
	return nil
}

// proto returns the instance as the placement lists it.
func (b listedInstance) proto() *lifecyclev1.Instance {
	p := &lifecyclev1.Instance{
		InstanceId: b.InstanceID, WorkspaceId: b.WorkspaceID, Epoch: b.Epoch,
		State: commonv1.InstanceState_INSTANCE_STATE_LIVE, Placement: b.kind, ProviderId: b.ProviderID, Unaccounted: true,
	}
	if !b.StartedAt.IsZero() {
		p.StartedAt = timestamppb.New(b.StartedAt)
	}
	return p
}
