package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/agent/ledger"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
)

// Config bounds the executor. Zero values take the defaults named here.
type Config struct {
	NodeID string

	// Queue is how many tasks may be accepted and unfinished; one more is dropped without an answer and counted, and the
	// control plane offers it again later. Default 256.
	Queue int
	// Concurrency is how many tasks of a type run at once; DefaultConcurrency (4) for types it does not name.
	Concurrency        map[commonv1.TaskType]int
	DefaultConcurrency int
	// MaxRun ends a handler that does not end. Default 30 minutes.
	MaxRun time.Duration
	// ObserveFor is how long the observation of a task may go on after the task was cancelled. Default 20 s. No run
	// waits for it: one that is cancelled while it waits for its tasks undoes its steps at once. But the tasks of the
	// undo, which are a later operation of the workspace, wait here until the observation has ended, and can start only
	// within a minute after they were queued.
	ObserveFor time.Duration
	// ResendAfter is when a result without acknowledgement is sent again in the same session. Default 15 s.
	ResendAfter time.Duration
	// Skew is how far the agent's estimate of server time may be behind not_before. Default 5 s.
	Skew time.Duration
}

var defaults = Config{
	Queue: 256, DefaultConcurrency: 4, MaxRun: 30 * time.Minute, ObserveFor: 20 * time.Second,
	ResendAfter: 15 * time.Second, Skew: 5 * time.Second,
}

// Deps are what an Executor needs.
type Deps struct {
	Logger    *slog.Logger
	Ledger    *ledger.Ledger
	Verifiers func() *envelope.VerifierSet
	// ServerNow returns server time, extrapolated by the monotonic clock. It returns false until a server has sent its
	// time: until then no new task starts.
	ServerNow func() (time.Time, bool)
	// Listed reports whether the control plane has listed what may run on this node since the agent started. Until then no
	// task that was in the ledger before is begun, observed or run again: the node may have been replaced or fenced
	// meanwhile. Wake has Run ask again. Nil: nothing is waited for.
	Listed   func() bool
	Handlers map[commonv1.TaskType]Handler
	// Refused is called with each offer that was refused, as evidence. Nil: refusals are only logged.
	Refused func(Refusal)
}

// Refusal is the evidence of an offer that was refused. The ids are those in the envelope, and to be believed only if
// the signature was good.
type Refusal struct {
	Reason         commonv1.Reason
	Detail         string
	TaskID         string
	Attempt        int32
	KeyID          string
	EnvelopeSHA256 string
	At             time.Time // the host's clock
}

// counters count since the executor was made.
type counters struct{ delivered, refused, busy, panics atomic.Int64 }

// Executor takes offers, runs their tasks and sends the results. It is safe for concurrent use. It does nothing unless
// Run is running.
type Executor struct {
	cfg    Config
	deps   Deps
	intake chan item
	kick   chan struct{} // wakes Run

	prestart prestartCancels // Run's alone
	stats    counters

	mu         sync.Mutex // guards what follows
	sender     Sender
	jobs       map[ledger.Key]*job
	waiting    map[commonv1.TaskType][]*job
	running    map[commonv1.TaskType]int
	operations map[string]*runningOperation // by workspace
	sent       map[ledger.Key]time.Time
	since      time.Time           // when the sender was attached
	asked      map[ledger.Key]bool // whose envelope the control plane has asked for in this session
	parked     []*job              // are to be started again: their start could not be stored
	unkept     []unkept            // have a result that could not be stored
	logged     time.Time           // when such a failure was last logged
	resend     *time.Timer         // wakes Run while an attempt has no acknowledged result; nil before Run
	armed      bool                // it runs

	handlers sync.WaitGroup // goroutines of handlers; Run waits for them
}

// item is an offer or a cancel that waits in the intake, in the order of arrival.
type item struct {
	offer  *nodev1.TaskOffer
	cancel *nodev1.TaskCancel
}

