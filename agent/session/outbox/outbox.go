package outbox

import (
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// ErrNotConnected is returned while no session is admitted. Unacknowledged reports are sent again once one is.
var ErrNotConnected = errors.New("no session is admitted")

// ErrQueueFull is returned when a bounded queue has no room. Results are sent again later; later frames make up for the
// loss of others.
var ErrQueueFull = errors.New("the session's queue is full")

const maxRefs = 256 // of one TaskDelivered frame

// Key names an attempt of a task.
type Key struct {
	task    string
	attempt int32
}

// KeyOf returns the key of a reference.
func KeyOf(ref *nodev1.TaskRef) Key { return Key{ref.GetTaskId(), ref.GetAttempt()} }

// Outbox is the one queue of frames to send. Deliveries leave first, many in one small frame, so that a result never
// overtakes the delivery of its task; then results, for which callers wait, each right behind its own start, so that
// the control plane stores the three in one commit; then the rest.
//
// Deliveries and starts linger: a result with the time of its start implies both, and a short task is then one frame,
// not three.
type Outbox struct{ *Reports }

// Reports is the end of an outbox at which an agent's reports are queued. Its methods do not block: ErrNotConnected and
// ErrQueueFull mean that the report was not queued.
type Reports struct {
	maxLen, maxBytes int
	linger           time.Duration // how long deliveries and starts wait for their results
	wake             chan struct{} // holds one token while something waits

	mu          sync.Mutex
	open        bool
	ripe        *time.Timer // wakes the writer when lingering frames are due; nil: no frame has lingered yet
	ripeAt      time.Time   // when they are due; zero: they are sent at once
	control     []*nodev1.ConnectRequest
	redelivered []*nodev1.TaskDelivered
	delivered   []*nodev1.TaskRef
	results     []*nodev1.TaskResult
	resultAt    map[Key]int
	resultBytes int
	started     []*nodev1.TaskStarted
	progress    map[Key]*nodev1.TaskProgress
	seen        map[string]*nodev1.Observation
	diagnostics []*nodev1.DiagnosticReport
	outputs     []*nodev1.OutputChunk
}

// New returns an outbox of at most maxLen frames of each kind, and of results of at most maxBytes, which lets
// deliveries and starts wait for their results for the time linger.
func New(maxLen, maxBytes int, linger time.Duration) *Outbox {
	return &Outbox{&Reports{maxLen: maxLen, maxBytes: maxBytes, linger: linger, wake: make(chan struct{}, 1)}}
}

// Wake returns a channel that holds one token while something waits.
func (o *Outbox) Wake() <-chan struct{} { return o.wake }

// lingerLocked lets deliveries or starts wait for their results, unless earlier ones are to be sent at once.
func (o *Reports) lingerLocked(waits bool) {
	switch {
	case o.linger <= 0 || waits && o.ripeAt.IsZero(): // those queued before them are sent at once
		o.signal()
		return
	case waits:
		return // until those queued first are due
	}
	o.ripeAt = time.Now().Add(o.linger)
	if o.ripe == nil {
		o.ripe = time.AfterFunc(o.linger, o.Flush)
		return
	}
	o.ripe.Reset(o.linger)
}

// Flush ends the wait of deliveries and starts for their results.
func (o *Reports) Flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ripeAt = time.Time{}
	if o.open && len(o.delivered)+len(o.started) > 0 {
		o.signal()
	}
}

// lingersLocked reports whether deliveries and starts still wait for their results.
func (o *Reports) lingersLocked() bool { return !o.ripeAt.IsZero() && time.Now().Before(o.ripeAt) }

// SetOpen sets whether a session is admitted. Closing drops the queued frames: the executor queues them anew from the
// ledger for a later session.
func (o *Outbox) SetOpen(open bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open = open
	if open {
		o.signal()
		return
	}
	o.redelivered = nil
	o.control, o.delivered, o.results, o.resultAt, o.resultBytes = nil, nil, nil, nil, 0
	o.started, o.progress, o.seen, o.diagnostics, o.outputs = nil, nil, nil, nil, nil
}

