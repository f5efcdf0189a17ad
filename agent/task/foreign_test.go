package task_test

import (
	"context"
	"crypto/ed25519"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A machine that was imaged from another has that one's tasks in its ledger, begun ones too. It runs and reports none
// of them.
func TestTasksOfAnotherNodeAreNotTakenUp(t *testing.T) {
	for _, tt := range []struct {
		name    string
		start   bool
		trusted bool // the key that the other node's task was signed with
	}{
		{name: "started", start: true, trusted: true},
		{name: "started, of another mesh", start: true},
		{name: "delivered", trusted: true},
		{name: "delivered, of another mesh"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ran := make(chan string, 8)
			handler := task.HandlerFunc(func(_ context.Context, tk *task.Task, _ task.Progress) (proto.Message, error) {
				ran <- tk.TaskID
				return &nodev1.WorkloadStatusOutput{}, nil
			})
			b := newBench(t, map[commonv1.TaskType]task.Handler{deploy: struct {
				task.Handler
				idempotent
			}{Handler: handler}})
			foreign := b.task(deploy, &nodev1.WorkloadDeploy{})
			foreign.NodeID = ids.New()
			signer := b.key
			offer := b.sign(foreign)
			if !tt.trusted {
				b.key = newKey(t)
				b.trusted = []ed25519.PublicKey{b.key.Public()}
			}
			l, err := ledger.Open(ledger.Config{Path: b.path})
			if err != nil {
				t.Fatal(err)
			}
			key := ledger.Key{TaskID: foreign.TaskID, Attempt: 1}
			_, err = l.Deliver(t.Context(), ledger.Delivery{
				Key: key, Type: deploy, WorkspaceID: foreign.WorkspaceID, Epoch: 1, OpSeq: 1, ExpiresAt: foreign.ExpiresAt,
				Start: tt.start, Envelope: offer.GetEnvelope(), Signature: offer.GetSignature(), KeyID: offer.GetKeyId(),
			})
			if err := errors.Join(err, l.Close()); err != nil {
				t.Fatal(err)
			}
			b.run()
			testkit.Eventually(t, testkit.Patience, func() error {
				if kept, err := b.led.Abandoned(); err != nil || len(kept) != 1 || kept[0].Key != key {
					return errors.Join(err, errors.New("it is not set aside"))
				}
				return nil
			})
			own := b.task(deploy, &nodev1.WorkloadDeploy{})
			b.offer(own)
			b.want(own.TaskID, succeeded, 0)
			if got := <-ran; got != own.TaskID || len(ran) != 0 {
				t.Errorf("ran %s first and %d more, want its own task alone", got, len(ran))
			}
			if n := b.sink.times(foreign.TaskID); n != 0 || b.sink.has(&b.sink.delivered, foreign.TaskID) ||
				b.sink.has(&b.sink.started, foreign.TaskID) {
				t.Errorf("it spoke of the other node's task (%d results)", n)
			}
			for _, f := range b.exec.InFlight() {
				if f.GetTaskId() == foreign.TaskID {
					t.Errorf("Hello would name it: %v", f)
				}
			}
			b.stop()
			if len(b.refused) != 1 || b.refused[0].Reason != commonv1.Reason_REASON_TASK_WRONG_NODE ||
				b.refused[0].KeyID != signer.ID() {
				t.Errorf("evidence %+v", b.refused)
			}
		})
	}
}

// idempotent makes a handler one that may run again.
type idempotent struct{}

func (idempotent) Idempotent() bool { return true }
