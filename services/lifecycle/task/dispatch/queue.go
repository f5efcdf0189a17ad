package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

const (
	queueLanes  = 2  // transactions of a queue under way at once
	queueMost   = 64 // tasks in one transaction
	queueWithin = 10 * time.Second
)

// errPanicked is the error of the tasks of a group whose commit panicked: the panic may have come after the commit.
var errPanicked = fmt.Errorf("%w: the commit of the group panicked", pg.ErrCommitUnknown)

// queue commits tasks that are queued in no transaction of their callers'. Tasks that come while its transactions are
// under way share the next one. One of the callers runs the transaction of its group and then hands the lane to a
// caller of the next group, so that a queue has no goroutine of its own.
type queue struct {
	commit func(ctx context.Context, group []*queued) error

	mu      sync.Mutex
	waiting []*queued
	lanes   int // taken
}

// queued is a task that waits for its commit.
type queued struct {
	task  task.Made
	named bool           // its caller wants the position of its event
	lead  chan []*queued // the group that its caller is to commit
	done  chan struct{}  // closed when what follows is set
	row   task.Row
	pos   string // of its event; empty if the task was there already
	isNew bool
	to    standingLease // the session that it was leased to; its out is nil if it was not leased
	err   error
}

// Queue queues a task in a transaction of its own, or with others that come at the same moment, and offers it or
// notifies the hub. It reports whether the task is new: for an idempotency key that exists it returns the existing
// task. If there is no such node, or it is retired, the error is a fault, not_found. The error is pg.ErrCommitUnknown
// if ctx ended during the commit.
func (s *Server) Queue(ctx context.Context, spec task.Spec) (task.Row, bool, error) {
	one, err := s.queueOne(ctx, spec, false)
	if err != nil {
		return task.Row{}, false, err
	}
	return one.row, one.isNew, nil
}

func (s *Server) queueOne(ctx context.Context, spec task.Spec, named bool) (*queued, error) {
	made, err := spec.Make()
	if err != nil {
		return nil, err
	}
	one := &queued{task: made, named: named, lead: make(chan []*queued, 1), done: make(chan struct{})}
	if err := s.queue.add(ctx, one); err != nil {
		return nil, err
	}
	return one, one.err
}

// add waits until a task is committed or has failed; the outcome is in the fields of one. It returns an error only if
// ctx ended first.
func (q *queue) add(ctx context.Context, one *queued) error {
	q.mu.Lock()
	q.waiting = append(q.waiting, one)
	if q.lanes < queueLanes {
		q.lanes++
		q.handOverLocked()
	}
	q.mu.Unlock()
	select {
	case group := <-one.lead:
		q.run(ctx, group)
		return nil
	case <-one.done:
		return nil
	case <-ctx.Done():
		return q.leave(ctx, one)
	}
}

// handOverLocked lets the first waiting caller commit the next group, or frees the lane.
func (q *queue) handOverLocked() {
	n := min(len(q.waiting), queueMost)
	if n == 0 {
		q.lanes--
		return
	}
	group := slices.Clone(q.waiting[:n])
	q.waiting = slices.Delete(q.waiting, 0, n)
	group[0].lead <- group
}

// leave removes the task of a caller whose ctx ended from the queue, if it is still waiting. If the caller is to commit
// a group, leave commits it. Otherwise the commit is under way, and the error is pg.ErrCommitUnknown.
func (q *queue) leave(ctx context.Context, one *queued) error {
	q.mu.Lock()
	at := slices.Index(q.waiting, one)
	if at >= 0 {
		q.waiting = slices.Delete(q.waiting, at, at+1)
	}
	q.mu.Unlock()
	if at >= 0 {
		return context.Cause(ctx)
	}
	select {
	case group := <-one.lead: // the other tasks of the group depend on it
		q.run(ctx, group)
		return nil
	default:
		return errors.Join(pg.ErrCommitUnknown, context.Cause(ctx))
	}
}

