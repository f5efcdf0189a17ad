package watch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Request is one watch.
type Request struct {
	Filter

	Person rpc.Person // the watcher; the limits count persons and tenants
	Resume string     // token; empty: begin with a snapshot
	// Alive returns an error once the person may not watch. It is called every few seconds; nil: the person may watch
	// forever.
	Alive func(ctx context.Context) error
	// Recheck causes a call of Alive at once; nil: Alive is called at its intervals alone.
	Recheck <-chan struct{}
}

// Send sends one frame to the watcher. It may block; the number of objects that wait meanwhile is bounded.
type Send func(*readmodelv1.WatchResponse) error

// Serve sends frames until ctx ends, the person's session ends, or the watcher falls behind. A watch above one of the
// limits is refused before anything is read for it.
func (h *Hub) Serve(ctx context.Context, req Request, send Send) error {
	release, err := h.places.take(req.Person)
	if err != nil {
		return err
	}
	defer release()
	sub, pos, err := h.subscribe(ctx, req.Filter)
	if err != nil {
		return err
	}
	defer h.unsubscribe(sub)
	session := &session{req: req, every: h.cfg.Check, checked: time.Now()}
	send = session.checking(ctx, send)
	if req.Resume == "" {
		pos, err = h.snapshot(ctx, req.Filter, send)
	} else {
		pos, err = h.resume(ctx, req, pos, send)
	}
	if err != nil {
		return err
	}
	return h.follow(ctx, session, sub, pos, send)
}

// follow sends changes and heartbeats until the watch ends.
func (h *Hub) follow(ctx context.Context, session *session, sub *subscription, pos int64, send Send) error {
	beat, check := time.NewTicker(h.cfg.Heartbeat), time.NewTicker(h.cfg.Check)
	defer beat.Stop()
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-sub.ready:
		case <-beat.C:
			reached := sub.reached()
			pos = max(pos, reached)
			if err := h.heartbeat(ctx, pos, send); err != nil {
				return err
			}
			continue
		case <-check.C:
			if err := session.check(ctx); err != nil {
				return err
			}
			continue
		case <-session.req.Recheck:
			if err := session.check(ctx); err != nil {
				return err
			}
			continue
		}
		items, reached, err := sub.take()
		if errors.Is(err, errBehind) {
			h.slow.Inc()
		}
		if err != nil {
			return err
		}
		for n, i := range items {
			frame := i.frame(i.message.GetChange())
			frame.ResumeToken = token(pos)
			if n == len(items)-1 {
				pos = max(pos, reached)
				frame.ResumeToken = token(pos)
			}
			if err := send(frame); err != nil {
				return err
			}
		}
	}
}

var clock = pg.Define(pg.RoleReadmodel, "watch.clock", `SELECT mesh.clock()`)

// heartbeat sends a frame with the database's time, which shows that the stream is alive.
func (h *Hub) heartbeat(ctx context.Context, pos int64, send Send) error {
	now, err := pg.Value[time.Time](ctx, h.deps.DB, clock)
	if err != nil {
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the database is not available",
			fault.Cause(fmt.Errorf("read the clock: %w", err)))
	}
	return send(&readmodelv1.WatchResponse{
		Frame: &readmodelv1.WatchResponse_Heartbeat{
			Heartbeat: &readmodelv1.WatchHeartbeat{ServerTime: timestamppb.New(now)},
		},
		ResumeToken: token(pos),
	})
}

// snapshot sends every object that the filter selects, page by page. Objects that change meanwhile are sent again as
// changes afterwards.
func (h *Hub) snapshot(ctx context.Context, f Filter, send Send) (int64, error) {
	pos, total := int64(-1), int32(0)
	for _, topic := range f.Topics {
		for page := (list.Page{Size: chunk}); ; {
			var items []item
			var next string
			err := h.deps.Reader.Read(ctx, f.Scope, func(ctx context.Context, s *view.Snapshot) error {
				if pos < 0 {
					pos = s.Position // the position of the first page: later pages may include later changes
				}
				var err error
				items, next, err = pageOf(ctx, s, topic, f, page)
				return err
			})
			if err != nil {
				return 0, err
			}
			for _, i := range items {
				if !f.wants(i) {
					continue
				}
				if err := send(i.frame(readmodelv1.Change_CHANGE_SNAPSHOT)); err != nil {
					return 0, err
				}
				total++
			}
			if next == "" {
				break
			}
			page.Token = next
		}
	}
	return pos, send(&readmodelv1.WatchResponse{
		Frame:       &readmodelv1.WatchResponse_Bootstrapped{Bootstrapped: &readmodelv1.Bootstrapped{Total: total}},
		ResumeToken: token(pos),
	})
}

