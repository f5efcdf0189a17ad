package provision

import (
	"errors"
	"testing"

	dto "github.com/prometheus/client_model/go"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/obs/obstest"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

func TestStaleEpochsAreCountedByReasonAlone(t *testing.T) {
	registry, err := obs.NewRegistry()
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewEpochRefusals(registry.ForService("lifecycle"))
	if err != nil {
		t.Fatal(err)
	}
	layer := commonv1.OwnerLayer_OWNER_LAYER_DEPLOY
	for _, reason := range []commonv1.Reason{commonv1.Reason_REASON_EPOCH_SUPERSEDED, commonv1.Reason_REASON_NO_CAPACITY} {
		in := saga.Retry(layer, reason, "x", nil)
		if out := s.Note(atLaunch, in); !errors.Is(out, in) {
			t.Errorf("%v became %v", in, out)
		}
	}
	if err := s.Note(atTask, nil); err != nil {
		t.Error(err)
	}
	var none *EpochRefusals
	if err := none.Note(atTask, errors.New("x")); err == nil {
		t.Error("the error was lost")
	}
	read := func(at string, reason commonv1.Reason) float64 {
		var m dto.Metric
		if err := s.refused.WithLabelValues(at, obs.ReasonLabel(reason)).Write(&m); err != nil {
			t.Fatal(err)
		}
		return m.GetCounter().GetValue()
	}
	if n := read(atLaunch, commonv1.Reason_REASON_EPOCH_SUPERSEDED); n != 1 {
		t.Errorf("%v launches counted", n)
	}
	if n := read(atTask, commonv1.Reason_REASON_TASK_SUPERSEDED); n != 0 {
		t.Errorf("%v tasks counted", n)
	}
	s.Tasks(2)
	if n := read(atTask, commonv1.Reason_REASON_TASK_SUPERSEDED); n != 2 {
		t.Errorf("%v tasks counted, want 2", n)
	}
	obstest.Lint(t, registry.Gatherer())
}
