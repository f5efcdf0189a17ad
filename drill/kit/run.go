package kit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	"github.com/gpuaas/mesh/internal/policy"
)

// Run is one drill under way.
type Run struct {
	Drill   Drill
	Control Control
	Mesh    *mesh.Mesh
	Logger  *slog.Logger

	Policy  policy.Set // that the mesh runs with
	FaultAt time.Time  // budgets count from it
	before  world
	Subject []string      // ids of workspaces and nodes that the fault is about
	Verdict Verdict       // as detected
	seenIn  time.Duration // how long the drill took to detect before this control of it; zero: that is not known
	Result  *Result

	finally   bool          // a step is under way that puts the mesh right
	finalTook time.Duration // by those that have ended
	left      error         // what the drill has not put right
}

func (r *Run) whole(ctx context.Context) error {
	ctx, cancel := r.limited(ctx)
	defer cancel()
	if err := r.Drill.Able(); err != nil {
		return stage.At(stage.Good, err)
	}
	set, err := r.Mesh.Policy(ctx)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.Policy = set
	r.Result.DetectionBudgetSeconds = r.Drill.detectWithin(set, r.Mesh.Scaled).Seconds()
	r.Result.DetectionP95 = r.Result.DetectionBudgetSeconds / 2
	if r.Drill.Budget().Deadline {
		r.Result.DetectionP95 = r.Result.DetectionBudgetSeconds
	}
	if err := r.Mesh.Good(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	if err := comeToRest(ctx, r.Mesh); err != nil {
		r.Note("the mesh is drilled as it is: %v", err)
	}
	err = r.drilled(ctx)
	r.Finally(ctx, func(ctx context.Context) { r.Left("the mesh", comeToRest(ctx, r.Mesh)) })
	if err == nil && r.Control == None {
		return stage.At(stage.Recover, r.left)
	}
	return err
}

// Left records that what the drill has changed is not as it was, unless err is nil: the drill has failed then.
func (r *Run) Left(what string, err error) {
	if err == nil {
		return
	}
	err = fmt.Errorf("%s is not as it was: %w", what, err)
	r.Note("%v", err)
	r.left = errors.Join(r.left, err)
}

// drilled runs the drill, with its detector mutated if that is the control.
func (r *Run) drilled(ctx context.Context) error {
	if r.Control != Mutated || r.Drill.Mutate == nil {
		return r.Drill.Run(ctx, r)
	}
	// The budget stays as it was: the mutation changes the detector, not its budget.
	undo, err := r.Drill.Mutate(ctx, r)
	if err == nil {
		err = r.Drill.Run(ctx, r)
	} else {
		err = fmt.Errorf("mutate the detector: %w", err)
	}
	if undo == nil {
		return err
	}
	r.Finally(ctx, func(ctx context.Context) { err = errors.Join(err, undo(ctx)) })
	return err
}

// Note logs the step under way, and keeps it with the result.
func (r *Run) Note(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	r.Logger.Info("step of a drill", slog.String("step", line))
	r.Result.Notes = append(r.Result.Notes, line)
}

// About names the objects of the fault: they are traced, and they alone may change.
func (r *Run) About(ids ...string) {
	for _, id := range ids {
		if id != "" && !slices.Contains(r.Subject, id) {
			r.Subject = append(r.Subject, id)
		}
		r.Evidence(id)
	}
}

// Evidence adds ids by which the events of the drill can be found.
func (r *Run) Evidence(ids ...string) {
	for _, id := range ids {
		if id != "" && !slices.Contains(r.Result.EvidenceIDs, id) {
			r.Result.EvidenceIDs = append(r.Result.EvidenceIDs, id)
		}
	}
}

// Seconds returns a duration in seconds, to the millisecond.
func Seconds(d time.Duration) float64 {
	return float64(d.Round(time.Millisecond)) / float64(time.Second)
}
