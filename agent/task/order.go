package task

import (
	"github.com/gpuaas/mesh/agent/ledger"
)

// order is the number of a workspace's operation. Tasks of one operation have one order, and run in parallel.
type order struct{ epoch, opSeq int64 }

// runningOperation is a workspace's running operation: while one of its tasks runs, no task of another operation of the
// workspace begins.
type runningOperation struct {
	order   order
	tasks   int  // running, or about to run
	started bool // one of them is marked as started in the ledger: lower operations are superseded
}

// ordered returns the task's order, and false for tasks that change nothing, or nothing of a workspace.
func (t *Task) ordered() (order, bool) {
	if t.WorkspaceID == "" || ledger.Exempt(t.Kind) {
		return order{}, false
	}
	return order{epoch: t.Epoch, opSeq: t.OpSeq}, true
}

// behind reports whether o is lower than the given numbers in either, which is the ledger's rule for superseded tasks.
// Equal numbers are not behind.
func (o order) behind(epoch, opSeq int64) bool { return o.epoch < epoch || o.opSeq < opSeq }

// enterLocked takes a place to run for t and joins its workspace's turn, or does neither. A task that has to wait takes
// no place, so the task that it waits for can always run. over lets t exceed the limit of its type.
func (e *Executor) enterLocked(t *Task, over bool) bool {
	if !over && e.running[t.Kind] >= e.limit(t.Kind) {
		return false
	}
	if o, ok := t.ordered(); ok {
		cur := e.operations[t.WorkspaceID]
		if cur == nil {
			cur = &runningOperation{order: o}
			e.operations[t.WorkspaceID] = cur
		}
		if cur.order != o {
			return false
		}
		cur.tasks++
	}
	e.running[t.Kind]++
	return true
}

// leave gives back the place and the turn that enterLocked took.
func (e *Executor) leave(t *Task) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running[t.Kind]--
	if _, ok := t.ordered(); !ok {
		return
	}
	cur := e.operations[t.WorkspaceID]
	cur.tasks--
	if cur.tasks == 0 {
		delete(e.operations, t.WorkspaceID)
	}
}

// startedLocked notes that t, which is running, is marked as started.
func (e *Executor) startedLocked(t *Task) {
	if _, ok := t.ordered(); ok {
		e.operations[t.WorkspaceID].started = true
	}
}

// overtakenLocked reports whether a later operation of t's workspace has started, so that t can never run.
func (e *Executor) overtakenLocked(t *Task) bool {
	o, ok := t.ordered()
	if !ok {
		return false
	}
	cur := e.operations[t.WorkspaceID]
	return cur != nil && cur.started && o.behind(cur.order.epoch, cur.order.opSeq)
}

// superseded reports whether, by the ledger, a later operation has been seen since the task was marked. It is called
// right before the handler.
func (e *Executor) superseded(t *Task) (bool, error) {
	o, ok := t.ordered()
	if !ok {
		return false, nil
	}
	epoch, opSeq, err := e.deps.Ledger.Fence(t.WorkspaceID)
	if err != nil {
		return false, err
	}
	return o.behind(epoch, opSeq), nil
}
