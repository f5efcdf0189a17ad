package task_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	noop       = commonv1.TaskType_TASK_TYPE_PROBE_NOOP
	deploy     = commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY
	restart    = commonv1.TaskType_TASK_TYPE_WORKLOAD_RESTART
	succeeded  = commonv1.TaskState_TASK_STATE_SUCCEEDED
	failed     = commonv1.TaskState_TASK_STATE_FAILED
	cancelled  = commonv1.TaskState_TASK_STATE_CANCELLED
	superseded = commonv1.TaskState_TASK_STATE_SUPERSEDED
	unknown    = commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN
)

func newKey(t *testing.T) envelope.Key {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return envelope.NewKey(private)
}

// sink is a Sender that remembers the messages.
type sink struct {
	mu        sync.Mutex
	delivered []string
	started   []string
	progress  []string
	results   map[string][]*nodev1.TaskResult
	signed    map[string]*nodev1.SignedTask // of deliveries from before the session
	flushed   []string                      // deliveries and starts that had come by each Flush
	refuse    bool
	onDeliver func(id string)
}

func newSink() *sink {
	return &sink{results: map[string][]*nodev1.TaskResult{}, signed: map[string]*nodev1.SignedTask{}}
}

var errFull = errors.New("full")

func (s *sink) Delivered(refs []*nodev1.TaskRef) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range refs {
		if s.onDeliver != nil {
			s.onDeliver(r.GetTaskId())
		}
		s.delivered = append(s.delivered, r.GetTaskId())
	}
	return nil
}

func (s *sink) Redelivered(m *nodev1.TaskDelivered) error {
	if err := s.Delivered(m.GetTasks()); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, signed := range m.GetSigned() {
		s.signed[m.GetTasks()[i].GetTaskId()] = signed
	}
	return nil
}

func (s *sink) Started(m *nodev1.TaskStarted) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = append(s.started, m.GetTask().GetTaskId())
	return nil
}

func (s *sink) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flushed = append(s.flushed, fmt.Sprintf("%d delivered, %d started", len(s.delivered), len(s.started)))
}

func (s *sink) Progress(m *nodev1.TaskProgress) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress = append(s.progress, m.GetNote())
	return nil
}

func (s *sink) Result(m *nodev1.TaskResult) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse {
		return errFull
	}
	s.results[m.GetTask().GetTaskId()] = append(s.results[m.GetTask().GetTaskId()], m)
	return nil
}

func (s *sink) times(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.results[id])
}

func (s *sink) has(list *[]string, id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(*list, id)
}

// bench has one agent's executor over one ledger file, which can be restarted.
type bench struct {
	t        *testing.T
	path     string
	node     string
	key      envelope.Key
	trusted  []ed25519.PublicKey
	handlers map[commonv1.TaskType]task.Handler
	cfg      task.Config
	refused  []task.Refusal
	full     atomic.Bool // the disk of the ledger is
	listed   func() bool

	led  *ledger.Ledger
	exec *task.Executor
	sink *sink
	stop func()
}

func newBench(t *testing.T, handlers map[commonv1.TaskType]task.Handler) *bench {
	t.Helper()
	testkit.IO(t)
	b := &bench{t: t, path: filepath.Join(t.TempDir(), "ledger"), node: ids.New(), key: newKey(t), handlers: handlers}
	b.trusted = []ed25519.PublicKey{b.key.Public()}
	return b
}

// run opens the ledger and starts an executor with a new sink. b.full stays as it was set before.
func (b *bench) run() {
	b.t.Helper()
	var err error
	diskFull := func() error {
		if b.full.Load() {
			return syscall.ENOSPC
		}
		return nil
	}
	if b.led, err = ledger.Open(ledger.Config{Path: b.path, BeforeCommit: diskFull}); err != nil {
		b.t.Fatal(err)
	}
	set, err := envelope.NewVerifierSet(b.trusted...)
	if err != nil {
		b.t.Fatal(err)
	}
	b.cfg.NodeID = b.node
	var mu sync.Mutex
	b.exec, err = task.New(task.Deps{
		Logger: testkit.Logger(b.t), Ledger: b.led, Verifiers: func() *envelope.VerifierSet { return set },
		ServerNow: func() (time.Time, bool) { return time.Now(), true }, Listed: b.listed, Handlers: b.handlers,
		Refused: func(r task.Refusal) { mu.Lock(); defer mu.Unlock(); b.refused = append(b.refused, r) },
	}, b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.sink = newSink()
	b.exec.Attach(b.sink)
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = b.exec.Run(ctx) }()
	b.stop = sync.OnceFunc(func() {
		cancel()
		<-done
		if err := b.led.Close(); err != nil {
			b.t.Error(err)
		}
	})
	b.t.Cleanup(b.stop)
}

