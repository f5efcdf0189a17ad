package provision

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// The places at which a number that is too low is refused, as the metric labels them.
const (
	atLaunch = "launch"
	atTask   = "task"
	atSchema = "schema"
)

// EpochRefusals counts requests that came with an epoch or an operation sequence that has been passed, by the place at
// which they were refused. A run with such a number fails with the same reason, and its timeline shows it. Recovery
// counts refused mints.
type EpochRefusals struct{ refused *prometheus.CounterVec }

// NewEpochRefusals registers the counter.
func NewEpochRefusals(metrics prometheus.Registerer) (*EpochRefusals, error) {
	s := &EpochRefusals{refused: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stale_epochs_refused_total",
		Help: "Effects with an epoch or operation sequence that has been passed, refused at the launch of an instance, at " +
			"a task " +
			"by its agent, or at a schema by its database, by the reason of the refusal.",
	}, []string{"at", "reason"})}
	for _, at := range []string{atLaunch, atTask, atSchema} {
		for _, reason := range []commonv1.Reason{
			commonv1.Reason_REASON_EPOCH_SUPERSEDED, commonv1.Reason_REASON_EPOCH_ENDED,
			commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
			commonv1.Reason_REASON_TASK_SUPERSEDED,
		} {
			if (at == atLaunch) != (reason == commonv1.Reason_REASON_TASK_SUPERSEDED) {
				s.refused.WithLabelValues(at, obs.ReasonLabel(reason))
			}
		}
	}
	if err := metrics.Register(s.refused); err != nil {
		return nil, fmt.Errorf("register metrics of stale epochs: %w", err)
	}
	return s, nil
}

// Tasks counts tasks whose agent refused them because it has seen a later operation of their workspace.
func (s *EpochRefusals) Tasks(n int) {
	s.refused.WithLabelValues(atTask, obs.ReasonLabel(commonv1.Reason_REASON_TASK_SUPERSEDED)).Add(float64(n))
}

// Note counts err if it is the refusal of a number that has been passed, and returns err. A nil EpochRefusals counts
// nothing.
func (s *EpochRefusals) Note(at string, err error) error {
	e, ok := errors.AsType[*saga.StepError](err)
	if s == nil || !ok {
		return err
	}
	switch e.Reason { // everything else is no matter of epochs
	case commonv1.Reason_REASON_EPOCH_SUPERSEDED, commonv1.Reason_REASON_EPOCH_ENDED,
		commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
		commonv1.Reason_REASON_TASK_SUPERSEDED:
		s.refused.WithLabelValues(at, obs.ReasonLabel(e.Reason)).Inc()
	default:
	}
	return err
}
