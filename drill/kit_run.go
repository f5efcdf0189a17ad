package drill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/policy"
)

// Run is one drill under way.
type Run struct {
	Drill   Drill
	Control Control
	Mesh    *Mesh
	Logger  *slog.Logger

	policy  policy.Set
	faultAt time.Time
	before  world
	subject []string // ids of workspaces and nodes that the fault is about
	verdict Verdict
	result  *Result
}

func (r *Run) whole(ctx context.Context) error {
	if err := r.Drill.Able(); err != nil {
		return at(StageGood, err)
	}
	set, err := r.Mesh.policy(ctx)
	if err != nil {
		return at(StageGood, err)
	}
	r.policy = set
	r.result.DetectionBudgetSeconds = r.Drill.detectWithin(set, r.Mesh.Scaled).Seconds()
	r.result.DetectionP95 = r.result.DetectionBudgetSeconds / 2
	if r.Drill.Budget().Deadline {
		r.result.DetectionP95 = r.result.DetectionBudgetSeconds
	}
	if err := r.Mesh.good(ctx); err != nil {
		return at(StageGood, err)
	}
	comeToRest(ctx, r.Mesh)
	if r.Control == Mutated && r.Drill.mutate != nil {
		// The budget stays as it was: the mutation changes the detector, not its budget.
		undo, err := r.Drill.mutate(ctx, r)
		if err != nil {
			return fmt.Errorf("mutate the detector: %w", err)
		}
		err = r.Drill.run(ctx, r)
		return errors.Join(err, undo(context.WithoutCancel(ctx)))
	}
	return r.Drill.run(ctx, r)
}

// note logs the step under way, and keeps it with the result.
func (r *Run) note(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	r.Logger.Info("step of a drill", slog.String("step", line))
	r.result.Notes = append(r.result.Notes, line)
}

// about names the objects of the fault: they are traced, and they alone may change.
func (r *Run) about(ids ...string) {
	for _, id := range ids {
		if id != "" && !slices.Contains(r.subject, id) {
			r.subject = append(r.subject, id)
		}
		r.evidence(id)
	}
}

// evidence adds ids by which the events of the drill can be found.
func (r *Run) evidence(ids ...string) {
	for _, id := range ids {
		if id != "" && !slices.Contains(r.result.EvidenceIDs, id) {
			r.result.EvidenceIDs = append(r.result.EvidenceIDs, id)
		}
	}
}

func seconds(d time.Duration) float64 { return float64(d.Round(time.Millisecond)) / float64(time.Second) }