func (b *bench) task(kind commonv1.TaskType, payload proto.Message) envelope.Task {
	data, err := proto.Marshal(payload)
	if err != nil {
		b.t.Fatal(err)
	}
	return envelope.Task{
		TaskID: ids.New(), Type: names.Of(kind), NodeID: b.node, WorkspaceID: "01970000-0000-7000-8000-00000000000a",
		Epoch: 1, OpSeq: 1, NotBefore: time.Now().Add(-time.Second), ExpiresAt: time.Now().Add(time.Minute), Attempt: 1,
		Payload: data,
	}
}

func (b *bench) sign(t envelope.Task) *nodev1.TaskOffer {
	b.t.Helper()
	signed, err := envelope.Sign(b.key, t)
	if err != nil {
		b.t.Fatal(err)
	}
	return &nodev1.TaskOffer{
		Envelope: signed.Bytes, Signature: signed.Signature, KeyId: signed.KeyID, CorrelationId: "c",
		WorkflowId: "w",
	}
}

func (b *bench) offer(t envelope.Task) {
	b.t.Helper()
	if err := b.exec.Offer(b.sign(t)); err != nil {
		b.t.Fatal(err)
	}
}

// result waits for the n-th result of a task.
func (b *bench) result(id string, n int) *nodev1.TaskResult {
	b.t.Helper()
	testkit.Eventually(b.t, testkit.Patience, func() error {
		if b.sink.times(id) < n {
			return fmt.Errorf("task %s has %d results", id, b.sink.times(id))
		}
		return nil
	})
	b.sink.mu.Lock()
	defer b.sink.mu.Unlock()
	return b.sink.results[id][n-1]
}

func (b *bench) want(id string, state commonv1.TaskState, reason commonv1.Reason) *nodev1.TaskResult {
	b.t.Helper()
	r := b.result(id, 1)
	if r.GetState() != state || r.GetReason() != reason {
		b.t.Errorf("result %v, want %v %v", r, state, reason)
	}
	return r
}

func ours() map[commonv1.TaskType]task.Handler {
	return task.Handlers(task.HandlerDeps{BootID: "boot"})
}

func ack(t *testing.T, b *bench, id string) {
	t.Helper()
	if err := b.exec.Ack(t.Context(), []*nodev1.TaskRef{{TaskId: id, Attempt: 1}}); err != nil {
		t.Fatal(err)
	}
}

func TestNoopEndToEnd(t *testing.T) {
	b := newBench(t, nil)
	b.handlers = ours()
	b.run()
	tk := b.task(noop, &nodev1.ProbeNoop{Nonce: "n1"})
	// A delivery is on disk before it is reported.
	b.sink.onDeliver = func(id string) {
		if _, ok, err := b.led.Get(ledger.Key{TaskID: id, Attempt: 1}); !ok || err != nil {
			t.Errorf("delivered before it was stored (%v)", err)
		}
	}
	b.offer(tk)
	r := b.want(tk.TaskID, succeeded, 0)
	var out nodev1.ProbeNoopOutput
	if err := proto.Unmarshal(r.GetOutput(), &out); err != nil || out.GetNonce() != "n1" || out.GetBootId() != "boot" {
		t.Errorf("output %v, %v", &out, err)
	}
	if !b.sink.has(&b.sink.delivered, tk.TaskID) || !b.sink.has(&b.sink.started, tk.TaskID) {
		t.Error("delivered or started was not said")
	}
	// Scenario: lost-result. The same offer gets the same result, and the handler does not run again.
	b.offer(tk)
	again := b.result(tk.TaskID, 2)
	if !proto.Equal(r, again) {
		t.Errorf("redelivered: %v, first %v", again, r)
	}
	ack(t, b, tk.TaskID)
	if got := b.exec.InFlight(); len(got) != 0 {
		t.Errorf("in flight after the ack: %v", got)
	}
}

