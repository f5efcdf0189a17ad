package agent

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

func TestRecordsOfRefusalsAreBounded(t *testing.T) {
	const forged, wrong = commonv1.Reason_REASON_TASK_SIGNATURE_INVALID, commonv1.Reason_REASON_TASK_WRONG_NODE
	var r refusals
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, step := range []struct {
		after  time.Duration
		reason commonv1.Reason
		more   int
		due    bool
	}{
		{0, forged, 0, true},
		{time.Second, forged, 0, false},
		{time.Second, wrong, 0, true}, // a rare reason is recorded during a flood of another one
		{refusalEvery - time.Second, forged, 0, false},
		{refusalEvery, forged, 2, true},
		{refusalEvery + time.Second, wrong, 0, true},
		{2 * refusalEvery, forged, 0, true},
	} {
		if more, due := r.due(step.reason, at.Add(step.after)); more != step.more || due != step.due {
			t.Errorf("%v after %v: %d more, due %v; want %d, %v", step.reason, step.after, more, due, step.more, step.due)
		}
	}
}
