package report

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// Lock locks the rows that Reconcile of these sessions may change: their tasks, and then the runs that it wakes, with
// those that wait for a launched instance. Reconcile wakes a run if it ends a task of the run: one that was to be
// cancelled, or that was in a ledger that is lost. Lock returns the nodes that have any of these tasks: the others get
// none as long as their gates are locked, since a lease locks the gate first.
func (s *Reports) Lock(ctx context.Context, tx pgx.Tx, ready gate.Ready) (map[string]bool, error) {
	if len(ready.NodeIDs) == 0 {
		return nil, nil
	}
	nodes, err := pg.Values[string](ctx, tx, lockInFlight, ready.NodeIDs, append([]string{}, ready.TaskIDs...))
	if err != nil {
		return nil, fmt.Errorf("lock tasks in flight: %w", err)
	}
	busy := make(map[string]bool, len(nodes))
	for _, id := range nodes {
		busy[id] = true
	}
	_, err = pg.Exec(ctx, tx, lockRunsInFlight,
		ready.NodeIDs, append([]string{}, ready.NewLedgers...), append([]string{}, ready.Workspaces...))
	if err != nil {
		return nil, fmt.Errorf("lock runs of tasks in flight: %w", err)
	}
	return busy, nil
}

// Reconcile compares the tasks that the agent of a new session has in flight with the rows, in the transaction that
// raises the gate.
//
// A task that was dispatched and is not in the agent's ledger keeps its attempt and is offered again: an offer that
// still arrives by the old session is then the same entry of the ledger, not a second effect. With a new ledger, a task
// that had been delivered may have run: one of an idempotent type is queued again, any other ends as outcome_unknown
// and its step observes.
//
// A task that was queued again keeps the former attempt if the agent has begun it or has its result: the task would run
// twice otherwise. An attempt that the agent has not begun is cancelled, since its time to start is over as a rule, and
// one that ended without the effect of its task stays to be reported as late evidence: the next lease draws another.
// In rollback mode, in which it cannot be cancelled, an attempt that the agent has not begun is the task's too.
//
// An attempt above the row's means that the database was restored to an earlier state, or that the agent invented it.
// The envelope in its reports decides: until then the attempt is not cancelled, and the row's own attempt is not
// offered for a moment.
//
// In rollback mode the session gets no cancels: tasks that are not known here may be work that this database lost.
func (s *Reports) Reconcile(ctx context.Context, tx pgx.Tx, g gate.Gate, newLedger bool,
	inFlight []*commonv1.TaskInFlight,
) (gate.Reconciled, error) {
	agent := make(map[string]*commonv1.TaskInFlight, len(inFlight))
	highest := map[string]int32{}
	var asked []string
	for _, t := range inFlight {
		if !ids.Valid(t.GetTaskId()) {
			continue // nodeapi passes an agent's ids on unchecked
		}
		agent[key(&nodev1.TaskRef{TaskId: t.GetTaskId(), Attempt: t.GetAttempt()})] = t
		asked = append(asked, t.GetTaskId())
		highest[t.GetTaskId()] = max(highest[t.GetTaskId()], t.GetAttempt())
	}
	mine, err := task.All(ctx, tx, tasksInFlight, g.NodeID, asked)
	if err != nil {
		return gate.Reconciled{}, fmt.Errorf("read tasks in flight: %w", err)
	}
	if len(mine) == 0 && len(agent) == 0 {
		return gate.Reconciled{}, nil
	}
	still, err := rollback.Active(ctx, tx)
	if err != nil {
		return gate.Reconciled{}, err
	}
	var out gate.Reconciled
	known := map[string]bool{}
	for _, r := range mine {
		k := fmt.Sprintf("%s/%d", r.TaskID, r.Attempt)
		known[k] = true
		ref := &nodev1.TaskRef{TaskId: r.TaskID, Attempt: r.Attempt}
		theirs := agent[k]
		ahead := highest[r.TaskID]
		if ahead > r.Attempt && !task.Terminal(r.State) && !r.CancelAsked {
			known[key(&nodev1.TaskRef{TaskId: r.TaskID, Attempt: ahead})] = true
		}
		switch {
		case task.Terminal(r.State):
			if theirs == nil {
				continue
			}
			if task.Terminal(theirs.GetState()) {
				if theirs.GetState() == r.State {
					out.Acknowledged = append(out.Acknowledged, ref)
				}
				continue // its report comes again and is kept as a late result
			}
			out.Cancel = append(out.Cancel, ref)
		case theirs != nil && r.State == commonv1.TaskState_TASK_STATE_QUEUED && !ran(theirs.GetState()) &&
			(task.Terminal(theirs.GetState()) || !still):
			if !task.Terminal(theirs.GetState()) {
				out.Cancel = append(out.Cancel, ref)
			}
		case theirs != nil:
			if err := s.adopt(ctx, tx, r, theirs, g.SessionEpoch, g.SessionID); err != nil {
				return gate.Reconciled{}, err
			}
			if r.CancelAsked {
				out.Cancel = append(out.Cancel, ref)
			}
		case ahead > r.Attempt && !newLedger && !r.CancelAsked:
			if err := s.awaitProof(ctx, tx, r, g); err != nil {
				return gate.Reconciled{}, err
			}
		case r.CancelAsked && still:
			// A cancel from before the restore is handled by the node's next session after the mode.
		case r.CancelAsked && newLedger && r.State != commonv1.TaskState_TASK_STATE_DISPATCHED:
			// It is to be cancelled, but the ledger that had it is lost: it may have run.
			out.Cancel = append(out.Cancel, ref)
			if err := s.end(ctx, tx, r, commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN, "the agent's ledger is new"); err != nil {
				return gate.Reconciled{}, err
			}
		case r.CancelAsked:
			// It is to be cancelled and not in the agent's ledger: it ends here, and the agent gets the cancel in case an offer
			// is still on its way.
			out.Cancel = append(out.Cancel, ref)
			if err := s.end(ctx, tx, r, commonv1.TaskState_TASK_STATE_CANCELLED,
				"cancelled before the agent had it"); err != nil {
				return gate.Reconciled{}, err
			}
		default:
			if err := s.again(ctx, tx, r, g, newLedger); err != nil {
				return gate.Reconciled{}, err
			}
		}
	}
	for k, t := range agent {
		if !known[k] {
			// An attempt that is not the current one, or a task that is not this node's, for example of its former identity: its
			// end changes no row.
			out.Cancel = append(out.Cancel, &nodev1.TaskRef{TaskId: t.GetTaskId(), Attempt: t.GetAttempt()})
		}
	}
	if still {
		out.Cancel = nil
	}
	return out, nil
}