func TestRefusals(t *testing.T) {
	b := newBench(t, nil)
	b.handlers = ours()
	b.run()
	stranger := newKey(t)
	good := b.task(noop, &nodev1.ProbeNoop{})
	tests := []struct {
		name   string
		offer  func(t envelope.Task) *nodev1.TaskOffer
		reason commonv1.Reason
		silent bool // no result: the ids of the task are not known
	}{
		{"forged by a stranger's key", func(tk envelope.Task) *nodev1.TaskOffer {
			s, _ := envelope.Sign(stranger, tk)
			return &nodev1.TaskOffer{Envelope: s.Bytes, Signature: s.Signature, KeyId: s.KeyID}
		}, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		{"a stranger's key under our name", func(tk envelope.Task) *nodev1.TaskOffer {
			s, _ := envelope.Sign(stranger, tk)
			return &nodev1.TaskOffer{Envelope: s.Bytes, Signature: s.Signature, KeyId: b.key.ID()}
		}, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		{"signature stripped", func(tk envelope.Task) *nodev1.TaskOffer {
			o := b.sign(tk)
			o.Signature = nil
			return o
		}, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		{"signature cut", func(tk envelope.Task) *nodev1.TaskOffer {
			o := b.sign(tk)
			o.Signature = o.GetSignature()[:32]
			return o
		}, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		{"payload changed", func(tk envelope.Task) *nodev1.TaskOffer {
			o := b.sign(tk)
			other := tk
			other.Payload = []byte{0x0a, 1, 'x'}
			o.Envelope = b.sign(other).GetEnvelope()
			return o
		}, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		{"noise", func(envelope.Task) *nodev1.TaskOffer {
			return &nodev1.TaskOffer{Envelope: []byte("noise"), Signature: make([]byte, 64), KeyId: b.key.ID()}
		}, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, true},
		{"another node's", func(tk envelope.Task) *nodev1.TaskOffer {
			tk.NodeID = ids.New()
			return b.sign(tk)
		}, commonv1.Reason_REASON_TASK_WRONG_NODE, false},
		{"too late", func(tk envelope.Task) *nodev1.TaskOffer {
			tk.NotBefore, tk.ExpiresAt = time.Now().Add(-time.Hour), time.Now().Add(-time.Minute)
			return b.sign(tk)
		}, commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW, false},
		{"too early", func(tk envelope.Task) *nodev1.TaskOffer {
			tk.NotBefore, tk.ExpiresAt = time.Now().Add(time.Minute), time.Now().Add(time.Hour)
			return b.sign(tk)
		}, commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW, false},
		{"unknown type", func(tk envelope.Task) *nodev1.TaskOffer {
			tk.Type = "node.explode"
			return b.sign(tk)
		}, commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED, false},
		{"type without a handler", func(tk envelope.Task) *nodev1.TaskOffer {
			tk.Type = "terminal.open"
			return b.sign(tk)
		}, commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED, false},
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tk := good
			tk.TaskID = ids.New()
			if err := b.exec.Offer(tt.offer(tk)); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, testkit.Patience, func() error {
				if b.exec.Stats().Refused < int64(i+1) {
					return errors.New("not refused")
				}
				return nil
			})
			if !tt.silent {
				if r := b.result(tk.TaskID, 1); r.GetState() != failed || r.GetReason() != tt.reason {
					t.Errorf("result %v", r)
				}
			}
			if _, known, err := b.led.Get(ledger.Key{TaskID: tk.TaskID, Attempt: 1}); known || err != nil {
				t.Errorf("the ledger knows a refused task (%v)", err)
			}
			if b.sink.has(&b.sink.delivered, tk.TaskID) {
				t.Error("a refused task was acknowledged")
			}
		})
	}
	b.stop()
	if len(b.refused) != len(tests) {
		t.Fatalf("%d pieces of evidence for %d refusals", len(b.refused), len(tests))
	}
	for i, r := range b.refused {
		if r.Reason != tests[i].reason || len(r.EnvelopeSHA256) != 64 {
			t.Errorf("%s: evidence %+v", tests[i].name, r)
		}
	}
}

// Scenario: forged-beside-real. A forged envelope that claims the id of a good task says nothing about it.
func TestForgedCannotFailAGoodTask(t *testing.T) {
	b := newBench(t, nil)
	b.cfg.ResendAfter = time.Hour // a result without an acknowledgement is sent once in this time
	b.handlers = ours()
	b.run()
	tk := b.task(noop, &nodev1.ProbeNoop{})
	b.offer(tk)
	b.want(tk.TaskID, succeeded, 0)
	forged, _ := envelope.Sign(newKey(t), tk)
	if err := b.exec.Offer(&nodev1.TaskOffer{
		Envelope: forged.Bytes, Signature: forged.Signature,
		KeyId: forged.KeyID,
	}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if b.exec.Stats().Refused == 0 {
			return errors.New("not refused")
		}
		return nil
	})
	if n := b.sink.times(tk.TaskID); n != 1 {
		t.Errorf("%d results", n)
	}
}

// gate is a handler that waits until it is released.
type gate struct {
	entered chan string
	leave   chan struct{}
}

func newGate() *gate { return &gate{entered: make(chan string, 64), leave: make(chan struct{})} }

func (g *gate) Run(ctx context.Context, t *task.Task, p task.Progress) (proto.Message, error) {
	p("entered", 1, 2)
	g.entered <- t.TaskID
	select {
	case <-g.leave:
		return &nodev1.WorkloadStatusOutput{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestConcurrencyQueueAndCancel(t *testing.T) {
	g := newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: g})
	b.cfg = task.Config{Queue: 4, Concurrency: map[commonv1.TaskType]int{deploy: 2}}
	b.run()
	var tasks []envelope.Task
	for range 4 {
		tk := b.task(deploy, &nodev1.WorkloadDeploy{})
		tasks = append(tasks, tk)
		b.offer(tk)
	}
	running := []string{<-g.entered, <-g.entered}
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := b.exec.Stats().Delivered; n != 4 {
			return fmt.Errorf("%d delivered", n)
		}
		return nil
	})
	select {
	case id := <-g.entered:
		t.Fatalf("a third ran: %s", id)
	default:
	}
	// A fifth is not delivered, and comes again.
	fifth := b.task(deploy, &nodev1.WorkloadDeploy{})
	b.offer(fifth)
	testkit.Eventually(t, testkit.Patience, func() error {
		if b.exec.Stats().Busy == 0 {
			return errors.New("not busy")
		}
		return nil
	})
	if b.sink.has(&b.sink.delivered, fifth.TaskID) {
		t.Error("a task beyond the queue was acknowledged")
	}
	// One that waits and one that runs are cancelled.
	cancel := func(id string) {
		if err := b.exec.Cancel(&nodev1.TaskCancel{Task: &nodev1.TaskRef{TaskId: id, Attempt: 1}}); err != nil {
			t.Fatal(err)
		}
	}
	waiting := ""
	for _, tk := range tasks {
		if tk.TaskID != running[0] && tk.TaskID != running[1] {
			waiting = tk.TaskID
		}
	}
	cancel(waiting)
	b.want(waiting, cancelled, commonv1.Reason_REASON_CANCEL_REQUESTED)
	cancel(running[0])
	b.want(running[0], cancelled, commonv1.Reason_REASON_CANCEL_REQUESTED)
	<-g.entered // the task that waited has its place
	b.offer(fifth)
	close(g.leave)
	for _, tk := range append(tasks, fifth) {
		if tk.TaskID != waiting && tk.TaskID != running[0] {
			b.want(tk.TaskID, succeeded, 0)
		}
	}
	if b.sink.has(&b.sink.started, waiting) {
		t.Error("a task that was cancelled before its turn was started")
	}
	if len(b.sink.progress) == 0 {
		t.Error("no progress")
	}
}

