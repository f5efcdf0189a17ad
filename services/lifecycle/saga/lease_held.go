package saga

import (
	"encoding/json"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// noDeadline is the time left (leasedRun.runLeft) that is assumed for a run without a deadline.
const noDeadline = 24 * time.Hour

// left returns how long the open attempt may still wait: to the end of its budget, and in the forward phase not past
// the run's deadline. It is not positive once that time has come.
func (h *leasedRun) left() time.Duration {
	left := h.step().Budget
	if h.attempt.DeadlineAt != nil && h.run.HeartbeatAt != nil {
		left = h.attempt.DeadlineAt.Sub(later(h.attempt.StartedAt, *h.run.HeartbeatAt))
	}
	if h.run.Phase == runs.Do {
		left = min(left, h.runLeft)
	}
	return left
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// openIn copies the attempt that was opened in the run's row into h, with its deadline.
func (h *leasedRun) openIn() {
	h.attempt = runs.Open(&h.run)
	deadline := h.attempt.StartedAt.Add(h.step().Budget)
	h.attempt.DeadlineAt = &deadline
}

// leasedRun is a run that this process drives: its row and its open attempt as of the last transaction.
type leasedRun struct {
	run      runs.Run
	attempt  runs.Attempt
	def      *Definition
	outputs  map[string]json.RawMessage
	overdue  bool // the run is past its deadline
	paused   bool // rollback mode was set at the last transaction
	former   formerLease
	outdrawn bool // numbers of the workspace were drawn since the run was given its range
	// runLeft is how much of the run's deadline was left at the last transaction.
	runLeft time.Duration
}

func (h *leasedRun) step() *Step { return &h.def.Steps[h.run.Step] }

func (h *leasedRun) place() Place {
	return Place{RunID: h.run.ID, Step: h.run.Step, Direction: h.run.Phase}
}
