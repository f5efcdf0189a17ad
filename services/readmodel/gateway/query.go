package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Owners are the clients of the services that own the state. Each call asserts the person of the context.
type Owners struct {
	Workspaces  lifecyclev1connect.WorkspaceServiceClient
	Allocations lifecyclev1connect.AllocationServiceClient
	Findings    lifecyclev1connect.FindingServiceClient
	Instances   lifecyclev1connect.InstanceServiceClient
	Outputs     lifecyclev1connect.OutputServiceClient
	Tasks       lifecyclev1connect.TaskServiceClient
	Gates       lifecyclev1connect.GateServiceClient
	Identities  recoveryv1connect.IdentityServiceClient
	Policies    recoveryv1connect.PolicyServiceClient
	Watchdog    recoveryv1connect.WatchdogServiceClient
	Rollback    recoveryv1connect.RollbackServiceClient
	Keys        recoveryv1connect.KeyServiceClient
	Announcers  []project.Owner // of the live rows that are projected
}

// Probe asks a service for its health and for the health of the parts that it uses.
type Probe struct {
	Name  string
	Parts []string // those whose health this service alone reports
	Ask   func(ctx context.Context) (*commonv1.GetHealthResponse, error)
}

// Deps are the dependencies that the servers of this package share.
type Deps struct {
	Logger    *slog.Logger
	Sessions  *Sessions
	Projector *project.Projector
	Audit     *project.Audit
	Reader    *view.Reader
	Hub       *watch.Hub
	Owners    Owners
	Probes    []Probe
	// DB reads how much space history takes; nil: the status does not show it.
	DB pg.Querier
	// Room returns the fault of a database that refuses writes for lack of a resource; nil: the status does not check
	// that.
	Room func(context.Context) error
}

// Query serves QueryService. It reads the projections, and asks the owners for policy, actions and output.
type Query struct {
	deps   Deps
	probed probes
}

// NewQuery returns the server.
func NewQuery(deps Deps) *Query { return &Query{deps: deps} }

// scopeOf returns the scope of the person behind a call.
func scopeOf(ctx context.Context) (view.Scope, error) {
	p, ok := rpc.PersonFrom(ctx)
	if !ok {
		return view.Scope{}, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
	}
	return view.ScopeOf(p)
}

// read waits for minPos and calls fn with a snapshot for the person behind the call.
func (q *Query) read(ctx context.Context, minPos string, fn func(ctx context.Context, s *view.Snapshot) error) error {
	scope, err := scopeOf(ctx)
	if err != nil {
		return err
	}
	if err := q.deps.Projector.WaitFor(ctx, minPos); err != nil {
		return err
	}
	return q.deps.Reader.Read(ctx, scope, fn)
}

// pager is a request for a page of a list.
type pager interface {
	GetMinPos() string
	GetPageSize() int32
	GetPageToken() string
}

// list returns the page that fn reads for req, and the token of the next page.
func list[T any](ctx context.Context, q *Query, req pager,
	fn func(ctx context.Context, s *view.Snapshot, page view.Page) ([]T, string, error),
) ([]T, string, error) {
	var items []T
	var next string
	err := q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		items, next, err = fn(ctx, s, view.Page{Size: req.GetPageSize(), Token: req.GetPageToken()})
		return err
	})
	return items, next, err
}

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
func (q *Query) session(ctx context.Context) (Session, error) {
	header := http.Header{}
	if info, ok := connect.CallInfoForHandlerContext(ctx); ok {
		header = info.RequestHeader()
	}
	return q.deps.Sessions.FromHeader(ctx, header)
}

// ListNodes lists the fleet.
func (q *Query) ListNodes(ctx context.Context, req *readmodelv1.ListNodesRequest) (*readmodelv1.ListNodesResponse,
	error,
) {
	f := view.NodeFilter{
		ConnectedOnly: req.GetConnectedOnly(), Name: req.GetName(),
		IncludeRetired: req.GetIncludeRetired(), ID: req.GetNodeId(),
	}
	items, next, err := list(ctx, q, req,
		func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*readmodelv1.Node, string, error) {
			return s.Nodes(ctx, f, page)
		})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListNodesResponse{Items: items, NextPageToken: next}, nil
}

