package task_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// carries checks whether a task in that state still has its payload.
func (k *kit) carries(what, taskID string, state commonv1.TaskState, want bool) {
	k.t.Helper()
	var got bool
	var is string
	err := k.pool.QueryRow(k.t.Context(), `SELECT payload <> '', state FROM lifecycle.task WHERE task_id = $1`, taskID).Scan(&got, &is)
	if err != nil {
		k.t.Fatal(err)
	}
	if got != want || is != names.Of(state) {
		k.t.Errorf("%s: the task is %s and carries its payload: %t; want %s, %t", what, is, got, names.Of(state), want)
	}
}

// carrying queues a deploy with a credential.
func carrying(s *task.Spec) {
	s.Type = deploy
	s.Payload = &nodev1.WorkloadDeploy{Workload: &nodev1.Workload{Name: "web"}, SecretEnv: map[string]string{"TOKEN": "secret"}}
}

// TestPayloadsGoAtEveryEnd: what may not be sent again is not kept, whatever ended the task.
func TestPayloadsGoAtEveryEnd(t *testing.T) {
	k := newKit(t)
	n := k.node()
	cancel := func(id string) {
		t.Helper()
		if _, err := k.change(id, lifecyclev1.TaskVerb_TASK_VERB_CANCEL); err != nil {
			t.Fatal(err)
		}
	}

	waiting := k.enqueue(n, carrying)
	cancel(waiting.TaskID)
	k.carries("cancelled while it was queued", waiting.TaskID, cancelled, false)

	for _, end := range []commonv1.TaskState{succeeded, failed, cancelled, commonv1.TaskState_TASK_STATE_SUPERSEDED} {
		deployed := k.enqueue(n, carrying)
		ref := k.lease(n)
		k.result(n, ref, end)
		k.carries("reported", deployed.TaskID, end, false)
		other := k.enqueue(n, ofType(restart))
		ref = k.lease(n)
		k.result(n, ref, end)
		k.carries("reported, of another type", other.TaskID, end, false)
	}

	lost := k.enqueue(n, ofType(restart))
	k.result(n, k.lease(n), unknown)
	k.carries("of unknown outcome, and not to be done twice", lost.TaskID, unknown, false)

	unwanted := k.enqueue(n, carrying)
	k.lease(n)
	cancel(unwanted.TaskID)
	k.ready(n)
	k.carries("cancelled before the agent had it", unwanted.TaskID, cancelled, false)

	late := k.enqueue(n, ofType(restart))
	testkit.SetClockOffset(k.db, 2*time.Minute)
	if _, err := k.tasks.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.carries("expired, and not to be done twice", late.TaskID, expired, false)
}

// TestAPayloadWaitsADayForAnotherTry: what has expired, or ended with an unknown outcome, may be queued again for a
// day, and not later.
func TestAPayloadWaitsADayForAnotherTry(t *testing.T) {
	k := newKit(t)
	n := k.node()
	asked, closed := k.enqueue(n, carrying), k.enqueue(n, carrying)
	sweep := func(offset time.Duration) {
		t.Helper()
		testkit.SetClockOffset(k.db, offset)
		if _, err := k.tasks.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sweep(2 * time.Minute)
	k.carries("expired", asked.TaskID, expired, true)
	sweep(23 * time.Hour)
	k.carries("expired a while ago", asked.TaskID, expired, true)
	if _, err := k.change(asked.TaskID, lifecyclev1.TaskVerb_TASK_VERB_REQUEUE); err != nil {
		t.Fatal(err)
	}
	k.carries("queued again", asked.TaskID, queued, true)
	sweep(24*time.Hour + 5*time.Minute)
	k.carries("expired again", asked.TaskID, expired, true)
	k.carries("expired for a day", closed.TaskID, expired, false)
	_, err := k.change(closed.TaskID, lifecyclev1.TaskVerb_TASK_VERB_REQUEUE)
	wantReason(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	sweep(49 * time.Hour)
	k.carries("expired again for a day", asked.TaskID, expired, false)
}
