package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pg"
)

// Verifier checks a join state against recovery's public keys.
type Verifier interface {
	Verify(signed []byte) (joinstate.State, error)
}

// Ready lists the nodes, workspaces and tasks that the sessions of a batch may change.
type Ready struct {
	NodeIDs    []string // of all sessions
	NewLedgers []string // nodes whose agent has a new ledger
	Workspaces []string // of the launched instances among them
	TaskIDs    []string // the tasks that the agents have in flight
}

// Tasks reconciles the tasks that a new session reports as in flight.
type Tasks interface {
	// Lock locks, after the gates, the tasks that Reconcile of these sessions may change and then the runs that they wake,
	// each in the order of their ids. It returns the nodes that have tasks in flight, or have reported ones: for any other
	// there is nothing to reconcile as long as its gate is locked.
	Lock(ctx context.Context, tx pgx.Tx, ready Ready) (map[string]bool, error)
	// Reconcile runs in the transaction that raises the gate, whose row is locked. newLedger is true if the agent's ledger
	// is not the one of the session before. It is not called for a session that reports no task in flight, of a node that
	// Lock did not return.
	Reconcile(ctx context.Context, tx pgx.Tx, g Gate, newLedger bool, inFlight []*commonv1.TaskInFlight) (Reconciled,
		error)
	// Fenced runs in the transaction that shuts the gate, whose row is locked, before the gate's event.
	Fenced(ctx context.Context, tx pgx.Tx, nodeID string) error
}

// Reconciled are the acknowledgements and cancels that a session gets for its tasks.
type Reconciled struct {
	Acknowledged []*nodev1.TaskRef
	Cancel       []*nodev1.TaskRef
}

// Instance is notified of the sessions and fences of launched instances.
type Instance interface {
	// SessionReady runs in the transaction that raises an instance's gate.
	SessionReady(ctx context.Context, tx pgx.Tx, g Gate) error
	// RegisterFailures runs in the transaction that applies an instance's fence: count refusals since it last registered,
	// 0 if it has.
	RegisterFailures(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64, count int32, lastError string) error
}

// Deps of the server.
type Deps struct {
	Logger    *slog.Logger
	DB        *pgxpool.Pool
	Join      Verifier
	Tasks     Tasks
	Instances Instance
	// Committed is called after each commit that wrote events or woke a run.
	Committed func()
	// Slots is how many workspaces an enrolled machine holds.
	Slots int32
}

// Server of GateService.
type Server struct{ deps Deps }

// NewServer makes a server.
func NewServer(deps Deps) *Server { return &Server{deps: deps} }

// ApplyFence applies recovery's decision on a node. The highest fence epoch wins.
func (s *Server) ApplyFence(ctx context.Context, req *lifecyclev1.ApplyFenceRequest) (*lifecyclev1.ApplyFenceResponse,
	error,
) {
	res := &lifecyclev1.ApplyFenceResponse{}
	slots := s.deps.Slots
	if req.GetInstanceId() != "" {
		slots = 1
	}
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		g, err := one(ctx, tx, applyFence,
			req.GetNodeId(), req.GetNodeInstanceId(), req.GetName(), req.GetFenceEpoch(), req.GetAdmitted() && !req.GetRetired(),
			req.GetRetired(), req.GetInstanceId(), req.GetWorkspaceId(), req.GetEpoch(), slots)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			// A lower or equal epoch changes nothing: the response has the stored fence.
			held, ok, err := Get(ctx, tx, req.GetNodeId())
			if err != nil {
				return err
			}
			if !ok {
				return fault.New(commonv1.Reason_REASON_CONFLICT, "the gate changed meanwhile")
			}
			res.FenceEpoch, res.Admitted = held.FenceEpoch, held.Admitted
			if req.GetFenceEpoch() < held.FenceEpoch {
				return nil // the count of refused registers in a late request is not applied either
			}
		case err != nil:
			return fmt.Errorf("apply fence: %w", err)
		default:
			res.FenceEpoch, res.Admitted = g.FenceEpoch, g.Admitted
			if !g.Admitted {
				if err := s.deps.Tasks.Fenced(ctx, tx, g.NodeID); err != nil {
					return fmt.Errorf("report tasks of a node whose gate is shut: %w", err)
				}
			}
			if _, err := events.Append(ctx, tx, g.event()); err != nil {
				return fmt.Errorf("report gate: %w", err)
			}
		}
		if req.GetWorkspaceId() != "" {
			err := s.deps.Instances.RegisterFailures(ctx, tx, req.GetWorkspaceId(), req.GetEpoch(), req.GetRegisterFailures(),
				req.GetRegisterError())
			if err != nil {
				return fmt.Errorf("tell workspace of refused registers: %w", err)
			}
		}
		return failpoint.Hit("lifecycle.fence.before_commit")
	})
	if err != nil {
		return nil, err
	}
	s.deps.Committed()
	return res, nil
}