// GetNode returns one node by id or name.
func (q *Query) GetNode(ctx context.Context, req *readmodelv1.GetNodeRequest) (*readmodelv1.GetNodeResponse, error) {
	out := &readmodelv1.GetNodeResponse{}
	err := q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		out.Node, err = s.Node(ctx, req.GetNode())
		return err
	})
	return out, err
}

// Resolve returns the object that a name, an id or a part of an id stands for.
func (q *Query) Resolve(ctx context.Context, req *readmodelv1.ResolveRequest) (*readmodelv1.ResolveResponse, error) {
	var out *readmodelv1.ResolveResponse
	err := q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
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
	items, next, err := list(ctx, q, req,
		func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*lifecyclev1.Tenant, string, error) {
			return s.Tenants(ctx, page)
		})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListTenantsResponse{Items: items, NextPageToken: next}, nil
}

// ListWorkspaces lists workspaces that the person may see.
func (q *Query) ListWorkspaces(ctx context.Context,
	req *readmodelv1.ListWorkspacesRequest,
) (*readmodelv1.ListWorkspacesResponse, error) {
	f := view.WorkspaceFilter{State: req.GetState()}
	if req.GetTenant() == "" {
		return q.allWorkspaces(ctx, req, f)
	}
	items, next, err := list(ctx, q, req,
		func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*readmodelv1.Workspace, string, error) {
			t, err := s.Tenant(ctx, req.GetTenant())
			if err != nil {
				return nil, "", err
			}
			f.Tenant = t.GetTenantId()
			return s.Workspaces(ctx, f, page)
		})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListWorkspacesResponse{Items: items, NextPageToken: next}, nil
}

// allWorkspaces lists workspaces without a filter by tenant, for which one statement is enough.
func (q *Query) allWorkspaces(
	ctx context.Context, req *readmodelv1.ListWorkspacesRequest, f view.WorkspaceFilter,
) (*readmodelv1.ListWorkspacesResponse, error) {
	scope, err := scopeOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := q.deps.Projector.WaitFor(ctx, req.GetMinPos()); err != nil {
		return nil, err
	}
	page := view.Page{Size: req.GetPageSize(), Token: req.GetPageToken()}
	items, next, err := q.deps.Reader.Workspaces(ctx, scope, f, page)
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListWorkspacesResponse{Items: items, NextPageToken: next}, nil
}

// GetWorkspace returns one workspace.
func (q *Query) GetWorkspace(ctx context.Context,
	req *readmodelv1.GetWorkspaceRequest,
) (*readmodelv1.GetWorkspaceResponse, error) {
	out := &readmodelv1.GetWorkspaceResponse{}
	err := q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
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
	err := q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
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
	var id string
	err := q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		w, err := s.Workspace(ctx, req.GetWorkspace())
		id = w.GetWorkspaceId()
		return err
	})
	if err != nil {
		return nil, err
	}
	answer, err := q.deps.Owners.Workspaces.GetActions(ctx, &lifecyclev1.GetActionsRequest{WorkspaceId: id})
	if err != nil {
		return nil, ownerError("lifecycle", err)
	}
	return &readmodelv1.GetActionsResponse{Actions: answer.GetActions()}, nil
}

// ListTasks lists tasks.
func (q *Query) ListTasks(ctx context.Context, req *readmodelv1.ListTasksRequest) (*readmodelv1.ListTasksResponse,
	error,
) {
	f := view.TaskFilter{WorkspaceID: req.GetWorkspaceId(), State: req.GetState(), CurrentOnly: req.GetCurrentOnly()}
	items, next, err := list(ctx, q, req,
		func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*readmodelv1.Task, string, error) {
			if req.GetNode() != "" {
				n, err := s.Node(ctx, req.GetNode())
				if err != nil {
					return nil, "", err
				}
				f.NodeID = n.GetNodeId()
			}
			return s.Tasks(ctx, f, page)
		})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListTasksResponse{Items: items, NextPageToken: next}, nil
}

// GetTask returns one task with all its transitions.
func (q *Query) GetTask(ctx context.Context, req *readmodelv1.GetTaskRequest) (*readmodelv1.GetTaskResponse, error) {
	out := &readmodelv1.GetTaskResponse{}
	err := q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		var err error
		out.Task, err = s.Task(ctx, req.GetTaskId())
		return err
	})
	return out, err
}