// pageOf returns one page of a snapshot: nodes that are not retired, live workspaces, live instances, current tasks,
// live runs and their steps. For one workspace it includes workspaces, runs and steps that are over, for one node
// retired nodes, and for either instances and tasks that are over, but of the tasks only the newest page. Runs and
// steps belong to no node. It reads only what the filter selects.
func pageOf(ctx context.Context, s *view.Snapshot, topic readmodelv1.Topic, f Filter, page list.Page) ([]item, string,
	error,
) {
	narrow := f.WorkspaceID != "" || f.NodeID != ""
	switch topic {
	case readmodelv1.Topic_TOPIC_NODES:
		if !f.Scope.Everything() {
			return nil, "", nil // nodes are for people of the operator
		}
		filter := view.NodeFilter{ID: f.NodeID, WorkspaceID: f.WorkspaceID, IncludeRetired: f.NodeID != ""}
		found, next, err := s.Nodes(ctx, filter, page)
		return each(found, next, err, nodeItem)
	case readmodelv1.Topic_TOPIC_WORKSPACES:
		filter := view.WorkspaceFilter{ID: f.WorkspaceID, NodeID: f.NodeID, NotOver: f.WorkspaceID == ""}
		found, next, err := s.Workspaces(ctx, filter, page)
		return each(found, next, err, workspaceItem)
	case readmodelv1.Topic_TOPIC_TASKS:
		filter := view.TaskFilter{WorkspaceID: f.WorkspaceID, NodeID: f.NodeID, CurrentOnly: !narrow}
		items, next, err := tasks(ctx, s, filter, page)
		if narrow {
			next = "" // older ones are history, and not part of a snapshot
		}
		return items, next, err
	case readmodelv1.Topic_TOPIC_INSTANCES:
		filter := view.PerWorkspaceFilter{WorkspaceID: f.WorkspaceID, NodeID: f.NodeID, LiveOnly: !narrow}
		found, next, err := s.Instances(ctx, filter, page)
		return each(found, next, err, instanceItem)
	case readmodelv1.Topic_TOPIC_RUNS:
		if f.NodeID != "" {
			return nil, "", nil
		}
		found, next, err := s.Runs(ctx, view.RunFilter{WorkspaceID: f.WorkspaceID, LiveOnly: f.WorkspaceID == ""}, page)
		return each(found, next, err, runItem)
	case readmodelv1.Topic_TOPIC_STEPS:
		if f.NodeID != "" {
			return nil, "", nil
		}
		runs, next, err := s.Runs(ctx, view.RunFilter{WorkspaceID: f.WorkspaceID, LiveOnly: f.WorkspaceID == ""}, page)
		if err != nil || len(runs) == 0 {
			return nil, "", err
		}
		ids := make([]string, len(runs))
		for i, r := range runs {
			ids[i] = r.GetRunId()
		}
		return steps(ctx, s, ids, next)
	case readmodelv1.Topic_TOPIC_UNSPECIFIED:
	}
	return nil, "", nil
}

// resume sends the objects that have changed since the token, as they are now, and a heartbeat.
func (h *Hub) resume(ctx context.Context, req Request, to int64, send Send) (int64, error) {
	from, err := parseToken(req.Resume)
	if err != nil {
		return 0, err
	}
	if to, err = h.reached(ctx, from, to); err != nil {
		return 0, err
	}
	marks := map[key]mark{}
	for after := from; after < to; {
		records, next, err := events.Read(ctx, h.deps.DB, after, watched(), 1000)
		if err != nil {
			return 0, err
		}
		for _, r := range records {
			if r.Pos > to {
				break
			}
			switch r.Kind {
			case project.KindRebuilt:
				return 0, errExpired("the projections were made again since")
			case project.KindReplayed:
				if r, err = replayed(ctx, h.deps.DB, r); err != nil {
					return 0, err
				}
			}
			add(marks, r)
		}
		if next <= after {
			break
		}
		after = next
	}
	var items []item
	err = h.deps.Reader.Read(ctx, req.Scope, func(ctx context.Context, s *view.Snapshot) error {
		shown, err := workspacesOf(ctx, s, marks)
		if err != nil {
			return err
		}
		maps.Copy(marks, shown)
		if !req.Scope.Everything() {
			maps.DeleteFunc(marks, func(k key, _ mark) bool { return k.topic == readmodelv1.Topic_TOPIC_NODES })
		}
		items, err = load(ctx, s, marks)
		return err
	})
	if err != nil {
		return 0, err
	}
	for _, i := range items {
		if !req.wants(i) {
			continue
		}
		frame := i.frame(i.message.GetChange())
		frame.ResumeToken = req.Resume
		if err := send(frame); err != nil {
			return 0, err
		}
	}
	return to, h.heartbeat(ctx, to, send)
}

// reached returns the position at which a resume ends: the later one of the hub's, which may be a little behind the
// token, and the projection's. It refuses a token from which no resume is possible.
func (h *Hub) reached(ctx context.Context, from, to int64) (int64, error) {
	now, err := project.Position(ctx, h.deps.DB)
	if err != nil {
		return 0, err
	}
	to = max(to, now)
	return to, checkResume(ctx, h.deps.DB, from, to, h.cfg.ResumeEvents)
}
