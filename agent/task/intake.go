package task

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/ledger"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// gather returns first and the other items that wait, at most Queue, so that all of them share one fsync.
func (e *Executor) gather(first item) []item {
	items := []item{first}
	for len(items) < e.cfg.Queue {
		select {
		case next := <-e.intake:
			items = append(items, next)
			continue
		default:
		}
		break
	}
	return items
}

// take handles offers in batches, and a cancel only after the offers before it are in the ledger.
func (e *Executor) take(ctx context.Context, items []item) {
	var offers []*nodev1.TaskOffer
	for _, it := range items {
		if it.offer != nil {
			offers = append(offers, it.offer)
			continue
		}
		e.accept(ctx, offers)
		offers = nil
		e.cancelTask(ctx, it.cancel.GetTask())
		for _, ref := range it.cancel.GetMore() {
			e.cancelTask(ctx, ref)
		}
	}
	e.accept(ctx, offers)
}

// candidate is a verified offer on its way into the ledger.
type candidate struct {
	job   *job
	start bool // a place to run it is reserved
}

func (e *Executor) accept(ctx context.Context, offers []*nodev1.TaskOffer) {
	var candidates []candidate
	var deliveries []ledger.Delivery
	seen := map[ledger.Key]bool{}
	for _, offer := range offers {
		t, ok := e.verify(ctx, offer)
		if !ok {
			continue
		}
		key := ledger.Key{TaskID: t.TaskID, Attempt: t.Attempt}
		if seen[key] {
			continue
		}
		seen[key] = true
		j := &job{task: t, key: key}
		if e.prestart.has(key, time.Now()) {
			j.dropped = droppedCancel
		}
		start, ok := e.reserve(j)
		if !ok {
			e.stats.busy.Add(1)
			continue
		}
		candidates = append(candidates, candidate{job: j, start: start})
		deliveries = append(deliveries, ledger.Delivery{
			Key: key, Type: t.Kind, WorkspaceID: t.WorkspaceID, Epoch: t.Epoch, OpSeq: t.OpSeq, ExpiresAt: t.ExpiresAt,
			Envelope: offer.GetEnvelope(), Signature: offer.GetSignature(), KeyID: offer.GetKeyId(),
			CorrelationID: offer.GetCorrelationId(), WorkflowID: offer.GetWorkflowId(), Start: start,
		})
	}
	if len(deliveries) == 0 {
		return
	}
	outcomes, err := e.deps.Ledger.Deliver(context.WithoutCancel(ctx), deliveries...)
	if err == nil {
		err = failpoint.Hit("agent.deliver.before_send")
	}
	if err != nil {
		e.deps.Logger.ErrorContext(ctx, "offered tasks were not stored", slog.Int("tasks", len(deliveries)),
			slog.Any("error", err))
		for _, c := range candidates {
			e.unreserve(c)
			// Nothing was acknowledged, so a task that is not in the ledger is offered again. One that is in the ledger in spite
			// of the error is not, since the next Hello names it: it is adopted.
			e.adopt(ctx, c.job.key)
		}
		e.dispatch(ctx)
		return
	}
	tasks := make([]*Task, len(candidates))
	for i, c := range candidates {
		tasks[i] = &c.job.task
	}
	e.sendDelivered(tasks...)
	for i, c := range candidates {
		e.applyOutcome(ctx, c, outcomes[i])
	}
	e.dispatch(ctx)
}

// applyOutcome acts on the ledger's outcome for a candidate.
func (e *Executor) applyOutcome(ctx context.Context, c candidate, out ledger.Outcome) {
	switch {
	case out.Known:
		e.unreserve(c)
		e.repeat(ctx, out.Entry)
	case out.Superseded:
		e.unreserve(c)
		e.supersede(ctx, c.job)
	default:
		e.stats.delivered.Add(1)
		if c.job.dropped != "" { // it was cancelled before it was offered
			e.finish(ctx, c.job, e.resultOf(c.job, nil, errCancelled))
			return
		}
		if c.start {
			c.job.started = out.Entry.StartedAt
			e.mu.Lock()
			e.startedLocked(&c.job.task)
			e.mu.Unlock()
			e.launch(ctx, c.job)
			return
		}
		e.mu.Lock()
		e.jobs[c.job.key] = c.job
		e.waiting[c.job.task.Kind] = append(e.waiting[c.job.task.Kind], c.job)
		e.mu.Unlock()
	}
}

