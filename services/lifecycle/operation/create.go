package operation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// createRequest is a create request in the form in which requests are compared: the completed spec, with open values,
// and its sum. It is never stored.
type createRequest struct {
	tenant tenants.Tenant
	name   string
	spec   *lifecyclev1.WorkspaceSpec
	sum    secretenv.Sum
	runID  string
}

// create admits a new workspace and starts its provisioning, or joins the one that is under way with the same spec.
func (s *Server) create(ctx context.Context, req *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
	c := req.GetCreate()
	if err := secretenv.Check(c.GetSpec()); err != nil {
		return nil, err
	}
	full, err := s.deps.Catalogue.Complete(c.GetSpec())
	if err != nil {
		return nil, err
	}
	if err := spec.CheckShape(full.GetWorkloads()); err != nil {
		return nil, err
	}
	w := createRequest{name: c.GetName(), spec: full, runID: ids.New()}
	if w.sum, err = secretenv.SumOf(full); err != nil {
		return nil, err
	}
	if w.tenant, err = tenants.For(ctx, s.deps.DB, c.GetTenant(), false); err != nil {
		return nil, err
	}
	if req.GetDryRun() {
		return s.dryCreate(ctx, w)
	}
	if op, ok, err := s.replayCreate(ctx, s.deps.DB, w, req.GetIdempotencyKey()); err != nil || ok {
		return op, err
	}
	if err := rollback.Refuse(ctx, s.deps.DB); err != nil {
		return nil, err
	}
	// The lock store is only a quick hint that another request has begun the create; reading the run that it names
	// confirms it.
	hint := uuid.NewSHA1(uuid.NameSpaceURL, []byte("gpuaas:"+w.tenant.ID+"/"+w.name)).String()
	held := s.deps.Lock.Acquire(ctx, hint, w.runID)
	if held.Kind == lock.Held {
		if op, ok := s.fastJoin(ctx, w, held.RunID); ok {
			if req.GetIdempotencyKey() == "" {
				return op, nil
			}
		}
	}
	op, err := s.admit(ctx, req, w)
	for pg.IsUnique(err, "workspace_name") { // another request has just taken the name: read again
		op, err = s.admit(ctx, req, w)
	}
	if err == nil {
		s.deps.Core.Committed()
	}
	if held.Kind == lock.Won && (err != nil || op.GetJoined()) {
		s.deps.Lock.Release(ctx, hint, w.runID)
	}
	return op, err
}

// fastJoin returns a join from the run that the lock store named, if that run is open, of this workspace, and of this
// spec.
func (s *Server) fastJoin(ctx context.Context, w createRequest, runID string) (*lifecyclev1.Operation, bool) {
	run, err := runs.Get(ctx, s.deps.DB, runID)
	if err != nil || !joinable(run) || run.TenantID != w.tenant.ID {
		return nil, false
	}
	ws, err := workspace.Get(ctx, s.deps.DB, run.WorkspaceID)
	if err != nil || ws.Name != w.name {
		return nil, false
	}
	if same, err := s.deps.Secrets.Matches(ws.SpecDigest, w.sum); err != nil || !same {
		return nil, false
	}
	return joined(ws, run), true
}

// admit decides in one transaction: the name, the quota, the workspace, its run, its key. A unique violation of
// workspace_name means that another request took the name between this one's read and its insert.
func (s *Server) admit(ctx context.Context, req *lifecyclev1.RequestOperationRequest,
	w createRequest,
) (*lifecyclev1.Operation, error) {
	var op *lifecyclev1.Operation
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := lockKey(ctx, tx, w.tenant.ID, req.GetIdempotencyKey()); err != nil {
			return err
		}
		// The tenant's row is locked, so that the quota is exact however many requests come at once.
		t, err := tenants.For(ctx, tx, w.tenant.ID, true)
		if err != nil {
			return err
		}
		var ok bool
		if op, ok, err = s.replayCreate(ctx, tx, w, req.GetIdempotencyKey()); err != nil || ok {
			return err
		}
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		if op, ok, err = s.joinByName(ctx, tx, w); err != nil {
			return err
		}
		if !ok {
			if err := tenants.Within(ctx, tx, t, "", w.spec); err != nil {
				return err
			}
			if op, err = s.begin(ctx, tx, req, w); err != nil {
				return err
			}
		}
		if req.GetIdempotencyKey() != "" {
			digest, err := s.keyDigest(w)
			if err != nil {
				return err
			}
			if err := keepKey(ctx, tx, w.tenant.ID, req.GetIdempotencyKey(), digest, op.GetOperationId()); err != nil {
				return err
			}
		}
		return failpoint.Hit("lifecycle.admit.before_commit")
	})
	if err != nil {
		return nil, err
	}
	if err := failpoint.Hit("lifecycle.admit.after_commit"); err != nil {
		return nil, err
	}
	return op, nil
}

