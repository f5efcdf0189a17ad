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
type Outbox struct {
	maxLen, maxBytes int
	linger           time.Duration // how long deliveries and starts wait for their results
	Wake             chan struct{} // holds one token while something waits

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

// New returns an outbox of at most maxLen frames of each kind, and of results of at most maxBytes, which lets deliveries
// and starts wait for their results for the time linger.
func New(maxLen, maxBytes int, linger time.Duration) *Outbox {
	return &Outbox{maxLen: maxLen, maxBytes: maxBytes, linger: linger, Wake: make(chan struct{}, 1)}
}

// lingerLocked lets deliveries or starts wait for their results, unless earlier ones are to be sent at once.
func (o *Outbox) lingerLocked(waits bool) {
	switch {
	case o.linger <= 0 || waits && o.ripeAt.IsZero(): // those queued before them are sent at once
		o.signal()
		return
	case waits:
		return // until those queued first are due
	}
	o.ripeAt = time.Now().Add(o.linger)
	if o.ripe == nil {
		o.ripe = time.AfterFunc(o.linger, o.Hurry)
		return
	}
	o.ripe.Reset(o.linger)
}

// Hurry ends the wait of deliveries and starts.
func (o *Outbox) Hurry() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ripeAt = time.Time{}
	if o.open && len(o.delivered)+len(o.started) > 0 {
		o.signal()
	}
}

// lingersLocked reports whether deliveries and starts still wait for their results.
func (o *Outbox) lingersLocked() bool { return !o.ripeAt.IsZero() && time.Now().Before(o.ripeAt) }

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

func (o *Outbox) signal() {
	select {
	case o.Wake <- struct{}{}:
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

// put runs add while a session is open and wakes the writer if it queued something.
func (o *Outbox) put(add func() error) error {
	return o.add(func() error {
		err := add()
		if err == nil {
			o.signal()
		}
		return err
	})
}

// add runs add while a session is open.
func (o *Outbox) add(add func() error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.open {
		return ErrNotConnected
	}
	return add()
}

// Delivered queues the report that tasks are durably in the ledger.
func (o *Outbox) Delivered(refs []*nodev1.TaskRef) error {
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
func (o *Outbox) Redelivered(msg *nodev1.TaskDelivered) error {
	return o.put(func() error {
		if len(o.redelivered) >= o.maxLen {
			return ErrQueueFull
		}
		o.redelivered = append(o.redelivered, msg)
		return nil
	})
}

// Started queues the start of a task.
func (o *Outbox) Started(msg *nodev1.TaskStarted) error {
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
func (o *Outbox) Progress(msg *nodev1.TaskProgress) error {
	return o.put(func() error {
		if o.progress == nil {
			o.progress = map[Key]*nodev1.TaskProgress{}
		}
		key := KeyOf(msg.GetTask())
		if _, waits := o.progress[key]; !waits && len(o.progress) >= o.maxLen {
			return ErrQueueFull
		}
		o.progress[key] = msg
		o.ripeAt = time.Time{} // behind its start
		return nil
	})
}

// Result queues the result of a task, and drops its progress and, while they linger, the delivery and the start that it
// implies.
func (o *Outbox) Result(msg *nodev1.TaskResult) error {
	return o.put(func() error {
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
		return nil
	})
}

// Observe queues an observation; only the last one of each workspace waits.
func (o *Outbox) Observe(msg *nodev1.Observation) error {
	return o.put(func() error {
		if o.seen == nil {
			o.seen = map[string]*nodev1.Observation{}
		}
		if _, waits := o.seen[msg.GetWorkspaceId()]; !waits && len(o.seen) >= o.maxLen {
			return ErrQueueFull
		}
		o.seen[msg.GetWorkspaceId()] = msg
		return nil
	})
}

// Diagnose queues a diagnostic.
func (o *Outbox) Diagnose(msg *nodev1.DiagnosticReport) error {
	return o.put(func() error {
		if len(o.diagnostics) >= 16 {
			return ErrQueueFull
		}
		o.diagnostics = append(o.diagnostics, msg)
		return nil
	})
}

// Output queues a piece of a workload's output. At most four may wait: for each a caller waits, and not for long.
func (o *Outbox) Output(msg *nodev1.OutputChunk) error {
	return o.put(func() error {
		if len(o.outputs) >= 4 {
			return ErrQueueFull
		}
		o.outputs = append(o.outputs, msg)
		return nil
	})
}

// Request queues a frame of the session itself, before everything else.
func (o *Outbox) Request(frame *nodev1.ConnectRequest) error {
	return o.put(func() error {
		if len(o.control) >= 16 {
			return ErrQueueFull
		}
		o.control = append(o.control, frame)
		return nil
	})
}

// Next removes and returns the frame to send next; nil if none is due.
func (o *Outbox) Next() *nodev1.ConnectRequest {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case len(o.control) > 0:
		frame := o.control[0]
		o.control = o.control[1:]
		return frame
	case len(o.redelivered) > 0:
		msg := o.redelivered[0]
		o.redelivered[0] = nil
		if o.redelivered = o.redelivered[1:]; len(o.redelivered) == 0 {
			o.redelivered = nil
		}
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskDelivered{TaskDelivered: msg}}
	case len(o.delivered) > 0 && !o.lingersLocked():
		n := min(len(o.delivered), maxRefs)
		batch := o.delivered[:n:n]
		if o.delivered = o.delivered[n:]; len(o.delivered) == 0 {
			o.delivered = nil
		}
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskDelivered{TaskDelivered: &nodev1.TaskDelivered{Tasks: batch}}}
	case len(o.results) > 0:
		msg := o.results[0]
		if started := o.startOfLocked(msg.GetTask()); started != nil {
			return started
		}
		o.results[0] = nil
		if o.results = o.results[1:]; len(o.results) == 0 {
			o.results = nil
		}
		key := KeyOf(msg.GetTask())
		o.resultBytes -= o.resultAt[key]
		delete(o.resultAt, key)
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskResult{TaskResult: msg}}
	case len(o.started) > 0 && !o.lingersLocked():
		msg := o.started[0]
		o.started = o.started[1:]
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskStarted{TaskStarted: msg}}
	}
	return o.nextNewsLocked()
}

// absorbLocked drops the delivery and the start that a result implies. A result without the time of its start is sent
// behind its delivery.
func (o *Outbox) absorbLocked(result *nodev1.TaskResult) {
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
		msg := o.diagnostics[0]
		o.diagnostics = o.diagnostics[1:]
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Diagnostic{Diagnostic: msg}}
	}
	if len(o.outputs) > 0 {
		msg := o.outputs[0]
		o.outputs = o.outputs[1:]
		return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_OutputChunk{OutputChunk: msg}}
	}
	return nil
}
