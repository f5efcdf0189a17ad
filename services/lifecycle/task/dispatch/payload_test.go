package dispatch_test

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
	err := k.pool.QueryRow(k.t.Context(), `SELECT payload <> '', state FROM lifecycle.task WHERE task_id = $1`,
		taskID).Scan(&got, &is)
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
	s.Payload = &nodev1.WorkloadDeploy{
		Workload:  &nodev1.Workload{Name: "web"},
		SecretEnv: map[string]string{"TOKEN": "secret"},
	}
}

// TestPayloadsGoAtEveryEnd: a payload that may not be sent again is cleared, in whichever state the task ended.
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

	again := k.enqueue(n, carrying)
	k.result(n, k.lease(n), unknown)
	k.carries("of unknown outcome, of a type that may be done twice", again.TaskID, unknown, false)

	late, deploy := k.enqueue(n, ofType(restart)), k.enqueue(n, carrying)
	testkit.SetClockOffset(k.db, 2*time.Minute)
	if _, err := k.tasks.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.carries("expired, and not to be done twice", late.TaskID, expired, false)
	k.carries("expired, of a type that may be done twice", deploy.TaskID, expired, false)
}

// TestOnlyWhatCarriesNothingIsQueuedAgain: a task's payload is cleared at its end, so that only a task which an empty
// payload describes can be queued again.
func TestOnlyWhatCarriesNothingIsQueuedAgain(t *testing.T) {
	k := newKit(t)
	n := k.node()
	probe, deploy := k.enqueue(n), k.enqueue(n, carrying)
	testkit.SetClockOffset(k.db, 2*time.Minute)
	if _, err := k.tasks.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := k.change(deploy.TaskID, lifecyclev1.TaskVerb_TASK_VERB_REQUEUE)
	wantReason(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	if got, err := k.change(probe.TaskID, lifecyclev1.TaskVerb_TASK_VERB_REQUEUE); err != nil || got.GetState() != queued {
		t.Fatalf("requeue of a probe: %v, %v", got, err)
	}
}

// TestPayloadsOfEarlierBuildsAreCleared: a sweep clears the payloads that an earlier build left with tasks that have
// ended, and no payload of a task that has not.
func TestPayloadsOfEarlierBuildsAreCleared(t *testing.T) {
	k := newKit(t)
	n := k.node()
	left, open := k.enqueue(n, carrying), k.enqueue(n, carrying)
	_, err := k.pool.Exec(t.Context(),
		`UPDATE lifecycle.task SET state = 'expired', expires_at = mesh.clock() WHERE task_id = $1`, left.TaskID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.tasks.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.carries("left by an earlier build", left.TaskID, expired, false)
	k.carries("open", open.TaskID, queued, true)
}
