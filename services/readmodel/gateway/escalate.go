package gateway

import (
	"bufio"
	"context"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/escalation"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	// escalateLimit is how long a bundle may take, and bundlesAtOnce how many a replica makes at the same time: each reads
	// everything about a workspace. The last place is for people of the operator, and one person has at most one bundle at
	// a time.
	escalateLimit = time.Minute
	bundlesAtOnce = 4
	// chunkSize is the size of a streamed chunk, in bytes.
	chunkSize = 64 << 10
)

// Escalation serves EscalationService.
type Escalation struct {
	deps      Deps
	collector *escalation.Collector
	record    func(ctx context.Context, e audit.Entry) error
	slots     slots
}

// NewEscalation returns the server. record writes an audit entry of readmodel.
func NewEscalation(deps Deps, collector *escalation.Collector,
	record func(ctx context.Context, e audit.Entry) error,
) *Escalation {
	return &Escalation{deps: deps, collector: collector, record: record}
}

// Escalate streams a zip with all that is known of a workspace, as far as the person may know it.
func (e *Escalation) Escalate(ctx context.Context, req *readmodelv1.EscalateRequest,
	stream *connect.ServerStream[readmodelv1.EscalateResponse],
) error {
	ctx, cancel := context.WithTimeout(ctx, escalateLimit)
	defer cancel()
	scope, err := caller.ScopeOf(ctx)
	if err != nil {
		return err
	}
	if err := e.deps.Reads.Projector.WaitFor(ctx, req.GetMinPos()); err != nil {
		return err
	}
	person, _ := rpc.PersonFrom(ctx)
	ask := escalation.Request{Scope: scope, Subject: person.Subject}
	get := func(s *view.Snapshot, ctx context.Context, ref string) (*readmodelv1.Workspace, error) {
		ask.At = s.Now
		return s.Workspace(ctx, ref)
	}
	ask.Workspace, err = caller.Find(ctx, e.deps.Reads, get, req.GetWorkspace())
	if err != nil {
		return err
	}
	free, err := e.slots.take(person)
	if err != nil {
		return err
	}
	defer free()
	w := ask.Workspace
	// The entry is written before the first byte is sent, so that the audit log names the person even if the stream
	// breaks.
	err = e.record(ctx, audit.Entry{
		Action: "workspace.escalate", SubjectType: "workspace", SubjectID: w.GetWorkspaceId(),
		WorkspaceID: w.GetWorkspaceId(), TenantID: w.GetTenantId(),
	})
	if err != nil {
		return err
	}
	out := &chunks{ctx: ctx, stream: stream, at: timestamppb.New(ask.At)}
	buffered := bufio.NewWriterSize(out, chunkSize)
	if err := e.collector.Write(ctx, buffered, ask); err != nil {
		return err
	}
	return buffered.Flush()
}

// slots holds the bundles that are being made, by tenant and subject of the person. The zero value has none.
type slots struct {
	mu    sync.Mutex
	taken map[string]bool
}

// take reserves a slot for a person. It returns the function that frees the slot, or a refusal.
func (s *slots) take(p rpc.Person) (func(), error) {
	who, most := p.TenantID+"/"+p.Subject, bundlesAtOnce
	if p.TenantID != "" {
		most--
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.taken[who]:
		return nil, fault.New(commonv1.Reason_REASON_OVERLOADED, "a bundle is being made for you",
			fault.RetryAfter(5*time.Second))
	case len(s.taken) >= most:
		return nil, fault.New(commonv1.Reason_REASON_OVERLOADED, "other bundles are being made",
			fault.RetryAfter(5*time.Second))
	case s.taken == nil:
		s.taken = map[string]bool{}
	}
	s.taken[who] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.taken, who)
	}, nil
}

// chunks is an io.Writer that sends each write to the stream, with a time limit.
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
		return 0, context.Cause(c.ctx)
	}
	if err := c.stream.Send(&readmodelv1.EscalateResponse{Chunk: p, CollectedAt: c.at}); err != nil {
		return 0, err
	}
	c.at = nil
	return len(p), nil
}