// ran reports whether an attempt in that state has been begun, and has not ended without the effect of its task.
func ran(s commonv1.TaskState) bool {
	return s == commonv1.TaskState_TASK_STATE_RUNNING || s == commonv1.TaskState_TASK_STATE_SUCCEEDED ||
		s == commonv1.TaskState_TASK_STATE_FAILED
}

// adopt moves a task whose attempt is in the agent's ledger to the new session.
func (s *Reports) adopt(ctx context.Context, tx pgx.Tx, r task.Row, theirs *commonv1.TaskInFlight, epoch int64,
	sessionID string,
) error {
	state := r.State
	if theirs.GetState() == commonv1.TaskState_TASK_STATE_RUNNING || task.Terminal(theirs.GetState()) {
		state = commonv1.TaskState_TASK_STATE_RUNNING
	} else if state != commonv1.TaskState_TASK_STATE_RUNNING {
		state = commonv1.TaskState_TASK_STATE_DELIVERED
	}
	return s.transition(ctx, tx, r, state, epoch, sessionID, "the agent has it")
}

// awaitProof delays the offer of a task for as long as that of a task whose offer was lost: the agent has a later
// attempt of it and is expected to report that with its envelope. If the agent does not, the row's attempt is offered.
func (s *Reports) awaitProof(ctx context.Context, tx pgx.Tx, r task.Row, g gate.Gate) error {
	if r.State != commonv1.TaskState_TASK_STATE_QUEUED {
		if err := s.transition(ctx, tx, r, commonv1.TaskState_TASK_STATE_DISPATCHED, g.SessionEpoch, g.SessionID,
			"the agent has a later attempt"); err != nil {
			return err
		}
	}
	_, err := pg.Exec(ctx, tx, postpone, r.TaskID)
	if err != nil {
		return fmt.Errorf("hold back task %s: %w", r.TaskID, err)
	}
	return nil
}

// again queues a task that is in flight here and not in the agent's ledger, offers it again, or ends it as
// outcome_unknown.
func (s *Reports) again(ctx context.Context, tx pgx.Tx, r task.Row, g gate.Gate, newLedger bool) error {
	switch {
	case r.State == commonv1.TaskState_TASK_STATE_DISPATCHED || !newLedger:
		return s.transition(ctx, tx, r, commonv1.TaskState_TASK_STATE_DISPATCHED, g.SessionEpoch, g.SessionID,
			"offered again")
	case task.Idempotent(r.Type):
		return s.transition(ctx, tx, r, commonv1.TaskState_TASK_STATE_QUEUED, 0, "", "the agent's ledger is new")
	default:
		return s.end(ctx, tx, r, commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN, "the agent's ledger is new")
	}
}

// end moves a task to a terminal state and wakes its run.
func (s *Reports) end(ctx context.Context, tx pgx.Tx, r task.Row, state commonv1.TaskState, detail string) error {
	if err := s.transition(ctx, tx, r, state, r.SessionEpoch, "", detail); err != nil {
		return err
	}
	if r.RunID == "" {
		return nil
	}
	return s.deps.Wake(ctx, tx, r.RunID)
}

// transition changes the state and the session of a task whose row is locked, and appends its event.
func (s *Reports) transition(ctx context.Context, tx pgx.Tx, r task.Row, state commonv1.TaskState, epoch int64,
	sessionID, detail string,
) error {
	moved, err := task.One(ctx, tx, transitionTask, r.TaskID, names.Of(state), epoch, sessionID)
	if err != nil {
		return fmt.Errorf("change task %s: %w", r.TaskID, err)
	}
	if _, err := events.Append(ctx, tx, moved.Event(r.WithLease(moved.Transition(state, detail))...)); err != nil {
		return fmt.Errorf("report task: %w", err)
	}
	return nil
}

// Fenced appends the events of the leases of a node whose gate was shut: reports of these tasks are not applied after
// this.
func (s *Reports) Fenced(ctx context.Context, tx pgx.Tx, nodeID string) error {
	_, err := task.ReportLeasesOf(ctx, tx, nodeID)
	return err
}
