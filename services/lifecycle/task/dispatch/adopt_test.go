package dispatch_test

import (
	"slices"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// sign makes the envelope that a lease would.
func (k *kit) sign(key envelope.Key, taskID, nodeID string, attempt int32) *nodev1.SignedTask {
	k.t.Helper()
	signed, err := envelope.Sign(key, envelope.Task{
		TaskID: taskID, Type: "probe.noop", NodeID: nodeID, NotBefore: time.Now(), ExpiresAt: time.Now().Add(time.Minute),
		Attempt: attempt,
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return &nodev1.SignedTask{Envelope: signed.Bytes, Signature: signed.Signature, KeyId: signed.KeyID}
}

// offered leases one task and returns its attempt and envelope.
func (k *kit) offered(n *node) (*nodev1.TaskRef, *nodev1.SignedTask) {
	k.t.Helper()
	res := k.leaseOf(n)
	if len(res.GetTasks()) != 1 {
		k.t.Fatalf("leased %d tasks, refused %v", len(res.GetTasks()), res.GetRefused())
	}
	one := res.GetTasks()[0]
	return one.GetTask(), &nodev1.SignedTask{
		Envelope: one.GetOffer().GetEnvelope(), Signature: one.GetOffer().GetSignature(), KeyId: one.GetOffer().GetKeyId(),
	}
}

// setBack puts a row to where it stood before its lease, as a restore does.
func (k *kit) setBack(taskID string, state commonv1.TaskState, attempt int32) {
	k.t.Helper()
	_, err := k.pool.Exec(k.t.Context(),
		`UPDATE lifecycle.task SET state = $2, attempt = $3, output = '', session_epoch = 0, session_id = NULL
			WHERE task_id = $1`, taskID, names.Of(state), attempt)
	if err != nil {
		k.t.Fatal(err)
	}
}

// TestAProvenAttemptIsAdopted sets the row back to before its lease, and lets the node report with the envelope of that
// lease: with the result, and with the report of the delivery.
func TestAProvenAttemptIsAdopted(t *testing.T) {
	for name, byResult := range map[string]bool{"result": true, "delivery": false} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			n := k.node()
			row := k.enqueue(n, ofRun(ids.New()))
			ref, signed := k.offered(n)
			k.setBack(row.TaskID, queued, 0)
			if !byResult {
				res := k.report(n, func(r *lifecyclev1.NodeReport) {
					r.Delivered, r.Signed = []*nodev1.TaskRef{ref}, []*nodev1.SignedTask{signed}
				})
				if len(res.GetRefused()) != 0 {
					t.Fatalf("refused %v", res.GetRefused())
				}
				k.wants(row.TaskID, delivered, 1, 0)
				signed = nil // the row knows the attempt now
			}
			res := k.report(n, func(r *lifecyclev1.NodeReport) {
				r.Results = []*nodev1.TaskResult{{Task: ref, State: succeeded, Output: []byte("out"), Signed: signed}}
			})
			if len(res.GetAcknowledged()) != 1 || len(res.GetRefused()) != 0 {
				t.Errorf("answered %v", res)
			}
			k.wants(row.TaskID, succeeded, 1, 0)
			if got := k.row(row.TaskID).Output; got != "out" {
				t.Errorf("output %q", got)
			}
			if k.wakes() != 1 {
				t.Errorf("the run was woken %d times", k.wakes())
			}
			if history := k.history(row.TaskID); history[len(history)-1] != "succeeded" {
				t.Errorf("history %v", history)
			}
		})
	}
}

// TestAnAttemptOfAFormerKeyIsAdopted proves an attempt with a key that does not sign at present and is still in the
// set.
func TestAnAttemptOfAFormerKeyIsAdopted(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n)
	ref := &nodev1.TaskRef{TaskId: row.TaskID, Attempt: 3}
	res := k.report(n, func(r *lifecyclev1.NodeReport) {
		r.Results = []*nodev1.TaskResult{{Task: ref, State: succeeded, Signed: k.sign(k.former, row.TaskID, n.id, 3)}}
	})
	if len(res.GetAcknowledged()) != 1 {
		t.Errorf("answered %v", res)
	}
	k.wants(row.TaskID, succeeded, 3, 0)
}

