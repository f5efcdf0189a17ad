package task

import (
	"context"
	"time"

	"github.com/gpuaas/mesh/agent/ledger"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	proofFrame = 64       // tasks in one frame of redeliveries
	proofBytes = 64 << 10 // of their envelopes, approximately: a single one may be larger
)

// redeliver reports tasks that were in the ledger before the session as delivered, with their envelopes.
func (e *Executor) redeliver(s Sender, keys []ledger.Key) {
	msg, bytes := &nodev1.TaskDelivered{}, 0
	flush := func() {
		if len(msg.GetTasks()) > 0 {
			_ = s.Redelivered(msg) // a session that cannot take them is replaced, and they are sent again with the next one
			msg, bytes = &nodev1.TaskDelivered{}, 0
		}
	}
	for _, key := range keys {
		entry, found, err := e.deps.Ledger.Get(key)
		if err != nil || !found {
			continue // its result will report the delivery
		}
		if len(msg.GetTasks()) == proofFrame || bytes > 0 && bytes+len(entry.Envelope) > proofBytes {
			flush()
		}
		bytes += len(entry.Envelope)
		msg.Tasks = append(msg.Tasks, &nodev1.TaskRef{TaskId: key.TaskID, Attempt: key.Attempt})
		msg.Signed = append(msg.Signed, signedOf(&entry))
	}
	flush()
}

func signedOf(entry *ledger.Entry) *nodev1.SignedTask {
	return &nodev1.SignedTask{Envelope: entry.Envelope, Signature: entry.Signature, KeyId: entry.KeyID}
}

// proofOf returns the envelope to send with a result: for a task from before the session, or one whose envelope the
// control plane asked for. Nil: none is needed, since the control plane dispatched the task in this session.
func (e *Executor) proofOf(entry *ledger.Entry) *nodev1.SignedTask {
	if len(entry.Envelope) == 0 {
		return nil
	}
	e.mu.Lock()
	needed := e.asked[entry.Key] || entry.DeliveredAt.Before(e.since)
	e.mu.Unlock()
	if !needed {
		return nil
	}
	return signedOf(entry)
}

// ReportRefused handles the control plane's refusal of reports. A report that can be proven is sent once more with its
// envelope. A refusal of that one, or of a report that cannot be proven, is final: the result stays in the ledger as
// evidence and is not sent again.
func (e *Executor) ReportRefused(ctx context.Context, msg *nodev1.TaskReportRefused) error {
	var final []ledger.Key
	for _, ref := range msg.GetTasks() {
		key := ledger.Key{TaskID: ref.GetTaskId(), Attempt: ref.GetAttempt()}
		entry, found, err := e.deps.Ledger.Get(key)
		if err != nil {
			return err
		}
		if !found || entry.State == ledger.StateAcked {
			continue
		}
		if msg.GetEnvelopeWanted() && len(entry.Envelope) > 0 && e.prove(&entry) {
			continue
		}
		refusal := fault.New(msg.GetDenial().GetReason(), msg.GetDenial().GetMessage())
		e.evidence(ctx, "report of a task was refused", key, entry.Envelope, entry.KeyID, refusal)
		if entry.State == ledger.StateFinished {
			final = append(final, key)
		}
	}
	if len(final) == 0 {
		return nil
	}
	return e.deps.Ledger.Ack(ctx, final...)
}

// prove sends the state of a task again, with its envelope. It returns false if that was done before in this session.
func (e *Executor) prove(entry *ledger.Entry) bool {
	var started *nodev1.TaskStarted
	e.mu.Lock()
	s, before := e.sender, e.asked[entry.Key]
	e.asked[entry.Key] = true
	if j := e.jobs[entry.Key]; j != nil && !j.started.IsZero() {
		started = j.startedMessage()
	}
	e.mu.Unlock()
	if before || s == nil {
		return !before
	}
	if entry.State == ledger.StateFinished {
		e.sendStored(s, *entry, time.Now())
		return true
	}
	e.redeliver(s, []ledger.Key{entry.Key})
	if started != nil {
		_ = s.Started(started) // its result reports the start as well
	}
	return true
}
