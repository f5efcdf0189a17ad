package gateway

import (
	"context"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/readmodel/auditlog"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/gateway/forward"
	"github.com/gpuaas/mesh/services/readmodel/gateway/meshstatus"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/status"
	"github.com/gpuaas/mesh/services/readmodel/view"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Deps are the dependencies that the servers of this package share.
type Deps struct {
	Sessions *people.Sessions
	Reads    caller.Reads
	Audit    *auditlog.Log
	Hub      *watch.Hub
	Owners   forward.Owners
	Status   *meshstatus.Reporter
}

// Query serves QueryService. It reads the projections, and asks the owners for policy, actions and output.
type Query struct{ deps Deps }

// NewQuery returns the server.
func NewQuery(deps Deps) *Query { return &Query{deps: deps} }

// WhoAmI returns the person behind the session.
func (q *Query) WhoAmI(ctx context.Context, _ *readmodelv1.WhoAmIRequest) (*readmodelv1.WhoAmIResponse, error) {
	session, err := q.session(ctx)
	if err != nil {
		return nil, err
	}
	version, _ := obs.Build()
	return &readmodelv1.WhoAmIResponse{
		Subject: session.Person.Subject, TenantId: session.Person.TenantID, Roles: session.Person.Roles,
		ExpiresAt: timestamppb.New(session.ExpiresAt), Version: version,
	}, nil
}

// session returns the session behind a call.
func (q *Query) session(ctx context.Context) (people.Session, error) {
	header := http.Header{}
	if info, ok := connect.CallInfoForHandlerContext(ctx); ok {
		header = info.RequestHeader()
	}
	return q.deps.Sessions.FromHeader(ctx, header)
}

// GetStatus returns the status of the mesh's parts. The counts cover what the person may see.
func (q *Query) GetStatus(ctx context.Context, _ *readmodelv1.GetStatusRequest) (*readmodelv1.GetStatusResponse,
	error,
) {
	return q.deps.Status.Get(ctx)
}

// ListNodes lists the fleet.
func (q *Query) ListNodes(ctx context.Context, req *readmodelv1.ListNodesRequest) (*readmodelv1.ListNodesResponse,
	error,
) {
	f := view.NodeFilter{
		ConnectedOnly: req.GetConnectedOnly(), Name: req.GetName(),
		IncludeRetired: req.GetIncludeRetired(), ID: req.GetNodeId(),
	}
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*readmodelv1.Node, string, error) {
			return s.Nodes(ctx, f, page)
		})
	return &readmodelv1.ListNodesResponse{Items: items, NextPageToken: next}, err
}

// GetNode returns one node by id or name.
func (q *Query) GetNode(ctx context.Context, req *readmodelv1.GetNodeRequest) (*readmodelv1.GetNodeResponse, error) {
	n, err := caller.Get(ctx, q.deps.Reads, req.GetMinPos(), (*view.Snapshot).Node, req.GetNode())
	if err == nil && req.GetHealth() {
		n.Health = q.health(ctx, n.GetNodeId())
	}
	return &readmodelv1.GetNodeResponse{Node: n}, err
}

// ListNodeVerdicts lists the times for which a node was not healthy.
func (q *Query) ListNodeVerdicts(ctx context.Context,
	req *readmodelv1.ListNodeVerdictsRequest,
) (*readmodelv1.ListNodeVerdictsResponse, error) {
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*recoveryv1.VerdictPeriod, string, error) {
			return s.NodeVerdicts(ctx, req.GetNode(), page)
		})
	return &readmodelv1.ListNodeVerdictsResponse{Items: items, NextPageToken: next}, err
}

// Resolve returns the object that a name, an id or a part of an id stands for.
func (q *Query) Resolve(ctx context.Context, req *readmodelv1.ResolveRequest) (*readmodelv1.ResolveResponse, error) {
	var out *readmodelv1.ResolveResponse
	err := q.deps.Reads.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		out, err = s.Resolve(ctx, req.GetRef(), req.GetKinds())
		return err
	})
	return out, err
}

