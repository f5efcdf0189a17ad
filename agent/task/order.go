package task

import (
	"github.com/gpuaas/mesh/agent/ledger"
)

// order is the number of a workspace's operation. Tasks of one operation have one order, and run in parallel.
type order struct{ epoch, opSeq int64 }

// turn is a workspace's running operation: while a task of it is in work, no other operation's task of the workspace begins.
type turn struct {
	order   order
	tasks   int  // in work, or about to be
	started bool // one of them is marked in the ledger: what is lower has been superseded
}

// ordered returns the task's order, and false for tasks that change nothing, or nothing of a workspace.
func (t *Task) ordered() (order, bool) {
	if t.WorkspaceID == "" || ledger.Exempt(t.Kind) {
		return order{}, false
	}
	return order{epoch: t.Epoch, opSeq: t.OpSeq}, true
}

// behind is the ledger's rule: lower in either number. Equal passes.
func (o order) behind(epoch, opSeq int64) bool { return o.epoch < epoch || o.opSeq < opSeq }

// enterLocked takes a place to run for t and joins its workspace's turn, or does neither. A task that has to wait holds nothing, so the task that
// it waits for always finds its place. over lets it exceed the limit of its type.
func (e *Executor) enterLocked(t *Task, over bool) bool {
	if !over && e.running[t.Kind] >= e.limit(t.Kind) {
		return false
	}
	if o, ok := t.ordered(); ok {
		cur := e.turns[t.WorkspaceID]
		if cur == nil {
			cur = &turn{order: o}
			e.turns[t.WorkspaceID] = cur
		}
		if cur.order != o {
			return false
		}
		cur.tasks++
	}
	e.running[t.Kind]++
	return true
}

// leave gives back what enterLocked took.
func (e *Executor) leave(t *Task) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running[t.Kind]--
	if _, ok := t.ordered(); !ok {
		return
	}
	cur := e.turns[t.WorkspaceID]
	cur.tasks--
	if cur.tasks == 0 {
		delete(e.turns, t.WorkspaceID)
	}
}

// startedLocked notes that t, which is in work, is marked as started.
func (e *Executor) startedLocked(t *Task) {
	if _, ok := t.ordered(); ok {
		e.turns[t.WorkspaceID].started = true
	}
}

// overtakenLocked says that a later operation of t's workspace has started, and t can never run.
func (e *Executor) overtakenLocked(t *Task) bool {
	o, ok := t.ordered()
	if !ok {
		return false
	}
	cur := e.turns[t.WorkspaceID]
	return cur != nil && cur.started && o.behind(cur.order.epoch, cur.order.opSeq)
}

// superseded asks the ledger, right before a handler, whether a later operation has been seen since the task was marked.
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
