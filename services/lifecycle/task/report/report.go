package report

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// ReportDeps are the dependencies of reports.
type ReportDeps struct {
	DB   *pgxpool.Pool
	Keys *envelope.Ring
	// Wake wakes saga runs in the transaction that ended one of their tasks.
	Wake func(ctx context.Context, tx pgx.Tx, runIDs ...string) error
	// Committed is called after each commit that wrote events or woke a run.
	Committed func()
	// Superseded is called after the commit of a report with the number of its results as superseded. May be nil.
	Superseded func(n int)
	// Reported is called with reports when they have been applied or refused.
	Reported func([]*lifecyclev1.NodeReport)
}

// Reports apply to tasks what agents report of them.
type Reports struct{ deps ReportDeps }

// NewReports returns reports.
func NewReports(deps ReportDeps) *Reports { return &Reports{deps: deps} }

// ReportTasks applies agents' reports of their tasks, under the gates of their nodes.
func (s *Reports) ReportTasks(ctx context.Context,
	req *lifecyclev1.ReportTasksRequest,
) (*lifecyclev1.ReportTasksResponse, error) {
	defer s.deps.Reported(req.GetReports())
	updates, order, contradictions := gather(req)
	nodes := make([]string, 0, len(req.GetReports()))
	durable := false
	for _, r := range req.GetReports() {
		nodes = append(nodes, r.GetNodeId())
		durable = durable || len(r.GetResults()) > 0
	}
	var res *lifecyclev1.ReportTasksResponse
	superseded := 0
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		res = &lifecyclev1.ReportTasksResponse{}
		gates, done, err := s.apply(ctx, tx, nodes, updates, order, durable)
		if err != nil {
			return err
		}
		var late []taskUpdate
		for _, key := range order {
			if w := updates[key]; !gates[w.node].Admitted && w.result != nil {
				late = append(late, w)
			}
		}
		superseded = done.superseded
		for _, w := range contradictions {
			if done.refused[updateKey(w.node, w.ref)] == nil {
				late = append(late, w)
			}
		}
		if err := keepLate(ctx, tx, late); err != nil {
			return err
		}
		// Runs come after all tasks in the order of locks.
		if len(done.wake) > 0 {
			slices.Sort(done.wake)
			if err := s.deps.Wake(ctx, tx, slices.Compact(done.wake)...); err != nil {
				return fmt.Errorf("wake runs: %w", err)
			}
		}
		for _, r := range req.GetReports() {
			one := &lifecyclev1.NodeReportResult{NodeId: r.GetNodeId(), SessionId: r.GetSessionId()}
			if gates[r.GetNodeId()].Admitted {
				done.answer(r, one)
			} else {
				one.Denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED,
					"the gate of this node is shut: kept as late evidence"), "")
			}
			res.Results = append(res.Results, one)
		}
		return failpoint.Hit("lifecycle.report.before_commit")
	})
	if err != nil {
		return nil, err
	}
	if err := failpoint.Hit("lifecycle.report.after_commit"); err != nil {
		return nil, err
	}
	s.deps.Committed()
	if superseded > 0 && s.deps.Superseded != nil {
		s.deps.Superseded(superseded)
	}
	return res, nil
}

// applied is the outcome of a batch.
type applied struct {
	// acknowledged are the attempts whose result is applied, was applied before, or is kept as late evidence.
	acknowledged map[string]bool
	refused      map[string]*lifecyclev1.TaskRefusal // attempts above their row's, unproven
	superseded   int                                 // results applied as superseded
	wake         []string                            // runs of which a task has ended
}

// answer fills in the acknowledgements and refusals of one report.
func (a applied) answer(r *lifecyclev1.NodeReport, one *lifecyclev1.NodeReportResult) {
	answered := map[string]bool{}
	refuse := func(ref *nodev1.TaskRef) bool {
		k := updateKey(r.GetNodeId(), ref)
		refusal := a.refused[k]
		if refusal != nil && !answered[k] {
			answered[k] = true
			one.Refused = append(one.Refused, refusal)
		}
		return refusal != nil
	}
	for _, ref := range r.GetDelivered() {
		refuse(ref)
	}
	for _, f := range r.GetStarted() {
		refuse(f.GetTask())
	}
	for _, f := range r.GetProgress() {
		refuse(f.GetTask())
	}
	for _, f := range r.GetResults() {
		if !refuse(f.GetTask()) && a.acknowledged[updateKey(r.GetNodeId(), f.GetTask())] {
			one.Acknowledged = append(one.Acknowledged, f.GetTask())
		}
	}
}