// SessionsReady raises the gates of admitted sessions.
func (s *Server) SessionsReady(ctx context.Context,
	req *lifecyclev1.SessionsReadyRequest,
) (*lifecyclev1.SessionsReadyResponse, error) {
	var res *lifecyclev1.SessionsReadyResponse
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		res = &lifecyclev1.SessionsReadyResponse{}
		nodes := make([]string, 0, len(req.GetSessions()))
		for _, r := range req.GetSessions() {
			nodes = append(nodes, r.GetNodeId())
		}
		gates, err := lockUpdate(ctx, tx, nodes)
		if err != nil {
			return err
		}
		busy, err := s.deps.Tasks.Lock(ctx, tx, readyOf(gates, req.GetSessions()))
		if err != nil {
			return fmt.Errorf("lock tasks: %w", err)
		}
		raised, err := s.raiseMachines(ctx, tx, gates, req.GetReplicaId(), req.GetSessions())
		if err != nil {
			return err
		}
		var changed []events.Event
		for i, r := range req.GetSessions() {
			g, ok := raised[i]
			var result *lifecyclev1.SessionReadyResult
			if ok {
				result, err = s.reconcile(ctx, tx, gates[r.GetNodeId()], g, r, busy)
			} else {
				g, result, err = s.open(ctx, tx, gates[r.GetNodeId()], req.GetReplicaId(), r, busy)
			}
			if _, typed := fault.As(err); err != nil && !typed {
				return err
			}
			if err != nil {
				result = &lifecyclev1.SessionReadyResult{Denial: fault.ToDenial(err, "")}
			}
			if ok || err == nil {
				gates[r.GetNodeId()] = g // another session of this node may follow in the batch
				changed = append(changed, g.event())
			}
			result.SessionId = r.GetSessionId()
			res.Results = append(res.Results, result)
		}
		if len(changed) > 0 {
			if _, err := events.Append(ctx, tx, changed...); err != nil {
				return fmt.Errorf("report gates: %w", err)
			}
		}
		if err := listRuns(ctx, tx, req.GetSessions(), res.GetResults()); err != nil {
			return err
		}
		return failpoint.Hit("lifecycle.session_ready.before_commit")
	})
	if err != nil {
		return nil, err
	}
	if err := failpoint.Hit("lifecycle.session_ready.after_commit"); err != nil {
		return nil, err
	}
	s.deps.Committed()
	return res, nil
}

// readyOf lists the rows that a batch of sessions may change beside its gates.
func readyOf(gates map[string]Gate, sessions []*lifecyclev1.SessionReady) Ready {
	var out Ready
	for _, r := range sessions {
		g, ok := gates[r.GetNodeId()]
		if !ok {
			continue
		}
		out.NodeIDs = append(out.NodeIDs, g.NodeID)
		if g.renewsLedger(r) {
			out.NewLedgers = append(out.NewLedgers, g.NodeID)
		}
		if g.InstanceID != "" && g.WorkspaceID != "" {
			out.Workspaces = append(out.Workspaces, g.WorkspaceID)
		}
		for _, t := range r.GetTasksInFlight() {
			if ids.Valid(t.GetTaskId()) {
				out.TaskIDs = append(out.TaskIDs, t.GetTaskId())
			}
		}
	}
	return out
}