// TestWhatProvesNothingIsRefused reports an attempt above the row's with envelopes that are not of ours, not for this
// node, task or attempt, and with none.
func TestWhatProvesNothingIsRefused(t *testing.T) {
	k := newKit(t)
	n, other := k.node(), k.node()
	row := k.enqueue(n)
	second := k.enqueue(other)
	ref := &nodev1.TaskRef{TaskId: row.TaskID, Attempt: 2}
	stranger := envelope.NewKey(private(t))
	broken := k.sign(k.key, row.TaskID, n.id, 2)
	broken.Envelope[len(broken.GetEnvelope())-1] ^= 1
	forged := k.sign(stranger, row.TaskID, n.id, 2)
	forged.KeyId = k.key.ID()
	cases := map[string]struct {
		signed *nodev1.SignedTask
		want   commonv1.Reason
		wanted bool
	}{
		"none":            {nil, commonv1.Reason_REASON_TASK_NOT_CURRENT, true},
		"another key":     {k.sign(stranger, row.TaskID, n.id, 2), commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		"forged":          {forged, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		"changed":         {broken, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		"empty":           {&nodev1.SignedTask{}, commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, false},
		"another node":    {k.sign(k.key, row.TaskID, other.id, 2), commonv1.Reason_REASON_TASK_WRONG_NODE, false},
		"another task":    {k.sign(k.key, second.TaskID, n.id, 2), commonv1.Reason_REASON_TASK_NOT_CURRENT, false},
		"another attempt": {k.sign(k.key, row.TaskID, n.id, 3), commonv1.Reason_REASON_TASK_NOT_CURRENT, false},
	}
	for name, c := range cases {
		for kind, fill := range map[string]func(*lifecyclev1.NodeReport){
			"result": func(r *lifecyclev1.NodeReport) {
				r.Results = []*nodev1.TaskResult{
					{Task: ref, State: succeeded, Signed: c.signed},
					{Task: ref, State: failed, Signed: c.signed},
				}
			},
			"delivered": func(r *lifecyclev1.NodeReport) { r.Delivered = []*nodev1.TaskRef{ref} },
			"started":   func(r *lifecyclev1.NodeReport) { r.Started = []*nodev1.TaskStarted{{Task: ref}} },
			"progress":  func(r *lifecyclev1.NodeReport) { r.Progress = []*nodev1.TaskProgress{{Task: ref, Note: "half"}} },
		} {
			if kind != "result" && c.signed != nil {
				continue
			}
			res := k.report(n, fill)
			if len(res.GetAcknowledged()) != 0 || len(res.GetRefused()) != 1 {
				t.Errorf("%s, %s: answered %v", name, kind, res)
				continue
			}
			one := res.GetRefused()[0]
			if one.GetDenial().GetReason() != c.want || one.GetEnvelopeWanted() != c.wanted || one.GetTask().GetAttempt() != 2 {
				t.Errorf("%s, %s: refused with %v", name, kind, one)
			}
			if one.GetDenial().GetAction() != commonv1.Action_ACTION_STOP || one.GetDenial().GetRemedy() == "" {
				t.Errorf("%s, %s: %v", name, kind, one.GetDenial())
			}
		}
	}
	k.wants(row.TaskID, queued, 0, 0)
	k.wantHistory(row.TaskID, "queued")
}

// TestAProvenAttemptOfAnEndedTaskIsEvidence: the task stays ended, and its attempt is raised so that no lease draws it
// again.
func TestAProvenAttemptOfAnEndedTaskIsEvidence(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofRun(ids.New()))
	ref, signed := k.offered(n)
	k.setBack(row.TaskID, unknown, 0)
	res := k.report(n, func(r *lifecyclev1.NodeReport) {
		r.Results = []*nodev1.TaskResult{{Task: ref, State: succeeded, Signed: signed}}
	})
	if len(res.GetAcknowledged()) != 1 {
		t.Errorf("answered %v", res)
	}
	k.wants(row.TaskID, unknown, 1, 1)
	if k.wakes() != 0 {
		t.Errorf("the run was woken %d times", k.wakes())
	}
}

// TestALaterAttemptIsHeldBackForItsProof opens a session whose agent has an attempt that the row has lost: it is
// neither cancelled nor overtaken by an offer of the row's own attempt.
func TestALaterAttemptIsHeldBackForItsProof(t *testing.T) {
	for _, state := range []commonv1.TaskState{queued, dispatched, running} {
		k := newKit(t)
		testkit.StopClock(k.db)
		n := k.node()
		row := k.enqueue(n, func(s *task.Spec) { s.StartWithin = time.Hour })
		attempt := int32(1)
		if state == queued {
			attempt = 0
		}
		ref := &nodev1.TaskRef{TaskId: row.TaskID, Attempt: attempt + 1}
		signed := k.sign(k.key, row.TaskID, n.id, ref.GetAttempt())
		k.setBack(row.TaskID, state, attempt)
		ready := k.ready(n, inFlight(ref, running))
		if slices.ContainsFunc(ready.GetCancel(),
			func(c *nodev1.TaskRef) bool { return c.GetAttempt() == ref.GetAttempt() }) {
			t.Errorf("%s: the later attempt is cancelled", names.Of(state))
		}
		if got := k.leaseOf(n); len(got.GetTasks()) != 0 {
			t.Errorf("%s: attempt %d is offered before the later one could be proven", names.Of(state),
				got.GetTasks()[0].GetTask().GetAttempt())
		}
		k.report(n, func(r *lifecyclev1.NodeReport) {
			r.Delivered, r.Started, r.Signed = []*nodev1.TaskRef{ref}, []*nodev1.TaskStarted{{Task: ref}},
				[]*nodev1.SignedTask{signed}
		})
		k.wants(row.TaskID, running, ref.GetAttempt(), 0)
	}
}

// TestAnUnprovenAttemptHoldsNothingUp offers the row's own attempt after a moment, if the later one is never proven.
func TestAnUnprovenAttemptHoldsNothingUp(t *testing.T) {
	for _, state := range []commonv1.TaskState{queued, dispatched} {
		k := newKit(t)
		n := k.node()
		row := k.enqueue(n, func(s *task.Spec) { s.StartWithin = time.Hour })
		k.setBack(row.TaskID, state, 1)
		k.ready(n, inFlight(&nodev1.TaskRef{TaskId: row.TaskID, Attempt: 9}, running))
		if _, err := k.db.OwnerPool().Exec(t.Context(),
			`UPDATE mesh.clock_offset SET by = interval '3 seconds'`); err != nil {
			t.Fatal(err)
		}
		if got := k.leaseOf(n); len(got.GetTasks()) != 1 {
			t.Errorf("%s: leased %d tasks", names.Of(state), len(got.GetTasks()))
		}
	}
}
