package dispatch

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/report"
)

// probeStartWithin is how long a probe may wait for its node.
const probeStartWithin = time.Minute

// Deps of the server.
type Deps struct {
	Logger *slog.Logger
	DB     *pgxpool.Pool
	Key    envelope.Key
	// Verifiers are the keys whose envelopes prove an attempt that the database has lost. Nil: Key alone.
	Verifiers *envelope.VerifierSet
	// Keys replace Key and Verifiers, and may change while the server runs.
	Keys *envelope.Ring
	Hub  *Hub
	// Wake wakes saga runs in the transaction that ended one of their tasks.
	Wake func(ctx context.Context, tx pgx.Tx, runIDs ...string) error
	// Committed is called after each commit that wrote events or woke a run.
	Committed func()
	// Superseded is called after the commit of a report with the number of its results as superseded: the agents have seen
	// a later operation. May be nil.
	Superseded func(n int)
	// Secrets opens the environment values of a deploy when it is signed. Nil opens none: a task with sealed values is
	// refused.
	Secrets *secretenv.Keys
	// Audit records refused requests; the entry of a change is written in the transaction of the change. Nil: refusals are
	// not recorded.
	Audit *audit.Log
}

// Server of TaskService.
type Server struct {
	*report.Reports

	deps     Deps
	queue    queue
	standing standingLeases
}

// NewServer returns a server.
func NewServer(deps Deps) *Server {
	if deps.Keys == nil {
		deps.Keys = envelope.NewRing(deps.Key, deps.Verifiers)
	}
	s := &Server{deps: deps, standing: standingLeases{underWay: underWay}}
	s.queue.commit = s.commitQueued
	s.Reports = report.NewReports(report.ReportDeps{
		DB: deps.DB, Keys: deps.Keys, Wake: deps.Wake, Committed: deps.Committed, Superseded: deps.Superseded,
		Reported: s.standing.reported,
	})
	return s
}

// EnqueueProbe queues a task that does nothing. A probe ignores the cordon, but nothing is dispatched to a node whose
// gate is shut.
func (s *Server) EnqueueProbe(ctx context.Context,
	req *lifecyclev1.EnqueueProbeRequest,
) (*lifecyclev1.EnqueueProbeResponse, error) {
	by := rpc.ActorFrom(ctx)
	k := "probe/" + ids.New()
	if req.GetIdempotencyKey() != "" {
		k = "probe/" + req.GetNodeId() + "/" + req.GetIdempotencyKey()
	}
	one, err := s.queueOne(ctx, task.Spec{
		Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeID: req.GetNodeId(), IdempotencyKey: k,
		StartWithin: probeStartWithin,
		Payload:     &nodev1.ProbeNoop{Nonce: ids.New()}, CorrelationID: obs.From(ctx).CorrelationID, CreatedBy: by,
	}, true)
	if err != nil {
		return nil, err
	}
	return &lifecyclev1.EnqueueProbeResponse{Task: one.row.Proto(), Pos: one.pos}, nil
}
