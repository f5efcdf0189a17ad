package operation

import (
	"context"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// Deps are the dependencies of a Server.
type Deps struct {
	Logger    *slog.Logger
	DB        *pgxpool.Pool
	Core      *saga.Core
	Catalogue spec.Catalogue
	// Lock makes joins fast and may be nil: it decides nothing.
	Lock   *lock.Lock
	Policy policy.Reader
	// Audit records requests that are refused or joined; a request that changes state is recorded with its change. If it
	// is nil, only those are recorded.
	Audit *audit.Log
	// DefaultQuota is the quota of a tenant that is made without one.
	DefaultQuota tenants.Quota
	// Secrets seals the environment values of specs.
	Secrets *secretenv.Keys
}

// Server serves WorkspaceService.
type Server struct {
	deps    Deps
	tenants *tenants.Register
}

// NewServer returns a server with the given dependencies.
func NewServer(deps Deps) *Server {
	return &Server{deps: deps, tenants: &tenants.Register{
		DB: deps.DB, Audit: deps.Audit, DefaultQuota: deps.DefaultQuota, Committed: func() { deps.Core.Committed() },
	}}
}

// CreateTenant makes a tenant.
func (s *Server) CreateTenant(ctx context.Context,
	req *lifecyclev1.CreateTenantRequest,
) (*lifecyclev1.CreateTenantResponse, error) {
	return s.tenants.Create(ctx, req)
}

// RequestOperation is the one way to create, replace, cancel or end a workspace.
func (s *Server) RequestOperation(ctx context.Context,
	req *lifecyclev1.RequestOperationRequest,
) (*lifecyclev1.RequestOperationResponse, error) {
	var op *lifecyclev1.Operation
	var err error
	if req.GetKind() == commonv1.OperationKind_OPERATION_KIND_CREATE {
		if req.GetCreate() == nil {
			return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "a create names tenant, name and spec")
		}
		if req.GetExpectedEpoch() != 0 {
			return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "an expected epoch goes with a recreation alone")
		}
		op, err = s.create(ctx, req)
	} else {
		if req.GetWorkspaceId() == "" {
			return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "this operation names a workspace that is there")
		}
		op, err = s.operate(ctx, req)
	}
	if err != nil {
		return nil, s.refused(ctx, req, err)
	}
	s.joined(ctx, req, op)
	return &lifecyclev1.RequestOperationResponse{Operation: op}, nil
}

// requester returns the actor of a request for the record, after the requester that the request itself names, if any.
func requester(ctx context.Context, req *lifecyclev1.RequestOperationRequest) string {
	by := rpc.ActorFrom(ctx)
	if req.GetRequester() != "" {
		by = req.GetRequester() + ":" + by
	}
	return by
}

// answer returns a started operation as callers get it.
func answer(workspaceID string, started saga.Started) *lifecyclev1.Operation {
	return &lifecyclev1.Operation{
		OperationId: started.RunID, WorkspaceId: workspaceID, Kind: started.Kind, Joined: started.Joined,
		Epoch: started.Epoch, State: started.State, Pos: started.Pos,
	}
}

// verbAnswer returns the operation that a verb on an open run results in: the run's own.
func verbAnswer(w workspace.Row, v saga.Verb) *lifecyclev1.Operation {
	return &lifecyclev1.Operation{
		OperationId: v.Run.ID, WorkspaceId: w.ID, Kind: v.Run.OperationKind(), Epoch: w.Epoch, State: w.WorkspaceState(),
		Pos: v.Pos,
	}
}
