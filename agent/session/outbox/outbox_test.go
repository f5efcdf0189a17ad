package outbox

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

func ref(n int) *nodev1.TaskRef { return &nodev1.TaskRef{TaskId: fmt.Sprint(n), Attempt: 1} }

func drainAll(o *Outbox) []string {
	var out []string
	for frame := o.Next(); frame != nil; frame = o.Next() {
		switch f := frame.GetFrame().(type) {
		case *nodev1.ConnectRequest_TaskDelivered:
			out = append(out, fmt.Sprintf("delivered %d", len(f.TaskDelivered.GetTasks())))
		case *nodev1.ConnectRequest_TaskResult:
			out = append(out, "result "+f.TaskResult.GetTask().GetTaskId())
		case *nodev1.ConnectRequest_TaskStarted:
			out = append(out, "started "+f.TaskStarted.GetTask().GetTaskId())
		case *nodev1.ConnectRequest_TaskProgress:
			out = append(out, "progress "+f.TaskProgress.GetNote())
		case *nodev1.ConnectRequest_Observation:
			out = append(out, fmt.Sprintf("observation %d", f.Observation.GetEpoch()))
		default:
			out = append(out, "control")
		}
	}
	return out
}

func TestOrderOfWhatGoesOut(t *testing.T) {
	o := New(10, 1<<20, 0)
	if err := o.Result(&nodev1.TaskResult{}); !errors.Is(err, ErrNotConnected) {
		t.Errorf("closed: %v", err)
	}
	o.SetOpen(true)
	for _, err := range []error{
		o.Observe(&nodev1.Observation{WorkspaceId: "w", Epoch: 1}),
		o.Observe(&nodev1.Observation{WorkspaceId: "w", Epoch: 2}), // the last update
		o.Progress(&nodev1.TaskProgress{Task: ref(3), Note: "a"}),
		o.Progress(&nodev1.TaskProgress{Task: ref(3), Note: "b"}),
		o.Progress(&nodev1.TaskProgress{Task: ref(1), Note: "dropped by its result"}),
		o.Started(&nodev1.TaskStarted{Task: ref(1)}),
		o.Started(&nodev1.TaskStarted{Task: ref(3)}),
		o.Delivered([]*nodev1.TaskRef{ref(1)}),
		o.Delivered([]*nodev1.TaskRef{ref(2), ref(3)}),
		o.Result(&nodev1.TaskResult{Task: ref(1)}), // behind its start
		o.Result(&nodev1.TaskResult{Task: ref(2)}),
		o.Result(&nodev1.TaskResult{Task: ref(2)}), // it waits already
		o.Request(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_RenewRequest{}}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"control", "delivered 3", "started 1", "result 1", "result 2", "started 3", "progress b",
		"observation 2",
	}
	if diff := cmp.Diff(want, drainAll(o)); diff != "" {
		t.Error(diff)
	}
}

func TestOutboxIsBounded(t *testing.T) {
	o := New(3, 100, 0)
	o.SetOpen(true)
	var full int
	for i := range 10 {
		if errors.Is(o.Result(&nodev1.TaskResult{Task: ref(i)}), ErrQueueFull) {
			full++
		}
	}
	if full != 7 {
		t.Errorf("%d of 10 results refused", full)
	}
	drainAll(o)
	if err := o.Result(&nodev1.TaskResult{Task: ref(1), Output: make([]byte, 1000)}); err != nil {
		t.Errorf("a large result alone is taken: %v", err)
	}
	if err := o.Result(&nodev1.TaskResult{Task: ref(2), Output: make([]byte, 1000)}); !errors.Is(err, ErrQueueFull) {
		t.Errorf("beside another it is not: %v", err)
	}
	for i := range 20 {
		_ = o.Started(&nodev1.TaskStarted{Task: ref(i)})
		_ = o.Progress(&nodev1.TaskProgress{Task: ref(i)})
		_ = o.Observe(&nodev1.Observation{WorkspaceId: fmt.Sprint(i)})
		_ = o.Delivered([]*nodev1.TaskRef{ref(i)})
	}
	if len(o.started) > 3 || len(o.progress) > 3 || len(o.seen) > 3 || len(o.delivered) > 12 {
		t.Errorf("%d started, %d progress, %d seen, %d delivered", len(o.started), len(o.progress), len(o.seen),
			len(o.delivered))
	}
	o.SetOpen(false)
	o.SetOpen(true)
	if left := drainAll(o); len(left) != 0 {
		t.Errorf("left after the session: %q", left)
	}
}

