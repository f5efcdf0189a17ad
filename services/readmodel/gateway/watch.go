package gateway

import (
	"context"
	"slices"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Watch sends a snapshot, a marker, and then changes.
func (q *Query) Watch(ctx context.Context, req *readmodelv1.WatchRequest,
	stream *connect.ServerStream[readmodelv1.WatchResponse],
) error {
	session, err := q.session(ctx)
	if err != nil {
		return err
	}
	scope, err := list.ScopeOf(session.Person)
	if err != nil {
		return err
	}
	fleet := slices.Contains(req.GetTopics(), readmodelv1.Topic_TOPIC_NODES) ||
		slices.Contains(req.GetTopics(), readmodelv1.Topic_TOPIC_TASKS)
	if fleet && !session.Person.Has("operator", "security", "viewer") {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your roles do not allow to watch nodes or tasks")
	}
	if !scope.Everything() && (slices.Contains(req.GetTopics(), readmodelv1.Topic_TOPIC_NODES) || req.GetNode() != "") {
		return list.OperatorsOnly()
	}
	topics := slices.Compact(slices.Sorted(slices.Values(req.GetTopics())))
	f := watch.Filter{Scope: scope, Topics: topics}
	err = q.deps.Reads.Read(ctx, req.GetMinPos(), func(ctx context.Context, s *view.Snapshot) error {
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
