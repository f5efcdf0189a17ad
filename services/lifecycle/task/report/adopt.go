package report

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// ahead is a task whose row has a lower attempt than its node reports.
type ahead struct {
	row    task.Row
	update taskUpdate
}

// adoptProven handles updates of attempts above their row's. Only a lease draws an attempt, and it commits before the
// node gets the signed envelope: so either the agent invented the attempt, or the database was restored to a moment
// before the lease. The envelope proves the latter. With it the row adopts the attempt, and the update is returned to
// be applied; without it the update is refused. A task that has ended stays as it is: its attempt is raised, so that no
// later lease draws the same one, and a result of it is late evidence.
func (s *Reports) adoptProven(ctx context.Context, tx pgx.Tx, updates []taskUpdate, done *applied) ([]taskUpdate,
	error,
) {
	list, err := findAhead(ctx, tx, updates)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	var out []taskUpdate
	for _, a := range list {
		keyID, refusal := s.prove(a.update)
		if refusal != nil {
			done.refused[updateKey(a.update.node, a.update.ref)] = refusal
			continue
		}
		if err := s.adoptAttempt(ctx, tx, a, keyID); err != nil {
			return nil, err
		}
		out = append(out, a.update)
	}
	return out, nil
}

// findAhead locks and returns the rows whose attempt is below that of an update, with the lower attempts of a task
// before the higher ones.
func findAhead(ctx context.Context, tx pgx.Tx, updates []taskUpdate) ([]ahead, error) {
	if len(updates) == 0 {
		return nil, nil
	}
	n := len(updates)
	taskIDs, nodes, attempts := make([]string, n), make([]string, n), make([]int32, n)
	for i, w := range updates {
		taskIDs[i], nodes[i], attempts[i] = w.ref.GetTaskId(), w.node, w.ref.GetAttempt()
	}
	rows, err := pg.All[aheadRow](ctx, tx, lockBehindReports, taskIDs, nodes, attempts)
	if err != nil {
		return nil, fmt.Errorf("read tasks behind their reports: %w", err)
	}
	out := make([]ahead, 0, len(rows))
	for _, r := range rows {
		row, err := r.Parse(ctx)
		switch {
		case aside.Note(ctx, "task", r.TaskID, err):
			continue
		case err != nil:
			return nil, fmt.Errorf("read task behind its report: %w", err)
		}
		out = append(out, ahead{row: row, update: updates[r.Place-1]})
	}
	return out, nil
}

// prove returns the id of the key that signed the envelope which proves the attempt of an update, or the refusal of an
// update that no envelope proves.
func (s *Reports) prove(w taskUpdate) (string, *lifecyclev1.TaskRefusal) {
	refusal := &lifecyclev1.TaskRefusal{Task: w.ref, EnvelopeWanted: len(w.signed) == 0}
	err := fault.New(commonv1.Reason_REASON_TASK_NOT_CURRENT, "the report names an attempt that is above the task's",
		fault.Remedy("send the report with the signed envelope of that attempt"))
	for _, signed := range w.signed {
		proven, verifyErr := envelope.Verify(s.deps.Keys.Verifiers(), signed.GetEnvelope(), signed.GetSignature(),
			signed.GetKeyId())
		switch {
		case verifyErr != nil:
			err = fault.From(verifyErr)
		case proven.NodeID != w.node:
			err = fault.New(commonv1.Reason_REASON_TASK_WRONG_NODE, "")
		case proven.TaskID != w.ref.GetTaskId() || proven.Attempt != w.ref.GetAttempt():
			err = fault.New(commonv1.Reason_REASON_TASK_NOT_CURRENT,
				"the envelope is of another task or attempt than the report",
				fault.Remedy("send the report with the envelope of the attempt that it names"))
		default:
			return signed.GetKeyId(), nil
		}
	}
	refusal.Denial = fault.ToDenial(err, "")
	return "", refusal
}

// adoptAttempt raises the row's attempt to the proven one and appends the event.
func (s *Reports) adoptAttempt(ctx context.Context, tx pgx.Tx, a ahead, keyID string) error {
	moved, err := task.One(ctx, tx, adoptAttempt,
		a.row.TaskID, a.update.ref.GetAttempt(), a.update.epoch, a.update.session, a.update.node, keyID)
	if err != nil {
		return fmt.Errorf("adopt attempt of task %s: %w", a.row.TaskID, err)
	}
	detail := fmt.Sprintf("the node proved attempt %d: the database had gone back to %d", moved.Attempt, a.row.Attempt)
	if _, err := events.Append(ctx, tx,
		moved.Event(a.row.WithLease(moved.Transition(moved.State, detail))...)); err != nil {
		return fmt.Errorf("report task: %w", err)
	}
	return nil
}
