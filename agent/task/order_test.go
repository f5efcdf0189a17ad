package task_test

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	remove = commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE
	status = commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS
)

func (b *bench) numbered(kind commonv1.TaskType, payload proto.Message, epoch, opSeq int64) envelope.Task {
	tk := b.task(kind, payload)
	tk.Epoch, tk.OpSeq = epoch, opSeq
	return tk
}

func (b *bench) delivered(n int64) {
	b.t.Helper()
	testkit.Eventually(b.t, testkit.Patience, func() error {
		if got := b.exec.Stats().Delivered; got < n {
			return fmt.Errorf("%d delivered", got)
		}
		return nil
	})
}

// begin offers a task to a type whose gate it then passes, and waits until it is inside.
func (b *bench) begin(g *gate, tk envelope.Task) {
	b.t.Helper()
	b.offer(tk)
	if got := <-g.entered; got != tk.TaskID {
		b.t.Fatalf("%s ran", got)
	}
}

// Scenario: remove-beside-deploy. Whatever batch they come in, the remove runs after the deploy, and is not even marked
// before.
func TestLaterOperationWaits(t *testing.T) {
	deploys, removes := newGate(), newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: deploys, remove: removes})
	b.cfg.Queue = 64
	b.run()
	for round := range int64(8) {
		first := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 1, 2*round+1)
		second := b.numbered(remove, &nodev1.WorkloadRef{}, 1, 2*round+2)
		b.offer(first)
		b.offer(second)
		if got := <-deploys.entered; got != first.TaskID {
			t.Fatalf("%s ran", got)
		}
		b.delivered(2 * (round + 1))
		if e, ok, err := b.led.Get(ledger.Key{TaskID: second.TaskID, Attempt: 1}); err != nil || !ok ||
			e.State != ledger.StateDelivered {
			t.Errorf("the one that waits is %v, %v", e.State, err)
		}
		if len(removes.entered) != 0 {
			t.Fatal("the remove ran beside the deploy")
		}
		deploys.leave <- struct{}{}
		b.want(first.TaskID, succeeded, 0)
		if got := <-removes.entered; got != second.TaskID {
			t.Fatalf("%s ran", got)
		}
		removes.leave <- struct{}{}
		b.want(second.TaskID, succeeded, 0)
	}
}

// Tasks with equal numbers, those of other workspaces, the node's own and those that change nothing do not wait.
func TestOnlyOtherOperationsOfTheWorkspaceWait(t *testing.T) {
	deploys, others := newGate(), newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: deploys, status: others, noop: others})
	b.run()
	b.begin(deploys, b.numbered(deploy, &nodev1.WorkloadDeploy{}, 2, 5))
	b.begin(deploys, b.numbered(deploy, &nodev1.WorkloadDeploy{}, 2, 5))
	b.begin(others, b.numbered(status, &nodev1.WorkloadRef{}, 1, 1))
	b.begin(others, b.numbered(noop, &nodev1.ProbeNoop{}, 9, 9))
	elsewhere := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 1, 9)
	elsewhere.WorkspaceID = ids.New()
	b.begin(deploys, elsewhere)
	node := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 0, 0)
	node.WorkspaceID = ""
	b.begin(deploys, node)
	close(deploys.leave)
	close(others.leave)
}

// A task that waits for its workspace takes no place of its type: the operation before it needs that place.
func TestWaitingTaskHoldsNoPlace(t *testing.T) {
	deploys, removes := newGate(), newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: deploys, remove: removes})
	b.cfg.Concurrency = map[commonv1.TaskType]int{deploy: 1, remove: 1}
	b.run()
	b.begin(removes, b.numbered(remove, &nodev1.WorkloadRef{}, 1, 5))
	later := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 1, 6)
	b.offer(later)
	b.delivered(2)
	parallel := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 1, 5)
	b.begin(deploys, parallel)
	close(removes.leave)
	if len(deploys.entered) != 0 {
		t.Error("it did not wait for all of the operation before it")
	}
	close(deploys.leave)
	b.want(parallel.TaskID, succeeded, 0)
	b.want(later.TaskID, succeeded, 0)
}

// Once a later operation has started, one that waits for a place ends: at once, and without having been started.
func TestOvertakenTaskIsSuperseded(t *testing.T) {
	deploys, removes := newGate(), newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: deploys, remove: removes})
	b.cfg.Concurrency = map[commonv1.TaskType]int{deploy: 1}
	b.run()
	elsewhere := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 1, 1)
	elsewhere.WorkspaceID = ids.New()
	b.begin(deploys, elsewhere)
	low := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 1, 5)
	b.offer(low)
	b.delivered(2)
	high := b.numbered(remove, &nodev1.WorkloadRef{}, 1, 6)
	b.begin(removes, high)
	b.want(low.TaskID, superseded, commonv1.Reason_REASON_TASK_SUPERSEDED)
	close(deploys.leave)
	close(removes.leave)
	b.want(elsewhere.TaskID, succeeded, 0)
	b.want(high.TaskID, succeeded, 0)
	if len(deploys.entered) != 0 || b.sink.has(&b.sink.started, low.TaskID) {
		t.Error("it was started")
	}
}

// A task that had started before a restart and was overtaken since is not run again, even if its effect would be the
// same.
func TestOvertakenTaskIsNotResumed(t *testing.T) {
	for _, tt := range []struct {
		name         string
		epoch, opSeq int64
		start        bool // the later one had started too
	}{
		{"by a later operation", 1, 6, true},
		{"by a later epoch", 2, 6, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := newGate()
			close(g.leave)
			b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: repeatable{g}, remove: repeatable{g}})
			low := b.numbered(deploy, &nodev1.WorkloadDeploy{}, 1, 5)
			high := b.numbered(remove, &nodev1.WorkloadRef{}, tt.epoch, tt.opSeq)
			l, err := ledger.Open(ledger.Config{Path: b.path})
			if err != nil {
				t.Fatal(err)
			}
			for _, tk := range []envelope.Task{low, high} {
				kind, start := deploy, true
				if tk.TaskID == high.TaskID {
					kind, start = remove, tt.start
				}
				offer := b.sign(tk)
				_, deliverErr := l.Deliver(t.Context(), ledger.Delivery{
					Key: ledger.Key{TaskID: tk.TaskID, Attempt: 1}, Type: kind, WorkspaceID: tk.WorkspaceID, Epoch: tk.Epoch,
					OpSeq: tk.OpSeq, ExpiresAt: tk.ExpiresAt, Envelope: offer.GetEnvelope(), Signature: offer.GetSignature(),
					KeyID: offer.GetKeyId(),
					Start: start,
				})
				err = errors.Join(err, deliverErr)
			}
			if err := errors.Join(err, l.Close()); err != nil {
				t.Fatal(err)
			}
			b.run()
			b.want(low.TaskID, superseded, commonv1.Reason_REASON_TASK_SUPERSEDED)
			b.want(high.TaskID, succeeded, 0)
			if got := <-g.entered; got != high.TaskID || len(g.entered) != 0 {
				t.Errorf("%s ran, and %d more", got, len(g.entered))
			}
		})
	}
}