// renewsLedger reports whether the session's agent has another ledger than the one before.
func (g Gate) renewsLedger(r *lifecyclev1.SessionReady) bool {
	return g.LedgerID != "" && g.LedgerID != r.GetLedgerId()
}

// open checks one session and raises its gate; the caller appends the event of the gate. With an error nothing is
// written for the session: a fault is its denial, any other error fails the whole batch.
func (s *Server) open(ctx context.Context, tx pgx.Tx, g Gate, replicaID string, r *lifecyclev1.SessionReady,
	busy map[string]bool,
) (Gate, *lifecyclev1.SessionReadyResult, error) {
	if err := s.check(g, r); err != nil {
		return g, nil, err
	}
	var res *lifecyclev1.SessionReadyResult
	raised := g
	// An instance's workspace may refuse it after the gate's row was written.
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		rows, err := raiseRows(ctx, tx, replicaID, r)
		if err != nil {
			return err
		}
		raised = rows[r.GetNodeId()]
		res, err = s.reconcile(ctx, tx, g, raised, r, busy)
		return err
	})
	return raised, res, err
}

// check refuses a session before anything is written.
func (s *Server) check(g Gate, r *lifecyclev1.SessionReady) error {
	if g.NodeID == "" {
		return fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED, "recovery has not told of this node yet",
			fault.RetryAfter(100*time.Millisecond))
	}
	state, err := s.deps.Join.Verify(r.GetJoinState())
	if fault.Has(err, commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN) {
		return err
	}
	if err != nil || state.NodeID != r.GetNodeId() || state.NodeInstanceID != r.GetNodeInstanceId() ||
		state.Generation != r.GetGeneration() {
		// The agent is to wait, not to stop: if this replica lacks keys, every agent gets this refusal.
		return fault.New(commonv1.Reason_REASON_SESSION_UNKNOWN, "the join state is not recovery's word on this session",
			fault.Cause(err))
	}
	if !g.Admitted {
		return fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED, "the gate of this node is shut",
			fault.RetryAfter(time.Second))
	}
	if g.InstanceOfNode != "" && g.InstanceOfNode != r.GetNodeInstanceId() {
		// The session is of an instance that was replaced, or of its replacement, which recovery has not announced yet: in
		// both cases the agent is to try again.
		return fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED, "the gate is another instance's of this node",
			fault.RetryAfter(200*time.Millisecond))
	}
	if g.SessionEpoch > r.GetGeneration() {
		return fault.New(commonv1.Reason_REASON_SESSION_SUPERSEDED, "a newer session holds the gate")
	}
	return nil
}

// reconcile compares the tasks of a session whose gate was raised with those of the agent, if the node is busy or the
// agent reports any, and notifies the workspace of an instance.
func (s *Server) reconcile(ctx context.Context, tx pgx.Tx, before, raised Gate, r *lifecyclev1.SessionReady,
	busy map[string]bool,
) (*lifecyclev1.SessionReadyResult, error) {
	var reconciled Reconciled
	if busy[raised.NodeID] || len(r.GetTasksInFlight()) > 0 {
		var err error
		reconciled, err = s.deps.Tasks.Reconcile(ctx, tx, raised, before.renewsLedger(r), r.GetTasksInFlight())
		if err != nil {
			return nil, fmt.Errorf("reconcile tasks: %w", err)
		}
	}
	if raised.InstanceID != "" {
		if err := s.deps.Instances.SessionReady(ctx, tx, raised); err != nil {
			return nil, fmt.Errorf("tell workspace of its instance: %w", err)
		}
	}
	return &lifecyclev1.SessionReadyResult{
		Accepted: true, Acknowledged: reconciled.Acknowledged, Cancel: reconciled.Cancel,
	}, nil
}