// unkept is a result that is not on disk yet, and so not sent.
type unkept struct {
	job *job
	msg *nodev1.TaskResult
}

// job is an accepted task without a result on disk.
type job struct {
	task    Task
	key     ledger.Key
	started time.Time // zero: not started
	observe bool      // it had started before the agent's restart
	cancel  context.CancelCauseFunc
	dropped string // why a cancel came before the start
	gone    bool   // a cancel took it out of the queue
}

const droppedCancel = "cancelled"

var (
	errCancelled = errors.New("the control plane cancelled the task")
	errMaxRun    = errors.New("the task ran longer than the agent lets it")
	// errNotObserved is an ErrUnknown: nothing was found out.
	errNotObserved = fmt.Errorf("the task was cancelled and its observation did not end: %w", ErrUnknown)
)

// New checks deps and cfg and returns an Executor. It reads nothing and starts nothing.
func New(deps Deps, cfg Config) (*Executor, error) {
	cfg = config.Or(cfg, defaults)
	var problems []error
	if cfg.NodeID == "" {
		problems = append(problems, errors.New("no node id"))
	}
	if deps.Logger == nil || deps.Ledger == nil || deps.Verifiers == nil || deps.ServerNow == nil {
		problems = append(problems, errors.New("logger, ledger, verifiers or server clock is missing"))
	}
	for kind, h := range deps.Handlers {
		if h == nil {
			problems = append(problems, fmt.Errorf("handler of %s is nil", kind))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("make task executor: %w", err)
	}
	return &Executor{
		cfg:        cfg,
		deps:       deps,
		intake:     make(chan item, cfg.Queue),
		kick:       make(chan struct{}, 1),
		jobs:       map[ledger.Key]*job{},
		waiting:    map[commonv1.TaskType][]*job{},
		running:    map[commonv1.TaskType]int{},
		operations: map[string]*runningOperation{},
		sent:       map[ledger.Key]time.Time{},
		asked:      map[ledger.Key]bool{},
	}, nil
}

// Types returns the types of tasks that this agent can run, sorted, for Hello.
func (e *Executor) Types() []commonv1.TaskType {
	return slices.Sorted(maps.Keys(e.deps.Handlers))
}

// InFlight returns the attempts without an acknowledged result, at most 4096, for Hello.
func (e *Executor) InFlight() []*commonv1.TaskInFlight { return e.deps.Ledger.InFlight(4096) }

// Offer queues an offer. It never blocks; the fault agent_busy means that the offer was dropped and is to be made
// again.
func (e *Executor) Offer(offer *nodev1.TaskOffer) error {
	select {
	case e.intake <- item{offer: offer}:
		return nil
	default:
		e.stats.busy.Add(1)
		return fault.New(commonv1.Reason_REASON_AGENT_BUSY, "")
	}
}

// Cancel queues a request to stop tasks. An offer that came before it is handled first. It never blocks; the fault
// agent_busy means that the request was dropped.
func (e *Executor) Cancel(msg *nodev1.TaskCancel) error {
	select {
	case e.intake <- item{cancel: msg}:
		return nil
	default:
		return fault.New(commonv1.Reason_REASON_AGENT_BUSY, "")
	}
}

// Ack notes that these results are committed: they are not sent again.
func (e *Executor) Ack(ctx context.Context, refs []*nodev1.TaskRef) error {
	keys := make([]ledger.Key, 0, len(refs))
	for _, ref := range refs {
		keys = append(keys, ledger.Key{TaskID: ref.GetTaskId(), Attempt: ref.GetAttempt()})
	}
	e.mu.Lock()
	for _, key := range keys {
		delete(e.sent, key)
		delete(e.asked, key)
	}
	e.mu.Unlock()
	err := e.deps.Ledger.Ack(ctx, keys...)
	e.schedule()
	return err
}

// Attach makes s the sender, after its session was admitted, and sends again what the control plane may not have:
// deliveries, starts, and every result that is not acknowledged. They carry the envelopes of their tasks, since a
// database that was restored from a backup meanwhile has lost the record that it dispatched them.
func (e *Executor) Attach(s Sender) {
	e.mu.Lock()
	e.sender = s
	clear(e.sent)
	clear(e.asked)
	e.since = time.Now()
	var delivered []ledger.Key
	var started []*nodev1.TaskStarted
	for _, j := range e.jobs {
		delivered = append(delivered, j.key)
		if !j.started.IsZero() {
			started = append(started, j.startedMessage())
		}
	}
	e.mu.Unlock()
	e.redeliver(s, delivered)
	for _, msg := range started {
		_ = s.Started(msg)
	}
	e.Wake()
}

// Wake has Run start the waiting tasks that may start. It never blocks.
func (e *Executor) Wake() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// Detach removes s if it is still the sender. Tasks go on; their results wait.
func (e *Executor) Detach(s Sender) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sender == s {
		e.sender = nil
	}
}