func TestManyDeliveriesAreSplit(t *testing.T) {
	o := New(1000, 1<<20, 0)
	o.SetOpen(true)
	for i := range 600 {
		if err := o.Delivered([]*nodev1.TaskRef{ref(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"delivered 256", "delivered 256", "delivered 88"}, drainAll(o)); diff != "" {
		t.Error(diff)
	}
}

// TestEnvelopesGoOutFirst queues the report of tasks from before the session behind a result: it is sent before the
// result, whole, and not by another session.
func TestEnvelopesGoOutFirst(t *testing.T) {
	o := New(1, 1<<20, 0)
	proof := &nodev1.TaskDelivered{Tasks: []*nodev1.TaskRef{ref(1)}, Signed: []*nodev1.SignedTask{{KeyId: "k"}}}
	if err := o.Redelivered(proof); !errors.Is(err, ErrNotConnected) {
		t.Errorf("closed: %v", err)
	}
	o.SetOpen(true)
	for _, err := range []error{o.Result(&nodev1.TaskResult{Task: ref(1)}), o.Redelivered(proof)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := o.Redelivered(proof); !errors.Is(err, ErrQueueFull) {
		t.Errorf("over the limit: %v", err)
	}
	if first := o.Next().GetTaskDelivered(); len(first.GetSigned()) != 1 || first.GetSigned()[0].GetKeyId() != "k" {
		t.Errorf("first goes %v", first)
	}
	if err := o.Redelivered(proof); err != nil {
		t.Fatal(err)
	}
	o.SetOpen(false)
	o.SetOpen(true)
	if got := drainAll(o); len(got) != 0 {
		t.Errorf("the next session sends %v", got)
	}
}

// TestAShortTaskIsOneFrame: its result implies its delivery and its start. Those of a longer task are sent when the
// linger time is over, and no later frame overtakes them.
func TestAShortTaskIsOneFrame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := New(10, 1<<20, 50*time.Millisecond)
		o.SetOpen(true)
		<-o.Wake()
		short := func(n int) []error {
			return []error{
				o.Delivered([]*nodev1.TaskRef{ref(n)}), o.Started(&nodev1.TaskStarted{Task: ref(n)}),
				o.Result(&nodev1.TaskResult{Task: ref(n), StartedAt: timestamppb.Now()}),
			}
		}
		wants := func(want ...string) {
			t.Helper()
			select {
			case <-o.Wake():
			default:
				t.Error("the writer is not woken")
			}
			if diff := cmp.Diff(want, drainAll(o)); diff != "" {
				t.Error(diff)
			}
		}
		if err := errors.Join(short(1)...); err != nil {
			t.Fatal(err)
		}
		wants("result 1")

		// A long one beside a short one.
		long := []error{o.Delivered([]*nodev1.TaskRef{ref(2)}), o.Started(&nodev1.TaskStarted{Task: ref(2)})}
		if err := errors.Join(long...); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(short(3)...); err != nil {
			t.Fatal(err)
		}
		wants("result 3")
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		wants("delivered 1", "started 2")

		// The result of a task that never started, and progress, are sent behind the lingering frames.
		unstarted := []error{o.Delivered([]*nodev1.TaskRef{ref(4)}), o.Result(&nodev1.TaskResult{Task: ref(4)})}
		if err := errors.Join(unstarted...); err != nil {
			t.Fatal(err)
		}
		wants("delivered 1", "result 4")
		noted := []error{
			o.Started(&nodev1.TaskStarted{Task: ref(5)}), o.Progress(&nodev1.TaskProgress{Task: ref(5), Note: "a"}),
		}
		if err := errors.Join(noted...); err != nil {
			t.Fatal(err)
		}
		wants("started 5", "progress a")

		// A session that ends sends the lingering frames.
		if err := o.Delivered([]*nodev1.TaskRef{ref(6)}); err != nil {
			t.Fatal(err)
		}
		o.Flush()
		wants("delivered 1")
	})
}
