package task_test

import (
	"context"
	"crypto/ed25519"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/runtime/process"
	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// observing is a handler that can find out afterwards what became of a task.
type observing struct {
	*gate
	observed chan string
	err      error
}

func (o *observing) Observe(_ context.Context, t *task.Task, _ task.Progress) (proto.Message, error) {
	o.observed <- t.TaskID
	return &nodev1.StorageReleaseOutput{Existed: true}, o.err
}

// repeatable is a handler that may run again.
type repeatable struct{ *gate }

func (repeatable) Idempotent() bool { return true }

// interrupted starts a task, stops the agent while it runs, and starts the agent again with next as the handler.
func interrupted(t *testing.T, next func(*gate) task.Handler) (*bench, string, *gate) {
	t.Helper()
	before := newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: before})
	b.run()
	tk := b.task(deploy, &nodev1.WorkloadDeploy{})
	b.offer(tk)
	<-before.entered
	b.stop()
	if b.sink.times(tk.TaskID) != 0 {
		t.Fatal("an interrupted task has a result")
	}
	after := newGate()
	b.handlers = map[commonv1.TaskType]task.Handler{deploy: next(after)}
	b.run()
	return b, tk.TaskID, after
}

// TestStartsOfTasksThatMayNotRunTwiceAreSentAtOnce: a dispatched task is offered again whatever its type, if the
// agent's ledger is lost. The time in which the control plane has a begun task as dispatched should be short, unless
// the task may run again.
func TestStartsOfTasksThatMayNotRunTwiceAreSentAtOnce(t *testing.T) {
	once, again := newGate(), newGate()
	close(once.leave)
	close(again.leave)
	b := newBench(t, map[commonv1.TaskType]task.Handler{restart: once, deploy: repeatable{again}})
	b.run()
	tk := b.task(deploy, &nodev1.WorkloadDeploy{})
	b.offer(tk)
	b.want(tk.TaskID, succeeded, 0)
	if len(b.sink.flushed) != 0 {
		t.Errorf("a task that may run again was flushed: %q", b.sink.flushed)
	}
	tk = b.task(restart, &nodev1.WorkloadDeploy{})
	b.offer(tk)
	b.want(tk.TaskID, succeeded, 0)
	want := []string{"2 delivered, 1 started", "2 delivered, 2 started"}
	if diff := cmp.Diff(want, b.sink.flushed); diff != "" {
		t.Errorf("a task that may not: %s", diff)
	}
}

func TestStartedIsObserved(t *testing.T) {
	seen := make(chan string, 1)
	b, id, after := interrupted(t, func(g *gate) task.Handler { return &observing{gate: g, observed: seen} })
	r := b.want(id, succeeded, 0)
	var out nodev1.StorageReleaseOutput
	if err := proto.Unmarshal(r.GetOutput(), &out); err != nil || !out.GetExisted() || <-seen != id {
		t.Errorf("output %v, %v", &out, err)
	}
	if len(after.entered) != 0 {
		t.Error("the handler ran again")
	}
}

// A task that had started is not taken up before the control plane has listed what may run on the node, whatever the
// node is offered.
func TestStartedWaitsForTheList(t *testing.T) {
	before := newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: before})
	b.run()
	tk := b.task(deploy, &nodev1.WorkloadDeploy{})
	b.offer(tk)
	<-before.entered
	b.stop()
	after := newGate()
	close(after.leave)
	var listed atomic.Bool
	b.listed = listed.Load
	b.handlers = map[commonv1.TaskType]task.Handler{
		deploy: repeatable{after}, noop: task.HandlerFunc(func(
			context.Context, *task.Task, task.Progress,
		) (proto.Message, error) {
			return &nodev1.ProbeNoopOutput{}, nil
		}),
	}
	b.run()
	// The result of another task shows that the ledger was read.
	probe := b.task(noop, &nodev1.ProbeNoop{})
	b.offer(probe)
	b.want(probe.TaskID, succeeded, 0)
	if len(after.entered) != 0 || b.sink.times(tk.TaskID) != 0 {
		t.Fatal("it was taken up before the list")
	}
	listed.Store(true)
	b.exec.Wake()
	b.want(tk.TaskID, succeeded, 0)
	if got := <-after.entered; got != tk.TaskID {
		t.Errorf("ran %s", got)
	}
}

// A task that starts a workload, and had started before the agent did, does not start it where its epoch may not run
// any more. One that was offered does.
func TestWhatMayNotRunIsNotStartedAgain(t *testing.T) {
	started := 0
	handlers := task.Handlers(task.HandlerDeps{
		Runtime: starting{started: &started}, MayRun: func(_ string, epoch int64) bool { return epoch == 2 },
	})
	for _, kind := range []commonv1.TaskType{deploy, commonv1.TaskType_TASK_TYPE_WORKLOAD_START, restart} {
		for _, c := range []struct {
			resumed bool
			epoch   int64
			runs    bool
		}{{true, 1, false}, {true, 2, true}, {false, 1, true}} {
			started = 0
			tk := &task.Task{Task: envelope.Task{Epoch: c.epoch, WorkspaceID: ids.New()}, Kind: kind, Resumed: c.resumed}
			run := handlers[kind].Run
			if o, ok := handlers[kind].(task.Observer); ok && c.resumed {
				run = o.Observe
			}
			_, err := run(t.Context(), tk, nil)
			if (started == 1) != c.runs || errors.Is(err, task.ErrUnknown) == c.runs {
				t.Errorf("%v, resumed %t, epoch %d: started %d times, %v", kind, c.resumed, c.epoch, started, err)
			}
		}
	}
}