func (o *Reports) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Kick wakes the writer if anything waits.
func (o *Outbox) Kick() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.open {
		o.signal()
	}
}

// add runs add, which wakes the writer, while a session is open.
func (o *Reports) add(add func() error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.open {
		return ErrNotConnected
	}
	return add()
}

// queue appends a message to a queue of o in which at most so many may wait.
func queue[T any](o *Reports, to *[]T, msg T, most int) error {
	return o.add(func() error {
		if len(*to) >= most {
			return ErrQueueFull
		}
		*to = append(*to, msg)
		o.signal()
		return nil
	})
}

// pop removes and returns the first element. The memory of a queue that is empty then is given up.
func pop[T any](from *[]T) T {
	var none T
	first := (*from)[0]
	(*from)[0] = none
	if *from = (*from)[1:]; len(*from) == 0 {
		*from = nil
	}
	return first
}

// Delivered queues the report that tasks are durably in the ledger.
func (o *Reports) Delivered(refs []*nodev1.TaskRef) error {
	return o.add(func() error {
		if len(o.delivered)+len(refs) > 4*o.maxLen {
			return ErrQueueFull
		}
		o.lingerLocked(len(o.delivered)+len(o.started) > 0)
		o.delivered = append(o.delivered, refs...)
		return nil
	})
}

// Redelivered queues the report of tasks that were in the ledger before this session, with their envelopes.
func (o *Reports) Redelivered(msg *nodev1.TaskDelivered) error {
	return queue(o, &o.redelivered, msg, o.maxLen)
}

// Started queues the start of a task.
func (o *Reports) Started(msg *nodev1.TaskStarted) error {
	return o.add(func() error {
		if len(o.started) >= o.maxLen {
			return ErrQueueFull
		}
		o.lingerLocked(len(o.delivered)+len(o.started) > 0)
		o.started = append(o.started, msg)
		return nil
	})
}

// Progress queues a task's progress; only the last update of each task waits.
func (o *Reports) Progress(msg *nodev1.TaskProgress) error {
	return o.add(func() error {
		if o.progress == nil {
			o.progress = map[Key]*nodev1.TaskProgress{}
		}
		key := KeyOf(msg.GetTask())
		if _, waits := o.progress[key]; !waits && len(o.progress) >= o.maxLen {
			return ErrQueueFull
		}
		o.progress[key] = msg
		o.ripeAt = time.Time{} // behind its start
		o.signal()
		return nil
	})
}

// Result queues the result of a task, and drops its progress and, while they linger, the delivery and the start that it
// implies.
func (o *Reports) Result(msg *nodev1.TaskResult) error {
	return o.add(func() error {
		key := KeyOf(msg.GetTask())
		if _, waits := o.resultAt[key]; waits {
			return nil
		}
		size := proto.Size(msg)
		if len(o.results) >= o.maxLen || (o.resultBytes > 0 && o.resultBytes+size > o.maxBytes) {
			return ErrQueueFull
		}
		if o.resultAt == nil {
			o.resultAt = map[Key]int{}
		}
		o.resultAt[key] = size
		o.results = append(o.results, msg)
		o.resultBytes += size
		delete(o.progress, key)
		o.absorbLocked(msg)
		o.signal()
		return nil
	})
}

// Observe queues an observation; only the last one of each workspace waits.
func (o *Reports) Observe(msg *nodev1.Observation) error {
	return o.add(func() error {
		if o.seen == nil {
			o.seen = map[string]*nodev1.Observation{}
		}
		if _, waits := o.seen[msg.GetWorkspaceId()]; !waits && len(o.seen) >= o.maxLen {
			return ErrQueueFull
		}
		o.seen[msg.GetWorkspaceId()] = msg
		o.signal()
		return nil
	})
}