// repeat sends the state of a task that was offered again.
func (e *Executor) repeat(ctx context.Context, entry ledger.Entry) {
	switch entry.State {
	case ledger.StateFinished, ledger.StateAcked:
		if s := e.attached(); s != nil {
			e.sendStored(s, entry, time.Now())
		}
	case ledger.StateStarted:
		e.mu.Lock()
		j := e.jobs[entry.Key]
		e.mu.Unlock()
		if j == nil {
			e.adopt(ctx, entry.Key)
			return
		}
		if !j.started.IsZero() {
			e.sendStarted(j)
		}
	case ledger.StateDelivered:
		e.adopt(ctx, entry.Key)
	}
}

// adopt queues a task that is in the ledger without a result and has no job: its delivery was committed, although the
// call that committed it failed. It was never begun, even if it is marked as started: a task that had begun before a
// restart has had a job since Run resumed it, and keeps it until its result is stored.
func (e *Executor) adopt(ctx context.Context, key ledger.Key) {
	e.mu.Lock()
	_, here := e.jobs[key]
	e.mu.Unlock()
	if here {
		return
	}
	entry, found, err := e.deps.Ledger.Get(key) // read after the jobs: a result is stored before its job is removed
	if err != nil || !found || entry.State >= ledger.StateFinished {
		return
	}
	j, err := e.revive(&entry)
	if fault.Has(err, commonv1.Reason_REASON_TASK_WRONG_NODE) {
		e.abandon(ctx, &entry, err)
		return
	}
	e.sendDelivered(&j.task)
	if err != nil {
		e.finish(ctx, j, e.resultOf(j, nil, err))
		return
	}
	if e.prestart.has(key, time.Now()) {
		j.dropped = droppedCancel
	}
	e.stats.delivered.Add(1)
	e.mu.Lock()
	e.jobs[key] = j
	e.waiting[j.task.Kind] = append(e.waiting[j.task.Kind], j)
	e.mu.Unlock()
}

