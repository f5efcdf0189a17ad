package task_test

import (
	"errors"
	"testing"

	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Scenario: disk-full-for-a-while. Starts and results that could not be stored are stored later, by the same agent, and
// no handler runs twice.
func TestLedgerFailureIsRetried(t *testing.T) {
	g := newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: g})
	b.cfg.Concurrency = map[commonv1.TaskType]int{deploy: 1}
	b.run()
	first := b.task(deploy, &nodev1.WorkloadDeploy{})
	b.begin(g, first)
	second, third := b.task(deploy, &nodev1.WorkloadDeploy{}), b.task(deploy, &nodev1.WorkloadDeploy{})
	b.offer(second)
	b.offer(third)
	b.delivered(3)
	commits := b.led.Stats().Commits
	b.full.Store(true)
	close(g.leave)
	// The result of the first and the starts of the others fail, and again with each tick.
	tried := func(n int64) {
		testkit.Eventually(t, testkit.Patience, func() error {
			if got := b.led.Stats().Commits - commits; got < n {
				return errors.New("not yet")
			}
			return nil
		})
	}
	tried(5)
	if err := b.exec.Cancel(&nodev1.TaskCancel{Task: &nodev1.TaskRef{TaskId: third.TaskID, Attempt: 1}}); err != nil {
		t.Fatal(err)
	}
	if b.exec.Idle() || b.sink.times(first.TaskID) != 0 || len(g.entered) != 0 ||
		b.sink.has(&b.sink.started, second.TaskID) {
		t.Error("something was told, begun or given up that is not on disk")
	}
	b.offer(second) // lifecycle may offer it again: it is the same task, and cannot be stored now
	tried(10)
	b.full.Store(false)
	b.want(first.TaskID, succeeded, 0)
	b.want(second.TaskID, succeeded, 0)
	b.want(third.TaskID, cancelled, commonv1.Reason_REASON_CANCEL_REQUESTED)
	if got := <-g.entered; got != second.TaskID || len(g.entered) != 0 {
		t.Errorf("%s ran, and %d more", got, len(g.entered))
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if !b.exec.Idle() {
			return errors.New("not yet")
		}
		return nil
	})
}
