package task

import (
	"context"
	"crypto/ed25519"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/ledger"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

const restartKind = commonv1.TaskType_TASK_TYPE_WORKLOAD_RESTART

// finder is a handler whose Observe waits for leave, and then finds out what became of the task unless its context has
// ended.
type finder struct {
	HandlerFunc
	entered, leave chan struct{}
}

func (f finder) Observe(ctx context.Context, _ *Task, _ Progress) (proto.Message, error) {
	f.entered <- struct{}{}
	select {
	case <-f.leave:
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return &nodev1.WorkloadStatusOutput{}, nil
}

// restarted returns an executor whose ledger has a task that had started before, with the task's job.
func restarted(t *testing.T, handler Handler, cfg Config) (*Executor, *job) {
	t.Helper()
	testkit.IO(t)
	led, err := ledger.Open(ledger.Config{Path: filepath.Join(t.TempDir(), "ledger")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := led.Close(); err != nil {
			t.Error(err)
		}
	})
	key := ledger.Key{TaskID: ids.New(), Attempt: 1}
	workspace := ids.New()
	if _, err := led.Deliver(t.Context(), ledger.Delivery{
		Key: key, Type: restartKind, WorkspaceID: workspace, Epoch: 1, OpSeq: 1, ExpiresAt: time.Now().Add(time.Minute),
		Envelope: []byte("e"), Signature: []byte("s"), KeyID: "k", Start: true,
	}); err != nil {
		t.Fatal(err)
	}
	cfg.NodeID = ids.New()
	e, err := New(Deps{
		Logger: testkit.Logger(t), Ledger: led,
		Verifiers: func() *envelope.VerifierSet {
			set, err := envelope.NewVerifierSet(ed25519.PublicKey(make([]byte, ed25519.PublicKeySize)))
			if err != nil {
				t.Error(err)
			}
			return set
		},
		ServerNow: func() (time.Time, bool) { return time.Now(), true },
		Handlers:  map[commonv1.TaskType]Handler{restartKind: handler},
	}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	j := &job{key: key, started: time.Now(), observe: true, task: Task{Kind: restartKind, Task: envelope.Task{
		TaskID: key.TaskID, Attempt: 1, WorkspaceID: workspace, Epoch: 1, OpSeq: 1,
	}}}
	e.jobs[key], e.waiting[restartKind] = j, []*job{j}
	return e, j
}

// outcome returns the state in which a task is stored as finished.
func (e *Executor) outcome(t *testing.T, j *job) commonv1.TaskState {
	t.Helper()
	e.handlers.Wait()
	entry, found, err := e.deps.Ledger.Get(j.key)
	if err != nil || !found || entry.State != ledger.StateFinished {
		t.Fatalf("the task is stored as %+v: found %v, %v", entry, found, err)
	}
	return entry.Outcome
}

// Scenario: cancel-after-restart. A task that had started before the agent's restart is cancelled, while it waits for
// its observation and while it is observed: its outcome is found out, and is its result.
func TestACancelDoesNotEndAnObservation(t *testing.T) {
	for name, first := range map[string]bool{"it waits": true, "it is observed": false} {
		t.Run(name, func(t *testing.T) {
			h := finder{entered: make(chan struct{}, 1), leave: make(chan struct{})}
			e, j := restarted(t, h, Config{})
			if first {
				e.cancelTask(t.Context(), j.task.Ref())
			}
			e.dispatch(t.Context())
			<-h.entered
			if !first {
				e.cancelTask(t.Context(), j.task.Ref())
			}
			close(h.leave)
			if got := e.outcome(t, j); got != commonv1.TaskState_TASK_STATE_SUCCEEDED {
				t.Errorf("the task ended as %s", got)
			}
		})
	}
}

// Scenario: cancel-after-restart. The observation does not end by itself: it ends some time after the cancel, and what
// became of the task is unknown.
func TestTheObservationOfACancelledTaskIsBounded(t *testing.T) {
	h := finder{entered: make(chan struct{}, 1), leave: make(chan struct{})}
	e, j := restarted(t, h, Config{ObserveFor: time.Millisecond})
	e.dispatch(t.Context())
	<-h.entered
	e.cancelTask(t.Context(), j.task.Ref())
	if got := e.outcome(t, j); got != commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN {
		t.Errorf("the task ended as %s", got)
	}
}

// TestTheAgentsStopEndsTheObservationOfACancelledTask: the task keeps its mark, and is observed after the next start.
func TestTheAgentsStopEndsTheObservationOfACancelledTask(t *testing.T) {
	h := finder{entered: make(chan struct{}, 1), leave: make(chan struct{})}
	e, j := restarted(t, h, Config{})
	ctx, stop := context.WithCancelCause(t.Context())
	e.dispatch(ctx)
	<-h.entered
	e.cancelTask(ctx, j.task.Ref())
	stop(errors.New("the agent stops"))
	e.handlers.Wait()
	if entry, _, err := e.deps.Ledger.Get(j.key); err != nil || entry.State != ledger.StateStarted {
		t.Errorf("the task is stored as %+v, %v", entry, err)
	}
}