// run commits a group, though the caller that runs it may be gone, and hands the lane over.
func (q *queue) run(ctx context.Context, group []*queued) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), queueWithin)
	defer cancel()
	defer func() {
		q.mu.Lock()
		q.handOverLocked()
		q.mu.Unlock()
	}()
	defer func() {
		for _, one := range group {
			select {
			case <-one.done:
			default: // a commit panicked
				one.err = errPanicked
				close(one.done)
			}
		}
	}()
	q.write(ctx, group)
}

// write commits a group. A group that fails for a reason other than the connection is tried task by task, so that one
// failing task does not affect the others.
func (q *queue) write(ctx context.Context, group []*queued) {
	err := q.commit(ctx, group)
	if err != nil && len(group) > 1 && ctx.Err() == nil && !pg.IsConnError(err) && !errors.Is(err, pg.ErrCommitUnknown) {
		for _, one := range group {
			q.write(ctx, []*queued{one})
		}
		return
	}
	for _, one := range group {
		if err != nil {
			one.err = err
		}
		close(one.done)
	}
}

// commitQueued writes a group in one transaction. It sets the outcome of each task only after the commit.
func (s *Server) commitQueued(ctx context.Context, group []*queued) error {
	// In one order, so that two groups with the same keys wait for each other and do not deadlock.
	group = slices.SortedFunc(slices.Values(group), func(a, b *queued) int {
		return cmp.Compare(a.task.Row.IdemKey, b.task.Row.IdemKey)
	})
	var stored []queued
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		stored, err = s.insertQueued(ctx, tx, group)
		return err
	})
	if err != nil {
		return fmt.Errorf("queue tasks: %w", err)
	}
	for i, one := range group {
		one.row, one.pos, one.isNew, one.err = stored[i].row, stored[i].pos, stored[i].isNew, stored[i].err
	}
	if s.announce(stored) {
		s.deps.Committed()
	}
	return nil
}

// announce offers the tasks of a group that were leased, and notifies the hub of the nodes of the others. It is called
// after their commit, and reports whether any task is new.
func (s *Server) announce(stored []queued) bool {
	var nodes []string
	isNew := false
	offers := map[*outlet][]picked{}
	for _, one := range stored {
		switch isNew = isNew || one.isNew; {
		case !one.isNew:
		case one.to.out == nil:
			nodes = append(nodes, one.row.NodeID)
		default:
			offers[one.to.out] = append(offers[one.to.out], picked{
				Row: dispatched(one.row, one.to.generation), session: one.to.session, keyID: one.task.KeyID,
				payload: one.task.Payload,
			})
		}
	}
	for out, tasks := range offers {
		out.add(tasks...)
	}
	if len(nodes) > 0 {
		s.deps.Hub.Notify(nodes...)
	}
	return isNew
}

// insertQueued inserts a group with its events, and returns the outcome of each task. A task whose node has a session
// with a standing lease is leased by the same statement. Its event has the state queued, and the task's next event
// reports the lease. A session is given back if it was reserved for a task which existed already, or if the transaction
// does not commit. After a commit whose answer was lost it is not: the task may be leased to it, and is offered by the
// node's next lease, as one whose offer was lost.
func (s *Server) insertQueued(ctx context.Context, tx pgx.Tx, group []*queued) ([]queued, error) {
	to, keyID := s.reserveSessions(group)
	pg.OnEnd(tx, func(committed bool) {
		if committed || pg.OutcomeUnknown(tx) {
			return
		}
		for i, one := range group {
			s.standing.giveBack(one.task.Row.NodeID, to[i])
		}
	})
	rows, err := pg.All[queuedNow](ctx, tx, enqueueTasks, queuedColumns(group, to, keyID)...)
	if err != nil {
		return nil, fmt.Errorf("insert tasks: %w", err)
	}
	at := make(map[string]queuedNow, len(rows))
	for _, r := range rows {
		at[r.TaskID] = r
	}
	out, evs := make([]queued, len(group)), make([]events.Event, 0, len(rows))
	var missing []string
	for i, one := range group {
		now, isNew := at[one.task.Row.TaskID]
		if !isNew {
			missing = append(missing, one.task.Row.IdemKey)
			s.standing.giveBack(one.task.Row.NodeID, to[i])
			continue
		}
		out[i].task, out[i].row, out[i].isNew = one.task, one.task.Row.Queued(now.QueuedAt), true
		if now.Leased {
			out[i].to, out[i].task.KeyID = to[i], keyID
		} else if to[i].out != nil {
			s.standing.drop(one.task.Row.NodeID, to[i])
		}
		e := out[i].row.Event()
		if one.named {
			out[i].pos = ids.New()
			e.ID, e.Unnamed = out[i].pos, false
		}
		evs = append(evs, e)
	}
	if len(missing) > 0 {
		if err := findQueued(ctx, tx, group, out, missing); err != nil {
			return nil, err
		}
	}
	if len(evs) > 0 {
		if _, err := events.Append(ctx, tx, evs...); err != nil {
			return nil, fmt.Errorf("report tasks: %w", err)
		}
	}
	return out, nil
}