// apply locks the gates of nodes and moves the tasks of those that are admitted forward. An update of an attempt above
// the row's is applied after the row has adopted the attempt, or refused if no envelope proves it. Any other update
// that moves no task is kept as late evidence if it is a result, and ignored otherwise.
func (s *Reports) apply(ctx context.Context, tx pgx.Tx, nodes []string, updates map[string]taskUpdate, order []string,
	durable bool,
) (gate.Views, applied, error) {
	done := applied{acknowledged: map[string]bool{}, refused: map[string]*lifecyclev1.TaskRefusal{}}
	all := make([]taskUpdate, len(order))
	for i, k := range order {
		all[i] = updates[k]
	}
	var batch pg.Batch
	if !durable {
		// A report of a delivery or a start is repeated by the agent's ledger at its next session: losing the last moments of
		// it to a crash of the database costs nothing. Results and queueing never take this way.
		batch.Queue(relaxCommit)
	}
	gates := gate.QueueLockForWork(&batch, nodes)
	// The same round trip: see gate.QueueLockForWork for why this statement reads the gates as they were locked.
	rows := queueReports(&batch, all)
	if err := batch.Send(ctx, tx); err != nil {
		return nil, done, fmt.Errorf("apply reports: %w", err)
	}
	moved, err := s.advanced(ctx, tx, updates, *rows, &done)
	if err != nil {
		return nil, done, err
	}
	rest := slices.DeleteFunc(all,
		func(w taskUpdate) bool { return !gates[w.node].Admitted || moved[updateKey(w.node, w.ref)] })
	adopted, err := s.adoptProven(ctx, tx, rest, &done)
	if err != nil {
		return nil, done, err
	}
	var again map[string]bool
	if len(adopted) > 0 {
		var batch pg.Batch
		rows := queueReports(&batch, adopted)
		if err := batch.Send(ctx, tx); err != nil {
			return nil, done, fmt.Errorf("apply reports: %w", err)
		}
		if again, err = s.advanced(ctx, tx, updates, *rows, &done); err != nil {
			return nil, done, err
		}
	}
	var late []taskUpdate
	for _, w := range rest { // in their order, so that every transaction locks rows in the same order
		k := updateKey(w.node, w.ref)
		if w.result == nil || again[k] || done.refused[k] != nil {
			continue
		}
		late = append(late, w)
		done.acknowledged[k] = true
	}
	return gates, done, keepLate(ctx, tx, late)
}

// queueReports adds the statement that moves the open tasks whose attempt is the one reported to a batch, and returns a
// pointer to its rows, which are filled in when the batch is sent.
func queueReports(batch *pg.Batch, updates []taskUpdate) *[]reportedRow {
	n := len(updates)
	taskIDs, nodes, states, notes := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	reasons, texts, attempts, outputs := make([]string, n), make([]string, n), make([]int32, n), make([][]byte, n)
	for i, w := range updates {
		taskIDs[i], nodes[i], attempts[i], notes[i] = w.ref.GetTaskId(), w.node, w.ref.GetAttempt(), task.Clean(w.note, 512)
		if st := w.state(); st != commonv1.TaskState_TASK_STATE_UNSPECIFIED {
			states[i] = names.Of(st)
		}
		if w.result != nil {
			if w.result.GetReason() != commonv1.Reason_REASON_UNSPECIFIED {
				reasons[i] = names.Of(w.result.GetReason())
			}
			texts[i], outputs[i] = task.Clean(w.result.GetError(), 4096), w.result.GetOutput()
		}
		if outputs[i] == nil {
			outputs[i] = []byte{}
		}
	}
	rows := &[]reportedRow{}
	// A report moves a task only forward: rank is the order of the states, terminal last.
	batch.Queue(applyReports, taskIDs, nodes, attempts, states, notes, reasons, texts,
		outputs).Query(func(found pgx.Rows) error {
		var err error
		*rows, err = pgx.CollectRows(found, pgx.RowToStructByName[reportedRow])
		return err
	})
	return rows
}