// verify returns the offer's task, or refuses it and returns false. A task in the ledger is accepted outside its window
// as well: its stored result is sent.
func (e *Executor) verify(ctx context.Context, offer *nodev1.TaskOffer) (Task, bool) {
	signed, err := envelope.Verify(e.deps.Verifiers(), offer.GetEnvelope(), offer.GetSignature(), offer.GetKeyId())
	if err != nil {
		id, attempt, _ := envelope.Claimed(offer.GetEnvelope())
		e.refuse(ctx, offer, ledger.Key{TaskID: id, Attempt: attempt}, err)
		return Task{}, false
	}
	key := ledger.Key{TaskID: signed.TaskID, Attempt: signed.Attempt}
	t := Task{Task: signed, CorrelationID: offer.GetCorrelationId(), WorkflowID: offer.GetWorkflowId()}
	if signed.Attempt <= 0 || len(signed.TaskID) > 64 || len(signed.WorkspaceID) > 64 {
		e.refuse(ctx, offer, ledger.Key{},
			fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the task's id, attempt or workspace is malformed"))
		return Task{}, false
	}
	err = e.window(&t)
	if err == nil {
		t.Kind, err = e.kind(signed.Type)
	}
	if err == nil {
		return t, true
	}
	if fault.Has(err, commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW) {
		if entry, known, readErr := e.deps.Ledger.Get(key); readErr == nil && known {
			e.sendDelivered(&t)
			e.repeat(ctx, entry)
			e.dispatch(ctx)
			return Task{}, false
		}
	}
	e.refuse(ctx, offer, key, err)
	return Task{}, false
}

func (e *Executor) kind(spelling string) (commonv1.TaskType, error) {
	kind, err := names.Parse[commonv1.TaskType](spelling)
	if err != nil || e.deps.Handlers[kind] == nil {
		return 0, fault.New(commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED, "", fault.Cause(err))
	}
	return kind, nil
}

// window checks node and time. The agent's estimate of server time may be late by half a round trip at most, so up to
// Skew is forgiven before not_before.
func (e *Executor) window(t *Task) error {
	now, ok := e.deps.ServerNow()
	if !ok {
		return fault.New(commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW, "the agent does not know the server's time yet")
	}
	if early := t.NotBefore.Sub(now); early > 0 && early <= e.cfg.Skew {
		now = t.NotBefore
	}
	return t.Check(e.cfg.NodeID, now)
}

// refuse records evidence and sends a failed result, which is not stored in the ledger: a refused offer has changed
// nothing here. For an envelope with a bad signature and the ids of a task in the ledger it sends no result, since a
// forger could make a good task fail so.
func (e *Executor) refuse(ctx context.Context, offer *nodev1.TaskOffer, key ledger.Key, err error) {
	e.evidence(ctx, "offered task was refused", key, offer.GetEnvelope(), offer.GetKeyId(), err)
	if key.TaskID == "" || key.Attempt <= 0 {
		return
	}
	if _, known, readErr := e.deps.Ledger.Get(key); readErr != nil || known {
		return
	}
	f := fault.From(err)
	msg := &nodev1.TaskResult{
		Task:  &nodev1.TaskRef{TaskId: clean(key.TaskID, 64), Attempt: key.Attempt},
		State: commonv1.TaskState_TASK_STATE_FAILED, Reason: fault.ReasonOf(err), Error: cut(f.Public, maxError),
	}
	e.send(func(s Sender) error { return s.Result(msg) })
}

// evidence logs a task that was refused, counts it and calls Refused.
func (e *Executor) evidence(ctx context.Context, what string, key ledger.Key, signed []byte, keyID string, err error) {
	reason := fault.ReasonOf(err)
	sum := sha256.Sum256(signed)
	r := Refusal{
		Reason: reason, Detail: err.Error(), TaskID: clean(key.TaskID, 64), Attempt: key.Attempt, KeyID: clean(keyID, 128),
		EnvelopeSHA256: hex.EncodeToString(sum[:]), At: time.Now(),
	}
	e.stats.refused.Add(1)
	//nolint:sloglint // the callers' messages are constants
	e.deps.Logger.WarnContext(ctx, what, slog.String("reason", names.Of(reason)), slog.String("task_id", r.TaskID),
		slog.String("key_id", r.KeyID), slog.String("envelope_sha256", r.EnvelopeSHA256), slog.String("detail", r.Detail))
	if e.deps.Refused != nil {
		e.deps.Refused(r)
	}
}

// reserve takes a place in the queue for j, and a place to run if one is free. ok is false when the queue is full.
func (e *Executor) reserve(j *job) (start, ok bool) { //nolint:nonamedreturns // two answers of one type
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, known := e.jobs[j.key]; known {
		return false, true // the ledger's outcome decides about it
	}
	if len(e.jobs) >= e.cfg.Queue {
		return false, false
	}
	return j.dropped == "" && len(e.waiting[j.task.Kind]) == 0 && e.enterLocked(&j.task, false), true
}

func (e *Executor) unreserve(c candidate) {
	if c.start {
		e.leave(&c.job.task)
	}
}

// send calls f with the sender if there is one. A message that it cannot take is sent again with the next session.
func (e *Executor) send(f func(Sender) error) {
	if s := e.attached(); s != nil {
		_ = f(s)
	}
}

// attached returns the sender; nil if no session is admitted.
func (e *Executor) attached() Sender {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sender
}

// sendDelivered reports tasks as delivered; at once, if one of them may not run again. Until the report of the delivery
// arrives the control plane takes the task for dispatched, and offers it again if the ledger is lost.
func (e *Executor) sendDelivered(tasks ...*Task) {
	refs := make([]*nodev1.TaskRef, len(tasks))
	atOnce := false
	for i, t := range tasks {
		refs[i] = t.Ref()
		atOnce = atOnce || !e.mayRepeat(t.Kind)
	}
	e.send(func(s Sender) error {
		err := s.Delivered(refs)
		if atOnce {
			s.Flush()
		}
		return err
	})
}

// sendStarted reports a task as started; at once, if it may not run again. See sendDelivered.
func (e *Executor) sendStarted(j *job) {
	e.send(func(s Sender) error {
		err := s.Started(j.startedMessage())
		if !e.mayRepeat(j.task.Kind) {
			s.Flush()
		}
		return err
	})
}

// mayRepeat reports whether tasks of a type may run again.
func (e *Executor) mayRepeat(kind commonv1.TaskType) bool {
	i, ok := e.deps.Handlers[kind].(Idempotent)
	return ok && i.Idempotent()
}

// sendStored sends a result from the ledger and returns whether the session took it.
func (e *Executor) sendStored(s Sender, entry ledger.Entry, now time.Time) bool {
	msg := &nodev1.TaskResult{}
	if err := proto.Unmarshal(entry.Result, msg); err != nil {
		msg = &nodev1.TaskResult{
			Task:   &nodev1.TaskRef{TaskId: entry.Key.TaskID, Attempt: entry.Key.Attempt},
			State:  commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN,
			Reason: commonv1.Reason_REASON_INTERNAL, Error: "the stored result is not readable",
		}
	}
	msg.Signed = e.proofOf(&entry)
	if err := s.Result(msg); err != nil {
		return false
	}
	if entry.State == ledger.StateFinished {
		e.mu.Lock()
		e.sent[entry.Key] = now
		e.mu.Unlock()
	}
	return true
}