// ListTenants lists tenants.
func (q *Query) ListTenants(ctx context.Context, req *readmodelv1.ListTenantsRequest) (*readmodelv1.ListTenantsResponse,
	error,
) {
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*lifecyclev1.Tenant, string, error) {
			return s.Tenants(ctx, page)
		})
	return &readmodelv1.ListTenantsResponse{Items: items, NextPageToken: next}, err
}

// ListWorkspaces lists workspaces that the person may see.
func (q *Query) ListWorkspaces(ctx context.Context,
	req *readmodelv1.ListWorkspacesRequest,
) (*readmodelv1.ListWorkspacesResponse, error) {
	f := view.WorkspaceFilter{State: req.GetState()}
	if req.GetTenant() == "" {
		return q.allWorkspaces(ctx, req, f)
	}
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*readmodelv1.Workspace, string, error) {
			t, err := s.Tenant(ctx, req.GetTenant())
			if err != nil {
				return nil, "", err
			}
			f.Tenant = t.GetTenantId()
			return s.Workspaces(ctx, f, page)
		})
	return &readmodelv1.ListWorkspacesResponse{Items: items, NextPageToken: next}, err
}

// allWorkspaces lists workspaces without a filter by tenant, for which one statement is enough.
func (q *Query) allWorkspaces(
	ctx context.Context, req *readmodelv1.ListWorkspacesRequest, f view.WorkspaceFilter,
) (*readmodelv1.ListWorkspacesResponse, error) {
	scope, err := caller.ScopeOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := q.deps.Reads.Projector.WaitFor(ctx, req.GetMinPos()); err != nil {
		return nil, err
	}
	page := list.Page{Size: req.GetPageSize(), Token: req.GetPageToken()}
	items, next, err := q.deps.Reads.Reader.Workspaces(ctx, scope, f, page)
	return &readmodelv1.ListWorkspacesResponse{Items: items, NextPageToken: next}, err
}

// GetWorkspace returns one workspace.
func (q *Query) GetWorkspace(ctx context.Context,
	req *readmodelv1.GetWorkspaceRequest,
) (*readmodelv1.GetWorkspaceResponse, error) {
	out := &readmodelv1.GetWorkspaceResponse{}
	err := q.deps.Reads.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		if out.Workspace, err = s.Workspace(ctx, req.GetWorkspace()); err != nil {
			return err
		}
		return s.WithFindings(ctx, out.GetWorkspace())
	})
	return out, err
}

// GetTimeline returns the runs and step attempts of a workspace.
func (q *Query) GetTimeline(ctx context.Context, req *readmodelv1.GetTimelineRequest) (*readmodelv1.GetTimelineResponse,
	error,
) {
	var out *readmodelv1.GetTimelineResponse
	err := q.deps.Reads.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		out, err = s.Timeline(ctx, req.GetWorkspace(), req.GetRunId())
		return err
	})
	return out, err
}

// GetActions asks lifecycle which operations are possible on a workspace now.
func (q *Query) GetActions(ctx context.Context, req *readmodelv1.GetActionsRequest) (*readmodelv1.GetActionsResponse,
	error,
) {
	t, err := caller.Get(ctx, q.deps.Reads, req.GetMinPos(), (*view.Snapshot).Target, req.GetWorkspace())
	if err != nil {
		return nil, err
	}
	answer, err := q.deps.Owners.Workspaces.GetActions(ctx,
		&lifecyclev1.GetActionsRequest{WorkspaceId: t.Workspace.GetWorkspaceId()})
	return &readmodelv1.GetActionsResponse{Actions: forward.Actions(ctx, t, answer.GetActions())},
		forward.RefusedOn(ctx, "lifecycle", t, err)
}