const (
	resendEvery = time.Second // and writes that the ledger could not store are tried again
	logEvery    = 30 * time.Second
	pruneEvery  = 10 * time.Minute
	pruneBatch  = 1000
)

// Run resumes the unfinished tasks of the ledger, once the control plane has listed what may run here, and takes offers
// until ctx ends. Then it cancels the contexts of the handlers and waits for them; a task that was interrupted so keeps
// its started mark, and the next Run observes it.
func (e *Executor) Run(ctx context.Context) error {
	defer e.handlers.Wait()
	e.resume(ctx)
	resend, prune := time.NewTimer(resendEvery), time.NewTicker(pruneEvery)
	defer resend.Stop()
	defer prune.Stop()
	e.mu.Lock()
	e.resend, e.armed = resend, true
	e.mu.Unlock()
	for {
		e.schedule()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case first := <-e.intake:
			e.take(ctx, e.gather(first))
		case <-e.kick:
			e.resendOnce(time.Now())
			e.dispatch(ctx)
		case <-resend.C:
			e.mu.Lock()
			e.armed = false
			e.mu.Unlock()
			e.retry(ctx)
			e.resendOnce(time.Now())
			e.dispatch(ctx)
		case <-prune.C:
			e.prune(ctx)
		}
	}
}

// schedule starts the resend timer, after which Run stores, starts and sends again, if an attempt has no acknowledged
// result, and stops the timer if none has. Only Run adds attempts, and it calls schedule after each.
func (e *Executor) schedule() {
	e.mu.Lock()
	defer e.mu.Unlock()
	waits := len(e.jobs) > 0 || e.deps.Ledger.Open() > 0
	switch {
	case e.resend == nil || waits == e.armed:
	case waits:
		e.resend.Reset(resendEvery)
		e.armed = true
	default:
		e.resend.Stop()
		e.armed = false
	}
}

func (e *Executor) prune(ctx context.Context) {
	now, ok := e.deps.ServerNow()
	if !ok {
		return
	}
	if _, err := e.deps.Ledger.Prune(ctx, now, pruneBatch); err != nil && ctx.Err() == nil {
		e.deps.Logger.WarnContext(ctx, "task ledger was not pruned", slog.Any("error", err))
	}
}

// resendOnce sends each result that was not sent in this session, or was last sent ResendAfter ago or more. It stops at
// the first one that the session cannot take.
func (e *Executor) resendOnce(now time.Time) {
	s := e.attached()
	if s == nil {
		return
	}
	for _, entry := range e.deps.Ledger.Unacked() {
		e.mu.Lock()
		last, ok := e.sent[entry.Key]
		e.mu.Unlock()
		if ok && now.Sub(last) < e.cfg.ResendAfter {
			continue
		}
		if !e.sendStored(s, entry, now) {
			return
		}
	}
}

// limit returns how many tasks of a kind run at once.
func (e *Executor) limit(kind commonv1.TaskType) int {
	if n := e.cfg.Concurrency[kind]; n > 0 {
		return n
	}
	return e.cfg.DefaultConcurrency
}