// reserveSessions reserves, for each task of a group, the session that it may be leased to as it is queued, and returns
// these sessions and the id of the key that signs. Without a signing key it reserves none.
func (s *Server) reserveSessions(group []*queued) ([]standingLease, string) {
	out := make([]standingLease, len(group))
	signer, err := s.deps.Keys.Signer()
	if err != nil { // LeaseTasks returns this error
		return out, ""
	}
	now := time.Now()
	for i, one := range group {
		out[i] = s.standing.reserve(one.task.Row.NodeID, now)
	}
	return out, signer.ID()
}

// findQueued fills in the tasks that existed already. For a task without a row there is no such node.
func findQueued(ctx context.Context, tx pgx.Tx, group []*queued, out []queued, keys []string) error {
	found, err := task.All(ctx, tx, tasksByKeys, keys)
	if err != nil {
		return fmt.Errorf("read tasks by keys: %w", err)
	}
	byKey := make(map[string]task.Row, len(found))
	for _, r := range found {
		byKey[r.IdemKey] = r
	}
	for i, one := range group {
		if out[i].isNew {
			continue
		}
		row, ok := byKey[one.task.Row.IdemKey]
		if !ok {
			out[i].err = gate.NotEnrolled(one.task.Row.NodeID)
		}
		out[i].row = row
	}
	return nil
}

// queuedColumns returns the arguments of enqueueTasks. to are the sessions that the tasks may be leased to, and keyID
// is the id of the key that signs.
func queuedColumns(group []*queued, to []standingLease, keyID string) []any {
	n := len(group)
	text := func(of func(*task.Made) string) []string {
		out := make([]string, n)
		for i, one := range group {
			out[i] = of(&one.task)
		}
		return out
	}
	epochs, opSeqs, payloads, within := make([]int64, n), make([]int64, n), make([][]byte, n), make([]time.Duration, n)
	nodes, sessions, generations := []string{}, make([]string, n), make([]int64, n)
	for i, one := range group {
		epochs[i], opSeqs[i] = one.task.Row.Epoch, one.task.Row.OpSeq
		if to[i].out != nil {
			nodes, sessions[i], generations[i] = append(nodes, one.task.Row.NodeID), to[i].session, to[i].generation
		}
		payloads[i], within[i] = one.task.Payload, one.task.Within
	}
	return []any{
		text(func(t *task.Made) string { return t.Row.TaskID }), text(func(t *task.Made) string { return t.Row.Type }),
		text(func(t *task.Made) string { return t.Row.NodeID }), text(func(t *task.Made) string { return t.Row.WorkspaceID }),
		text(func(t *task.Made) string { return t.Row.TenantID }), text(func(t *task.Made) string { return t.Row.RunID }),
		epochs, opSeqs,
		text(func(t *task.Made) string { return t.Row.IdemKey }), payloads, within,
		text(func(t *task.Made) string { return t.Row.CorrelationID }),
		text(func(t *task.Made) string { return t.Row.CreatedBy }),
		text(func(t *task.Made) string { return t.SecretKeys }),
		nodes, sessions, generations, keyID,
	}
}
