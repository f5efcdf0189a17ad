package nodeapi_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

const invented = 1000 // the first invented attempt; higher numbers are invented too

func isRefusal(f *nodev1.ConnectResponse) bool { return f.GetTaskReportRefused() != nil }

// refusing makes a backend refuse reports of invented attempts.
func refusing(p *nodeapitest.Backend) {
	p.Refuse = func(f *nodev1.TaskResult) *lifecyclev1.TaskRefusal {
		if f.GetTask().GetAttempt() < invented {
			return nil
		}
		denial := fault.ToDenial(fault.New(commonv1.Reason_REASON_TASK_NOT_CURRENT, ""), "")
		return &lifecyclev1.TaskRefusal{Task: f.GetTask(), Denial: denial, EnvelopeWanted: f.GetSigned() == nil}
	}
}

// TestAReportIsRefusedByName: the refusal names the attempt, the reason, and whether the attempt's envelope would help;
// four refusals leave the session open.
func TestAReportIsRefusedByName(t *testing.T) {
	k := newKit(t, refusing)
	a := k.session(k.replica())
	task := ids.New()
	for i := range int32(4) {
		ref := &nodev1.TaskRef{TaskId: task, Attempt: invented + i}
		a.send(result(ref, nil))
		refused := a.next("a refusal", isRefusal).GetTaskReportRefused()
		if len(refused.GetTasks()) != 1 || refused.GetTasks()[0].GetAttempt() != ref.GetAttempt() ||
			!refused.GetEnvelopeWanted() ||
			refused.GetDenial().GetReason() != commonv1.Reason_REASON_TASK_NOT_CURRENT {
			t.Errorf("refused with %v", refused)
		}
	}
	good := &nodev1.TaskRef{TaskId: task, Attempt: 1}
	a.send(result(good, nil))
	if ack := a.next("an acknowledgement", isAck).GetTaskResultAck(); len(ack.GetTasks()) != 1 ||
		ack.GetTasks()[0].GetAttempt() != 1 {
		t.Errorf("acknowledged %v", ack)
	}
}

// TestTheFifthRefusedReportEndsTheSession sends invented attempts as a faulty agent does, without reading the answers.
func TestTheFifthRefusedReportEndsTheSession(t *testing.T) {
	k := newKit(t, refusing)
	r := k.replica()
	a, other := k.session(r), k.session(r)
	task := ids.New()
	for i := range int32(5) {
		a.send(result(&nodev1.TaskRef{TaskId: task, Attempt: invented + i}, nil))
	}
	denial := a.denied(commonv1.Reason_REASON_PROTOCOL_VIOLATION)
	if denial.GetAction() != commonv1.Action_ACTION_WAIT || denial.GetRetryAfter().AsDuration() <= 0 ||
		denial.GetRemedy() == "" {
		t.Errorf("denied with %v", denial)
	}
	other.send(result(&nodev1.TaskRef{TaskId: task, Attempt: 1}, nil))
	other.next("an acknowledgement", isAck)
}

// TestEnvelopesReachLifecycle checks that the envelopes of deliveries come with the report of the node, and that of a
// result with the result.
func TestEnvelopesReachLifecycle(t *testing.T) {
	k := newKit(t)
	a := k.session(k.replica())
	ref, other := &nodev1.TaskRef{TaskId: ids.New(), Attempt: 2}, &nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}
	signed := &nodev1.SignedTask{Envelope: []byte("envelope"), Signature: []byte("signature"), KeyId: "k"}
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskDelivered{
		TaskDelivered: &nodev1.TaskDelivered{Tasks: []*nodev1.TaskRef{ref}, Signed: []*nodev1.SignedTask{signed}},
	}})
	a.send(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_TaskResult{
		TaskResult: &nodev1.TaskResult{Task: other, State: commonv1.TaskState_TASK_STATE_SUCCEEDED, Signed: signed},
	}})
	a.next("an acknowledgement", isAck)
	var withDelivery, withResult bool
	for _, r := range k.backend.Reports() {
		withDelivery = withDelivery || len(r.GetDelivered()) == 1 && len(r.GetSigned()) == 1 &&
			r.GetSigned()[0].GetKeyId() == "k"
		for _, f := range r.GetResults() {
			withResult = withResult || string(f.GetSigned().GetEnvelope()) == "envelope"
		}
	}
	if !withDelivery || !withResult {
		t.Errorf("reported %v", k.backend.Reports())
	}
}