// ListInstances lists launched instances.
func (q *Query) ListInstances(ctx context.Context,
	req *readmodelv1.ListInstancesRequest,
) (*readmodelv1.ListInstancesResponse, error) {
	f := view.PerWorkspaceFilter{WorkspaceID: req.GetWorkspaceId(), LiveOnly: req.GetLiveOnly()}
	items, next, err := list(ctx, q, req,
		func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*lifecyclev1.Instance, string, error) {
			return s.Instances(ctx, f, page)
		})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListInstancesResponse{Items: items, NextPageToken: next}, nil
}

// ListClaims lists resource claims.
func (q *Query) ListClaims(ctx context.Context, req *readmodelv1.ListClaimsRequest) (*readmodelv1.ListClaimsResponse,
	error,
) {
	f := view.PerWorkspaceFilter{
		WorkspaceID: req.GetWorkspaceId(), Orphaned: req.GetOrphanedOnly(),
		Released: req.GetIncludeReleased(),
	}
	items, next, err := list(ctx, q, req,
		func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*lifecyclev1.Claim, string, error) {
			return s.Claims(ctx, f, page)
		})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListClaimsResponse{Items: items, NextPageToken: next}, nil
}

// ListAllocations lists allocations.
func (q *Query) ListAllocations(ctx context.Context,
	req *readmodelv1.ListAllocationsRequest,
) (*readmodelv1.ListAllocationsResponse, error) {
	f := view.PerWorkspaceFilter{WorkspaceID: req.GetWorkspaceId()}
	items, next, err := list(ctx, q, req,
		func(ctx context.Context, s *view.Snapshot, page view.Page) ([]*lifecyclev1.Allocation, string, error) {
			return s.Allocations(ctx, f, page)
		})
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListAllocationsResponse{Items: items, NextPageToken: next}, nil
}

// GetPolicy lists the policy keys with the values that recovery, their owner, has now.
func (q *Query) GetPolicy(ctx context.Context, req *readmodelv1.GetPolicyRequest) (*readmodelv1.GetPolicyResponse,
	error,
) {
	answer, err := q.deps.Owners.Policies.GetPolicy(ctx, &recoveryv1.GetPolicyRequest{Key: req.GetKey()})
	if err != nil {
		return nil, ownerError("recovery", err)
	}
	return &readmodelv1.GetPolicyResponse{Items: answer.GetKeys()}, nil
}

// ExplainReason returns what a reason means and what to do about it.
func (q *Query) ExplainReason(_ context.Context,
	req *readmodelv1.ExplainReasonRequest,
) (*readmodelv1.ExplainReasonResponse, error) {
	rows, err := view.Explain(req.GetCode())
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ExplainReasonResponse{Items: rows}, nil
}

// Watch sends a snapshot, a marker, and then changes.
func (q *Query) Watch(ctx context.Context, req *readmodelv1.WatchRequest,
	stream *connect.ServerStream[readmodelv1.WatchResponse],
) error {
	session, err := q.session(ctx)
	if err != nil {
		return err
	}
	scope, err := view.ScopeOf(session.Person)
	if err != nil {
		return err
	}
	fleet := slices.Contains(req.GetTopics(), readmodelv1.Topic_TOPIC_NODES) ||
		slices.Contains(req.GetTopics(), readmodelv1.Topic_TOPIC_TASKS)
	if fleet && !session.Person.Has("operator", "security", "viewer") {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your roles do not allow to watch nodes or tasks")
	}
	topics := slices.Compact(slices.Sorted(slices.Values(req.GetTopics())))
	f := watch.Filter{Scope: scope, Topics: topics}
	err = q.read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
		if req.GetWorkspace() != "" {
			w, err := s.Workspace(ctx, req.GetWorkspace())
			if err != nil {
				return err
			}
			f.WorkspaceID = w.GetWorkspaceId()
		}
		if req.GetNode() != "" {
			n, err := s.Node(ctx, req.GetNode())
			if err != nil {
				return err
			}
			f.NodeID = n.GetNodeId()
		}
		return nil
	})
	if err != nil {
		return err
	}
	recheck, release := q.deps.Sessions.Recheck(session.Person.Subject)
	defer release()
	return q.deps.Hub.Serve(ctx, watch.Request{
		Filter: f, Person: session.Person, Resume: req.GetResumeToken(), Recheck: recheck,
		Alive: func(ctx context.Context) error { return q.deps.Sessions.Check(ctx, session) },
	}, bounded(ctx, stream.Send))
}
