package kit

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
)

// Options of a run of drills.
type Options struct {
	Logger *slog.Logger
	// Controls run after each drill, with their results inverted.
	Controls []Control
	// Each is called with every result as it comes; it may be nil.
	Each func(Result)
}

// All runs drills one after the other on one mesh and returns their results. The error is one of the mesh, not of a
// drill.
func All(ctx context.Context, m *mesh.Mesh, drills []Drill, o Options) ([]Result, error) {
	var out []Result
	for _, d := range drills {
		var seenIn time.Duration
		for _, c := range append([]Control{None}, o.Controls...) {
			if err := ctx.Err(); err != nil {
				return out, context.Cause(ctx)
			}
			r := one(ctx, m, d, c, seenIn, o.Logger)
			if c == None && r.Passed {
				seenIn = time.Duration(r.DetectedSeconds * float64(time.Second))
			}
			out = append(out, r)
			if o.Each != nil {
				o.Each(r)
			}
		}
	}
	return out, nil
}

// one runs one drill, or one of its controls after a run of the drill that took seenIn to detect.
func one(ctx context.Context, m *mesh.Mesh, d Drill, control Control, seenIn time.Duration,
	logger *slog.Logger,
) Result {
	began := time.Now()
	b := d.Budget()
	out := Result{
		Name: d.Name, Severity: b.Severity.String(), Row: b.Row, Form: m.Form(), Control: string(control),
		Recovery: string(b.Recovery), StartedAt: began.UTC(), EvidenceIDs: []string{}, Notes: []string{},
		RecoveryBudgetSeconds: d.RecoverWithin(m.Scaled).Seconds(),
	}
	if control != None {
		out.Name += "/" + string(control)
	}
	r := &Run{
		Drill: d, Control: control, Mesh: m, Logger: logger.With(slog.String("drill", out.Name)), Result: &out,
		seenIn: seenIn,
	}
	err := r.whole(ctx)
	out.ElapsedSeconds = Seconds(time.Since(began))
	if failed, ok := stage.Of(err); ok {
		out.Stage = string(failed)
	}
	if control == None {
		out.Passed = err == nil
		if err != nil {
			out.Why = err.Error()
		}
		return out
	}
	out.Passed, out.Why = inverted(d, control, err)
	return out
}

// inverted judges a control: it passes if the drill failed, and at the stage at which it had to. A drill that failed
// for any other cause proves nothing.
func inverted(d Drill, control Control, err error) (bool, string) {
	want := stage.Injected
	if control == Mutated {
		want = d.FailsAt
	}
	failed, ok := stage.Of(err)
	switch {
	case err == nil && control == Withheld:
		return false, "the drill passed though no fault was injected"
	case err == nil:
		return false, "the drill passed though its detector was mutated: " + d.Mutation
	case !ok || failed != want:
		return false, fmt.Sprintf("the drill had to fail at the stage %s, and failed otherwise: %v", want, err)
	default:
		return true, "failed as it had to: " + err.Error()
	}
}