// Diagnose queues a diagnostic.
func (o *Reports) Diagnose(msg *nodev1.DiagnosticReport) error {
	return queue(o, &o.diagnostics, msg, 16)
}

// AnswerProfile queues the reply to an offered profile.
func (o *Reports) AnswerProfile(msg *nodev1.ProfileAnswer) error {
	frame := &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_ProfileAnswer{ProfileAnswer: msg}}
	return queue(o, &o.control, frame, 16)
}

// Output queues a piece of a workload's output. At most four may wait: for each a caller waits, and not for long.
func (o *Reports) Output(msg *nodev1.OutputChunk) error { return queue(o, &o.outputs, msg, 4) }

// Request queues a frame of the session itself, before everything else.
func (o *Outbox) Request(frame *nodev1.ConnectRequest) error {
	return queue(o.Reports, &o.control, frame, 16)
}

// Next removes and returns the frame to send next; nil if none is due.
func (o *Outbox) Next() *nodev1.ConnectRequest {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case len(o.control) > 0:
		return pop(&o.control)
	case len(o.redelivered) > 0:
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskDelivered{TaskDelivered: pop(&o.redelivered)}}
	case len(o.delivered) > 0 && !o.lingersLocked():
		n := min(len(o.delivered), maxRefs)
		batch := o.delivered[:n:n]
		if o.delivered = o.delivered[n:]; len(o.delivered) == 0 {
			o.delivered = nil
		}
		return &nodev1.ConnectRequest{
			Frame: &nodev1.ConnectRequest_TaskDelivered{TaskDelivered: &nodev1.TaskDelivered{Tasks: batch}},
		}
	case len(o.results) > 0:
		msg := o.results[0]
		if started := o.startOfLocked(msg.GetTask()); started != nil {
			return started
		}
		pop(&o.results)
		key := KeyOf(msg.GetTask())
		o.resultBytes -= o.resultAt[key]
		delete(o.resultAt, key)
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskResult{TaskResult: msg}}
	case len(o.started) > 0 && !o.lingersLocked():
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskStarted{TaskStarted: pop(&o.started)}}
	}
	return o.nextNewsLocked()
}

// absorbLocked drops the delivery and the start that a result implies. A result without the time of its start is sent
// behind its delivery.
func (o *Reports) absorbLocked(result *nodev1.TaskResult) {
	if !o.lingersLocked() {
		return
	}
	if result.GetStartedAt() == nil {
		o.ripeAt = time.Time{}
		return
	}
	key := KeyOf(result.GetTask())
	o.delivered = slices.DeleteFunc(o.delivered, func(ref *nodev1.TaskRef) bool { return KeyOf(ref) == key })
	o.started = slices.DeleteFunc(o.started, func(msg *nodev1.TaskStarted) bool { return KeyOf(msg.GetTask()) == key })
}

// startOfLocked removes and returns the waiting start of a result's task, nil if there is none: it is sent before the
// result, and both are committed together.
func (o *Outbox) startOfLocked(ref *nodev1.TaskRef) *nodev1.ConnectRequest {
	for i, msg := range o.started {
		if KeyOf(msg.GetTask()) == KeyOf(ref) {
			o.started = append(o.started[:i:i], o.started[i+1:]...)
			return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskStarted{TaskStarted: msg}}
		}
	}
	return nil
}

// nextNewsLocked removes and returns a frame that may be late, since only the last one of each task or workspace
// counts.
func (o *Outbox) nextNewsLocked() *nodev1.ConnectRequest {
	for key, msg := range o.progress {
		delete(o.progress, key)
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskProgress{TaskProgress: msg}}
	}
	for key, msg := range o.seen {
		delete(o.seen, key)
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Observation{Observation: msg}}
	}
	if len(o.diagnostics) > 0 {
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Diagnostic{Diagnostic: pop(&o.diagnostics)}}
	}
	if len(o.outputs) > 0 {
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_OutputChunk{OutputChunk: pop(&o.outputs)}}
	}
	return nil
}
