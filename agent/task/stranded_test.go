package task_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestOfferIsTakenWhoseDeliveryWasCommittedAndAnsweredWithAnError: the task is in the ledger, so the next Hello names
// it and the control plane does not offer it again. It must run even so, once, without a restart, and whether or not it
// was marked as started in that commit.
func TestOfferIsTakenWhoseDeliveryWasCommittedAndAnsweredWithAnError(t *testing.T) {
	testkit.IO(t)
	for _, tc := range []struct{ name, failpoint string }{
		{"marked, lost by the ledger", "agent.deliver.after_fsync=error"},
		{"marked, lost before it is told", "agent.deliver.before_send=error"},
		{"queued, lost by the ledger", "agent.deliver.after_fsync=error:2"},
		{"queued, lost before it is told", "agent.deliver.before_send=error:2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			// Points are armed once in a process, so each case is one of its own.
			report := t.TempDir() + "/report"
			// this test's own binary
			cmd := exec.CommandContext(testkit.Context(t), os.Args[0], "-test.run=^TestStrandedChild$", "-test.v")
			cmd.Env = append(os.Environ(), "GPUAAS_FAILPOINTS="+tc.failpoint, "GPUAAS_FAILPOINT_REPORT="+report)
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "--- PASS: TestStrandedChild") {
				t.Fatalf("%v\n%s", err, out)
			}
			name, _, _ := strings.Cut(tc.failpoint, "=")
			if hits, err := os.ReadFile(report); err != nil || !strings.HasPrefix(string(hits), name+" ") {
				t.Fatalf("the point was not passed: %q, %v", hits, err)
			}
		})
	}
}

// TestStrandedChild is the other half of the test above: two offers, of which one may run at a time and one is answered
// with an error. Without a point armed both simply run.
func TestStrandedChild(t *testing.T) {
	g := newGate()
	b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: g})
	b.cfg.Concurrency = map[commonv1.TaskType]int{deploy: 1}
	b.run()
	first, second := b.task(deploy, &nodev1.WorkloadDeploy{}), b.task(deploy, &nodev1.WorkloadDeploy{})
	b.offer(first)
	if got := b.entered(g); got != first.TaskID {
		t.Fatalf("%s runs first", got)
	}
	b.offer(second)
	b.delivered(2)
	for _, tk := range []string{first.TaskID, second.TaskID} {
		if !b.sink.has(&b.sink.delivered, tk) {
			t.Errorf("%s was not told as delivered", tk)
		}
	}
	b.offer(first) // as lifecycle may, which got no report of the delivery
	b.offer(second)
	close(g.leave)
	b.want(first.TaskID, succeeded, 0)
	b.want(second.TaskID, succeeded, 0)
	if got := b.entered(g); got != second.TaskID || len(g.entered) != 0 {
		t.Errorf("%s ran second, and %d after it", got, len(g.entered))
	}
	if !b.exec.Idle() {
		t.Error("something is still held as unfinished")
	}
}

func (b *bench) entered(g *gate) string {
	b.t.Helper()
	select {
	case id := <-g.entered:
		return id
	case <-testkit.Context(b.t).Done():
		b.t.Fatal("nothing runs")
		return ""
	}
}