func TestSuperseded(t *testing.T) {
	ran := make(chan string, 8)
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: task.HandlerFunc(func(
		_ context.Context, t *task.Task, _ task.Progress,
	) (proto.Message, error) {
		ran <- t.TaskID
		return nil, nil
	})})
	b.run()
	high := b.task(deploy, &nodev1.WorkloadDeploy{})
	high.Epoch, high.OpSeq = 3, 9
	b.offer(high)
	b.want(high.TaskID, succeeded, 0)
	low := b.task(deploy, &nodev1.WorkloadDeploy{})
	low.Epoch, low.OpSeq = 3, 8
	b.offer(low)
	b.want(low.TaskID, superseded, commonv1.Reason_REASON_TASK_SUPERSEDED)
	if len(ran) != 1 {
		t.Errorf("%d handlers ran", len(ran))
	}
	if got := b.led.Unacked(); len(got) != 2 {
		t.Errorf("%d results are kept for the ack", len(got))
	}
}

func TestPanicsAndErrors(t *testing.T) {
	b := newBench(t, map[commonv1.TaskType]task.Handler{
		deploy: task.HandlerFunc(func(context.Context, *task.Task, task.Progress) (proto.Message,
			error,
		) {
			panic("secret text")
		}),
		noop: task.HandlerFunc(func(context.Context, *task.Task, task.Progress) (proto.Message, error) {
			return nil, fault.New(commonv1.Reason_REASON_STORAGE_FAILED, "no room", fault.Cause(errors.New("hidden")))
		}),
		restart: task.HandlerFunc(func(context.Context, *task.Task, task.Progress) (proto.Message, error) {
			return nil, errors.New(strings.Repeat("x", 10_000) + "\x00\xff")
		}),
	})
	b.run()
	p, f, l := b.task(deploy, &nodev1.WorkloadDeploy{}), b.task(noop, &nodev1.ProbeNoop{}),
		b.task(restart, &nodev1.WorkloadRef{})
	for _, tk := range []envelope.Task{p, f, l} {
		b.offer(tk)
	}
	if r := b.want(p.TaskID, failed, commonv1.Reason_REASON_INTERNAL); strings.Contains(r.GetError(), "secret") {
		t.Errorf("panic told: %v", r)
	}
	if r := b.want(f.TaskID, failed, commonv1.Reason_REASON_STORAGE_FAILED); r.GetError() != "no room" {
		t.Errorf("fault told: %v", r)
	}
	if r := b.want(l.TaskID, failed, commonv1.Reason_REASON_INTERNAL); len(r.GetError()) > 4096 ||
		!strings.HasSuffix(r.GetError(), "[truncated by the agent]") {
		t.Errorf("long error: %d bytes", len(r.GetError()))
	}
	if b.exec.Stats().Panics != 1 {
		t.Error("the panic was not counted")
	}
}