// ListTasks lists tasks.
func (q *Query) ListTasks(ctx context.Context, req *readmodelv1.ListTasksRequest) (*readmodelv1.ListTasksResponse,
	error,
) {
	f := view.TaskFilter{WorkspaceID: req.GetWorkspaceId(), State: req.GetState(), CurrentOnly: req.GetCurrentOnly()}
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*readmodelv1.Task, string, error) {
			if req.GetNode() != "" {
				n, err := s.Node(ctx, req.GetNode())
				if err != nil {
					return nil, "", err
				}
				f.NodeID = n.GetNodeId()
			}
			return s.Tasks(ctx, f, page)
		})
	return &readmodelv1.ListTasksResponse{Items: items, NextPageToken: next}, err
}

// GetTask returns one task with all its transitions.
func (q *Query) GetTask(ctx context.Context, req *readmodelv1.GetTaskRequest) (*readmodelv1.GetTaskResponse, error) {
	t, err := caller.Get(ctx, q.deps.Reads, req.GetMinPos(), (*view.Snapshot).Task, req.GetTaskId())
	return &readmodelv1.GetTaskResponse{Task: t}, err
}

// ListInstances lists launched instances.
func (q *Query) ListInstances(ctx context.Context,
	req *readmodelv1.ListInstancesRequest,
) (*readmodelv1.ListInstancesResponse, error) {
	f := view.PerWorkspaceFilter{WorkspaceID: req.GetWorkspaceId(), LiveOnly: req.GetLiveOnly()}
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*lifecyclev1.Instance, string, error) {
			return s.Instances(ctx, f, page)
		})
	return &readmodelv1.ListInstancesResponse{Items: items, NextPageToken: next}, err
}

// ListClaims lists resource claims.
func (q *Query) ListClaims(ctx context.Context, req *readmodelv1.ListClaimsRequest) (*readmodelv1.ListClaimsResponse,
	error,
) {
	f := view.PerWorkspaceFilter{
		WorkspaceID: req.GetWorkspaceId(), Orphaned: req.GetOrphanedOnly(),
		Released: req.GetIncludeReleased(),
	}
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*lifecyclev1.Claim, string, error) {
			return s.Claims(ctx, f, page)
		})
	return &readmodelv1.ListClaimsResponse{Items: items, NextPageToken: next}, err
}

// ListAllocations lists allocations.
func (q *Query) ListAllocations(ctx context.Context,
	req *readmodelv1.ListAllocationsRequest,
) (*readmodelv1.ListAllocationsResponse, error) {
	f := view.PerWorkspaceFilter{WorkspaceID: req.GetWorkspaceId()}
	items, next, err := caller.List(ctx, q.deps.Reads, req,
		func(ctx context.Context, s *view.Snapshot, page list.Page) ([]*lifecyclev1.Allocation, string, error) {
			return s.Allocations(ctx, f, page)
		})
	return &readmodelv1.ListAllocationsResponse{Items: items, NextPageToken: next}, err
}

// GetPolicy lists the policy keys with the values that recovery, their owner, has now.
func (q *Query) GetPolicy(ctx context.Context, req *readmodelv1.GetPolicyRequest) (*readmodelv1.GetPolicyResponse,
	error,
) {
	answer, err := q.deps.Owners.Policies.GetPolicy(ctx, &recoveryv1.GetPolicyRequest{Key: req.GetKey()})
	if err != nil {
		return nil, forward.RefusedOn(ctx, "recovery", view.Target{}, err)
	}
	scope, err := caller.ScopeOf(ctx)
	return &readmodelv1.GetPolicyResponse{Items: list.ShownAll(scope, answer.GetKeys())}, err
}

// ExplainReason returns what a reason means and what to do about it.
func (q *Query) ExplainReason(ctx context.Context,
	req *readmodelv1.ExplainReasonRequest,
) (*readmodelv1.ExplainReasonResponse, error) {
	explain := status.Explain
	if caller.OperatorsOnly(ctx) != nil {
		explain = status.ExplainToTenant
	}
	rows, err := explain(req.GetCode())
	return &readmodelv1.ExplainReasonResponse{Items: rows}, err
}