var workspaceByName = pg.Define(pg.RoleLifecycle, "operation.workspace_by_name",
	`SELECT id::text FROM lifecycle.workspace WHERE tenant_id = $1 AND name = $2 AND standing > 0`)

// joinByName joins the open create of a workspace of that name and spec; a name that is taken otherwise is refused with
// the id of the workspace that has it.
func (s *Server) joinByName(ctx context.Context, tx pgx.Tx, w createRequest) (*lifecyclev1.Operation, bool, error) {
	id, err := pg.Value[string](ctx, tx, workspaceByName, w.tenant.ID, w.name)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("look for name: %w", err)
	}
	ws, err := workspace.Get(ctx, tx, id)
	if err != nil {
		return nil, false, err
	}
	run, open, err := runs.Live(ctx, tx, id)
	if err != nil {
		return nil, false, err
	}
	if open && joinable(run) {
		same, err := s.deps.Secrets.Matches(ws.SpecDigest, w.sum)
		if err != nil {
			return nil, false, err
		}
		if same {
			return joined(ws, run), true, nil
		}
	}
	return nil, false, fault.New(commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN,
		fmt.Sprintf("workspace %s/%s is there already and %s", w.tenant.Name, w.name, ws.State),
		fault.Unmet(fmt.Sprintf("workspace %s/%s exists and is %s", w.tenant.Name, w.name, ws.State)),
		fault.Conflicting(id), fault.Remedy("take another name, or decommission workspace "+id))
}

func (s *Server) begin(ctx context.Context, tx pgx.Tx, req *lifecyclev1.RequestOperationRequest,
	w createRequest,
) (*lifecyclev1.Operation, error) {
	id := ids.New()
	raw, digest, err := s.sealed(w, id)
	if err != nil {
		return nil, err
	}
	_, err = workspace.Insert(ctx, tx, workspace.Draft{
		ID: id, TenantID: w.tenant.ID, Name: w.name, Spec: raw, SpecDigest: digest, CreatedBy: requester(ctx, req),
	})
	if err != nil {
		return nil, err
	}
	started, err := s.deps.Core.Start(ctx, tx, saga.StartRequest{
		WorkspaceID: id, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Definition: provision.DefinitionProvision,
		RunID: w.runID, Input: spec.NewInput(w.tenant.Name, w.name, raw), Requester: requester(ctx, req),
		CorrelationID: obs.From(ctx).CorrelationID, NextEpoch: true,
	})
	if err != nil {
		return nil, err
	}
	op := answer(id, started)
	return op, s.decided(ctx, tx, w.tenant.ID, req, op)
}

// sealed returns a request's spec and digest as they are stored with the workspace that is made of it.
func (s *Server) sealed(w createRequest, workspaceID string) (json.RawMessage, string, error) {
	spec, err := s.deps.Secrets.Seal(w.spec, secretenv.Owner{TenantID: w.tenant.ID, WorkspaceID: workspaceID})
	if err != nil {
		return nil, "", err
	}
	raw, err := names.MarshalJSON(spec)
	if err != nil {
		return nil, "", fmt.Errorf("encode spec: %w", err)
	}
	digest, err := s.deps.Secrets.Digest(w.sum)
	return raw, digest, err
}

// dryCreate returns what a create would do.
func (s *Server) dryCreate(ctx context.Context, w createRequest) (*lifecyclev1.Operation, error) {
	op := &lifecyclev1.Operation{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, DryRun: true,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		Consequence: fmt.Sprintf("provisions %s/%s by %s with %d GPUs", w.tenant.Name, w.name,
			names.Of(w.spec.GetPlacement()), w.spec.GetGpus()),
	}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		there, ok, err := s.joinByName(ctx, tx, w)
		if err != nil {
			return err
		}
		if ok {
			op = there
			op.DryRun, op.Consequence = true, "joins the operation under way"
			return nil
		}
		return tenants.Within(ctx, tx, w.tenant, "", w.spec)
	})
	if err != nil {
		return nil, err
	}
	return op, nil
}