// starting is a Runtime that counts the starts.
type starting struct {
	task.Runtime
	started *int
}

func (s starting) Deploy(context.Context, process.Request) (*nodev1.WorkloadStatus, error) {
	*s.started++
	return &nodev1.WorkloadStatus{}, nil
}

func (s starting) Start(context.Context, string, string) (*nodev1.WorkloadStatus, error) {
	*s.started++
	return &nodev1.WorkloadStatus{}, nil
}

func (s starting) Restart(context.Context, string, string, time.Duration) (*nodev1.WorkloadStatus, error) {
	*s.started++
	return &nodev1.WorkloadStatus{}, nil
}

func TestStartedCannotBeKnown(t *testing.T) {
	b, id, _ := interrupted(t, func(g *gate) task.Handler {
		return &observing{gate: g, observed: make(chan string, 1), err: task.ErrUnknown}
	})
	b.want(id, unknown, 0)
}

func TestStartedOfAnotherTypeIsUnknown(t *testing.T) {
	b, id, after := interrupted(t, func(g *gate) task.Handler { return g })
	b.want(id, unknown, 0)
	if len(after.entered) != 0 {
		t.Error("a type that is not idempotent ran again")
	}
}

func TestStartedOfIdempotentTypeRunsAgain(t *testing.T) {
	b, id, after := interrupted(t, func(g *gate) task.Handler { return repeatable{g} })
	if got := <-after.entered; got != id {
		t.Fatalf("ran %s", got)
	}
	close(after.leave)
	b.want(id, succeeded, 0)
}

// A task that was delivered and not started runs after a restart, in its window, if its key is still trusted.
func TestDeliveredRunsAfterRestart(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(b *bench)
		state  commonv1.TaskState
		reason commonv1.Reason
	}{
		{name: "as it was", change: func(*bench) {}, state: succeeded},
		{
			name: "its key was retired", change: func(b *bench) { b.trusted = []ed25519.PublicKey{newKey(b.t).Public()} },
			state: failed, reason: commonv1.Reason_REASON_TASK_SIGNATURE_INVALID,
		},
		{
			name: "its type is gone", change: func(b *bench) { delete(b.handlers, deploy) }, state: failed,
			reason: commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: task.HandlerFunc(func(
				context.Context, *task.Task, task.Progress,
			) (proto.Message, error) {
				return &nodev1.WorkloadStatusOutput{}, nil
			})})
			tk := b.task(deploy, &nodev1.WorkloadDeploy{})
			offer := b.sign(tk)
			l, err := ledger.Open(ledger.Config{Path: b.path})
			if err != nil {
				t.Fatal(err)
			}
			_, err = l.Deliver(t.Context(), ledger.Delivery{
				Key: ledger.Key{TaskID: tk.TaskID, Attempt: 1}, Type: deploy, WorkspaceID: tk.WorkspaceID, Epoch: 1, OpSeq: 1,
				ExpiresAt: tk.ExpiresAt, Envelope: offer.GetEnvelope(), Signature: offer.GetSignature(), KeyID: offer.GetKeyId(),
			})
			if err := errors.Join(err, l.Close()); err != nil {
				t.Fatal(err)
			}
			tt.change(b)
			b.run()
			b.want(tk.TaskID, tt.state, tt.reason)
		})
	}
}

// A replay after the window is over gets the stored result, and no effect.
func TestReplayAfterExpiry(t *testing.T) {
	runs := make(chan struct{}, 8)
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: task.HandlerFunc(func(
		context.Context, *task.Task, task.Progress,
	) (proto.Message, error) {
		runs <- struct{}{}
		return &nodev1.WorkloadStatusOutput{}, nil
	})})
	b.run()
	var tk envelope.Task
	var offer *nodev1.TaskOffer
	for window := 300 * time.Millisecond; ; window *= 4 {
		tk = b.task(deploy, &nodev1.WorkloadDeploy{})
		tk.ExpiresAt = time.Now().Add(window)
		offer = b.sign(tk)
		if err := b.exec.Offer(offer); err != nil {
			t.Fatal(err)
		}
		if r := b.result(tk.TaskID, 1); r.GetReason() == commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW && window < time.Minute {
			ack(t, b, tk.TaskID)
			continue // the machine is busy, and the window was over before the task began
		}
		break
	}
	b.want(tk.TaskID, succeeded, 0)
	ack(t, b, tk.TaskID)
	testkit.Eventually(t, testkit.Patience, func() error {
		if time.Now().Before(tk.ExpiresAt) {
			return errors.New("not expired yet")
		}
		return nil
	})
	if err := b.exec.Offer(offer); err != nil {
		t.Fatal(err)
	}
	if r := b.result(tk.TaskID, 2); r.GetState() != succeeded {
		t.Errorf("replayed: %v", r)
	}
	if len(runs) != 1 {
		t.Errorf("it ran %d times", len(runs))
	}
}