func TestOutputIsBoundedAndClean(t *testing.T) {
	b := newBench(t, map[commonv1.TaskType]task.Handler{
		deploy: task.HandlerFunc(func(context.Context, *task.Task, task.Progress) (proto.Message, error) {
			out := &nodev1.WorkloadStatusOutput{}
			for range 40 {
				out.Workloads = append(out.Workloads,
					&nodev1.WorkloadStatus{Name: "a\x00b\xff", Detail: strings.Repeat("y", 1<<18)})
			}
			return out, nil
		}),
		noop: task.HandlerFunc(func(context.Context, *task.Task, task.Progress) (proto.Message, error) {
			out := &nodev1.WorkloadStatusOutput{}
			for range 60_000 {
				out.Workloads = append(out.Workloads, &nodev1.WorkloadStatus{Name: "abc"})
			}
			return out, nil
		}),
	})
	b.run()
	for _, kind := range []commonv1.TaskType{deploy, noop} {
		tk := b.task(kind, &nodev1.ProbeNoop{})
		b.offer(tk)
		r := b.want(tk.TaskID, succeeded, 0)
		if !r.GetOutputTruncated() || len(r.GetOutput()) > task.MaxOutput || len(r.GetOutput()) < 1000 {
			t.Errorf("%v: %d bytes, truncated %t", kind, len(r.GetOutput()), r.GetOutputTruncated())
		}
		var out nodev1.WorkloadStatusOutput
		if err := proto.Unmarshal(r.GetOutput(), &out); err != nil {
			t.Fatalf("%v: the cut output is no message: %v", kind, err)
		}
		if kind == deploy && (len(out.GetWorkloads()) != 40 || strings.ContainsRune(out.GetWorkloads()[0].GetName(), 0) ||
			!strings.HasSuffix(out.GetWorkloads()[0].GetDetail(), "[truncated by the agent]")) {
			t.Errorf("output %.200v", &out)
		}
	}
}

// Results without an acknowledgement are sent again to the next session, and no longer after it.
func TestResendToTheNextSession(t *testing.T) {
	b := newBench(t, nil)
	b.handlers = ours()
	b.run()
	first := b.sink
	first.refuse = true
	tk := b.task(noop, &nodev1.ProbeNoop{})
	b.offer(tk)
	testkit.Eventually(t, testkit.Patience, func() error {
		if len(b.led.Unacked()) != 1 {
			return errors.New("no result yet")
		}
		return nil
	})
	b.exec.Detach(first)
	b.sink = newSink()
	b.exec.Attach(b.sink)
	b.want(tk.TaskID, succeeded, 0)
	ack(t, b, tk.TaskID)
	third := newSink()
	b.exec.Attach(third)
	b.sink = third
	other := b.task(noop, &nodev1.ProbeNoop{})
	b.offer(other)
	b.want(other.TaskID, succeeded, 0)
	if third.times(tk.TaskID) != 0 {
		t.Error("an acknowledged result was sent again")
	}
}
