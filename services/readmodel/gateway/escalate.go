package gateway

import (
	"bufio"
	"context"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/escalation"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	// escalateLimit is how long a bundle may take, and bundlesAtOnce how many a replica makes side by side: each reads everything about a workspace.
	escalateLimit = time.Minute
	bundlesAtOnce = 4
	// chunkSize of what is streamed.
	chunkSize = 64 << 10
)

// Escalation serves EscalationService.
type Escalation struct {
	deps      Deps
	collector *escalation.Collector
	record    func(ctx context.Context, e audit.Entry) error
	busy      chan struct{}
}

// NewEscalation makes the server. record writes an audit entry of readmodel's own.
func NewEscalation(deps Deps, collector *escalation.Collector, record func(ctx context.Context, e audit.Entry) error) *Escalation {
	return &Escalation{deps: deps, collector: collector, record: record, busy: make(chan struct{}, bundlesAtOnce)}
}

// Escalate streams a zip with all that is known of a workspace, as far as the person may know it.
func (e *Escalation) Escalate(ctx context.Context, req *readmodelv1.EscalateRequest, stream *connect.ServerStream[readmodelv1.EscalateResponse]) error {
	select {
	case e.busy <- struct{}{}:
		defer func() { <-e.busy }()
	default:
		return fault.New(commonv1.Reason_REASON_OVERLOADED, "other bundles are being made", fault.RetryAfter(5*time.Second))
	}
	ctx, cancel := context.WithTimeout(ctx, escalateLimit)
	defer cancel()
	scope, err := scopeOf(ctx)
	if err != nil {
		return err
	}
	if err := e.deps.Projector.WaitFor(ctx, req.GetMinPos()); err != nil {
		return err //nolint:wrapcheck // it is the answer
	}
	person, _ := rpc.PersonFrom(ctx)
	ask := escalation.Request{Scope: scope, Subject: person.Subject}
	command := Command{deps: e.deps}
	err = command.find(ctx, func(ctx context.Context, s *view.Snapshot) error {
		var err error
		ask.Workspace, err = s.Workspace(ctx, req.GetWorkspace())
		ask.At = s.Now
		return err //nolint:wrapcheck // it is the answer
	})
	if err != nil {
		return err
	}
	w := ask.Workspace
	// Before the first byte leaves: who took it is known whatever becomes of the stream.
	err = e.record(ctx, audit.Entry{
		Action: "workspace.escalate", SubjectType: "workspace", SubjectID: w.GetWorkspaceId(), WorkspaceID: w.GetWorkspaceId(), TenantID: w.GetTenantId(),
	})
	if err != nil {
		return err
	}
	out := &chunks{ctx: ctx, stream: stream, at: timestamppb.New(ask.At)}
	buffered := bufio.NewWriterSize(out, chunkSize)
	if err := e.collector.Write(ctx, buffered, ask); err != nil {
		return err //nolint:wrapcheck // it says what
	}
	return buffered.Flush() //nolint:wrapcheck // the stream's
}

// chunks sends what is written to it, each part with a time limit.
type chunks struct {
	ctx    context.Context //nolint:containedctx // an io.Writer has no other way to it
	stream *connect.ServerStream[readmodelv1.EscalateResponse]
	at     *timestamppb.Timestamp // nil once it was sent
}

// Write implements io.Writer.
func (c *chunks) Write(p []byte) (int, error) {
	if controller, ok := c.ctx.Value(controllerKey{}).(*http.ResponseController); ok {
		// A transport without deadlines keeps the stream as it is.
		_ = controller.SetWriteDeadline(time.Now().Add(sendLimit))
		defer func() { _ = controller.SetWriteDeadline(time.Time{}) }()
	}
	if err := c.ctx.Err(); err != nil {
		return 0, context.Cause(c.ctx) //nolint:wrapcheck // the caller's
	}
	if err := c.stream.Send(&readmodelv1.EscalateResponse{Chunk: p, CollectedAt: c.at}); err != nil {
		return 0, err //nolint:wrapcheck // the stream's
	}
	c.at = nil
	return len(p), nil
}
