package task_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// proves checks that signed is the envelope of a task.
func (b *bench) proves(signed *nodev1.SignedTask, want envelope.Task) {
	b.t.Helper()
	set, err := envelope.NewVerifierSet(b.trusted...)
	if err != nil {
		b.t.Fatal(err)
	}
	got, err := envelope.Verify(set, signed.GetEnvelope(), signed.GetSignature(), signed.GetKeyId())
	if err != nil || got.TaskID != want.TaskID || got.Attempt != want.Attempt || got.NodeID != b.node {
		b.t.Errorf("the envelope is of %v (%v)", got, err)
	}
}

func refusal(id string, reason commonv1.Reason, wanted bool) *nodev1.TaskReportRefused {
	return &nodev1.TaskReportRefused{
		Tasks: []*nodev1.TaskRef{{TaskId: id, Attempt: 1}}, Denial: fault.ToDenial(fault.New(reason, ""), ""),
		EnvelopeWanted: wanted,
	}
}

// TestWhatIsFromBeforeTheSessionIsProven checks that a result of this session is sent without the envelope, and that
// after a restart it is sent with it, as is the report of a task that still runs.
func TestWhatIsFromBeforeTheSessionIsProven(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	b := newBench(t, nil)
	b.handlers = ours()
	b.handlers[deploy] = task.HandlerFunc(func(ctx context.Context, _ *task.Task, _ task.Progress) (proto.Message, error) {
		select {
		case <-release:
			return nil, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
	b.run()
	done, long := b.task(noop, &nodev1.ProbeNoop{Nonce: "n"}), b.task(deploy, &nodev1.WorkloadDeploy{})
	b.offer(done)
	b.offer(long)
	if r := b.result(done.TaskID, 1); r.GetSigned() != nil {
		t.Error("a result of this session carries its envelope")
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if !b.sink.has(&b.sink.started, long.TaskID) {
			return fmt.Errorf("task %s is not started", long.TaskID)
		}
		return nil
	})
	if len(b.sink.signed) != 0 {
		t.Error("word of a delivery in this session carries an envelope")
	}
	next := newSink()
	b.exec.Attach(next)
	b.sink = next
	b.proves(b.result(done.TaskID, 1).GetSigned(), done)
	next.mu.Lock()
	defer next.mu.Unlock()
	b.proves(next.signed[long.TaskID], long)
}

// TestARefusedResultIsProvenOnceAndThenDropped: the agent sends the envelope once when the control plane asks for it; a
// result that is refused even so stays in the ledger as evidence and is not sent again.
func TestARefusedResultIsProvenOnceAndThenDropped(t *testing.T) {
	for name, final := range map[string]*struct {
		reason commonv1.Reason
		wanted bool
	}{
		"refused with it": {commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		"asked again":     {commonv1.Reason_REASON_TASK_NOT_CURRENT, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, nil)
			b.handlers = ours()
			b.cfg.ResendAfter = time.Nanosecond // a result that is not dropped is sent again every second
			b.run()
			tk := b.task(noop, &nodev1.ProbeNoop{Nonce: "n"})
			b.offer(tk)
			b.result(tk.TaskID, 1)
			if err := b.exec.ReportRefused(t.Context(),
				refusal(tk.TaskID, commonv1.Reason_REASON_TASK_NOT_CURRENT, true)); err != nil {
				t.Fatal(err)
			}
			var proven *nodev1.TaskResult
			testkit.Eventually(t, testkit.Patience, func() error {
				b.sink.mu.Lock()
				defer b.sink.mu.Unlock()
				for _, r := range b.sink.results[tk.TaskID] {
					if r.GetSigned() != nil {
						proven = r
						return nil
					}
				}
				return fmt.Errorf("%d results, none with its envelope", len(b.sink.results[tk.TaskID]))
			})
			b.proves(proven.GetSigned(), tk)
			if err := b.exec.ReportRefused(t.Context(), refusal(tk.TaskID, final.reason, final.wanted)); err != nil {
				t.Fatal(err)
			}
			if left := b.exec.InFlight(); len(left) != 0 {
				t.Errorf("still to be sent: %v", left)
			}
			b.stop()
			if len(b.refused) != 1 || b.refused[0].Reason != final.reason || b.refused[0].TaskID != tk.TaskID {
				t.Errorf("evidence %v", b.refused)
			}
			sent := b.sink.times(tk.TaskID)
			b.run()
			if left := b.exec.InFlight(); len(left) != 0 || sent == 0 {
				t.Errorf("after a restart still to be sent: %v", left)
			}
		})
	}
}

// TestARefusalOfAnUnknownTaskIsIgnored names a task that was never in this ledger.
func TestARefusalOfAnUnknownTaskIsIgnored(t *testing.T) {
	b := newBench(t, nil)
	b.handlers = ours()
	b.run()
	other := b.task(noop, &nodev1.ProbeNoop{})
	for _, wanted := range []bool{true, false} {
		if err := b.exec.ReportRefused(t.Context(),
			refusal(other.TaskID, commonv1.Reason_REASON_TASK_NOT_CURRENT, wanted)); err != nil {
			t.Fatal(err)
		}
	}
	b.stop()
	if len(b.refused) != 0 || b.sink.times(other.TaskID) != 0 {
		t.Errorf("evidence %v, %d results", b.refused, b.sink.times(other.TaskID))
	}
}
