package lease

import (
	"encoding/json"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// noDeadline is the time left (Run.RunLeft) that is assumed for a run without a deadline.
const noDeadline = 24 * time.Hour

// Left returns how long the open attempt may still wait: to the end of its budget, and in the forward phase not past
// the run's deadline. It is not positive once that time has come.
func (h *Run) Left() time.Duration {
	left := h.Step().Budget
	if h.Attempt.DeadlineAt != nil && h.Run.HeartbeatAt != nil {
		left = h.Attempt.DeadlineAt.Sub(later(h.Attempt.StartedAt, *h.Run.HeartbeatAt))
	}
	if h.Run.Phase == runs.Do {
		left = min(left, h.RunLeft)
	}
	return left
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// OpenNext copies the attempt that was opened in the run's row into h, as the first of a step, with what is left of the
// run's deadline at its start.
func (h *Run) OpenNext() {
	h.Attempt = h.Def.Open(&h.Run)
	h.RunLeft = noDeadline
	if h.Run.DeadlineAt != nil {
		h.RunLeft = h.Run.DeadlineAt.Sub(h.Attempt.StartedAt)
	}
	h.Overdue = h.RunLeft <= 0
}

// Run is a run that this process drives: its row and its open attempt as of the last transaction.
type Run struct {
	Run     runs.Run
	Attempt runs.Attempt
	Def     *saga.Definition
	Outputs map[string]json.RawMessage
	Overdue bool   // the run is past its deadline
	Paused  bool   // rollback mode was set at the last transaction
	Stage   string // of an earlier attempt at the step: where the open one may go on
	former  formerLease
	// rangePassed is set if the workspace has numbers above the run's range: a build without ranges has drawn them.
	rangePassed bool
	// RunLeft is how much of the run's deadline was left at the last transaction.
	RunLeft time.Duration
}

// Step returns the step at which the run is.
func (h *Run) Step() *saga.Step { return &h.Def.Steps[h.Run.Step] }

// Place returns where the run is.
func (h *Run) Place() saga.Place {
	return saga.Place{RunID: h.Run.ID, Step: h.Run.Step, Direction: h.Run.Phase}
}