// advanced appends the events of the tasks that were moved, records the acknowledged results and the runs to wake in
// done, and returns the attempts that were moved.
func (s *Reports) advanced(ctx context.Context, tx pgx.Tx, updates map[string]taskUpdate, rows []reportedRow,
	done *applied,
) (map[string]bool, error) {
	advanced := make(map[string]bool, len(rows))
	var evs []events.Event
	for _, reported := range rows {
		r, err := reported.Parse(ctx)
		switch {
		case aside.Note(ctx, "task", reported.TaskID, err):
			continue
		case err != nil:
			return nil, fmt.Errorf("apply reports: %w", err)
		}
		k := updateKey(r.NodeID, &nodev1.TaskRef{TaskId: r.TaskID, Attempt: r.Attempt})
		w := updates[k]
		evs = append(evs, r.Event(transitions(r, reported, w)...))
		advanced[k] = true
		if w.result == nil {
			continue
		}
		done.acknowledged[k] = true
		if r.State == commonv1.TaskState_TASK_STATE_SUPERSEDED {
			done.superseded++
		}
		if r.State == commonv1.TaskState_TASK_STATE_FAILED && r.Reason == typeRefused {
			evs = append(evs, refusedType(r))
		}
		if r.RunID != "" {
			done.wake = append(done.wake, r.RunID)
		}
	}
	if len(evs) > 0 {
		if _, err := events.Append(ctx, tx, evs...); err != nil {
			return nil, fmt.Errorf("report tasks: %w", err)
		}
	}
	return advanced, nil
}

// transitions lists the states that the task went through since `was`, so that states which were reported together
// still have a transition each. A transition has the epoch of the session by which it was reported, which the row need
// not have: an agent sends its results again at the start of a session, maybe before the gate is raised to that.
func transitions(r task.Row, before reportedRow, w taskUpdate) []*lifecyclev1.TaskTransition {
	var out []*lifecyclev1.TaskTransition
	was := before.Was
	if before.LeasedAt != nil {
		out = append(out, r.Leased(*before.LeasedAt))
	}
	r.SessionEpoch = w.epoch
	// The agent leaves out the delivery and the start of a task whose result has the time of the start.
	byResult := w.result.GetStartedAt() != nil
	if was == "dispatched" && (w.delivered || byResult) {
		out = append(out, passed(r, commonv1.TaskState_TASK_STATE_DELIVERED, w.delivered, before, w))
	}
	if was != "running" && (w.started || byResult) {
		out = append(out, passed(r, commonv1.TaskState_TASK_STATE_RUNNING, w.started, before, w))
	}
	if w.result != nil {
		out = append(out, r.Transition(r.State, r.Error))
	}
	if w.state() == commonv1.TaskState_TASK_STATE_UNSPECIFIED && w.note != "" {
		out = append(out, r.Transition(r.State, w.note))
	}
	return out
}

// passed returns a transition before the result, which was reported by itself or only with the result. If the result
// has the time at which the task started, the transition has that time: by the agent's clock, but not before the row's
// former state and not after the result, both by the database's clock.
func passed(
	r task.Row, state commonv1.TaskState, byItself bool, before reportedRow, w taskUpdate,
) *lifecyclev1.TaskTransition {
	out := r.Transition(state, "")
	if w.result.GetStartedAt() == nil {
		return out
	}
	if !byItself {
		out.Detail = "reported with its result"
	}
	at := w.result.GetStartedAt().AsTime()
	switch {
	case at.Before(before.WasAt):
		at = before.WasAt
	case at.After(r.StateAt):
		at = r.StateAt
	}
	out.At = timestamppb.New(at)
	return out
}
