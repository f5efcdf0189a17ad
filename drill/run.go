package drill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/app"
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

// Options of a run of drills.
type Options struct {
	Logger *slog.Logger
	// Controls runs each drill's two controls after it, and inverts their results.
	Controls bool
	// Each is called with every result as it comes; it may be nil.
	Each func(Result)
}

// All runs drills one after the other on one mesh and returns their results. The error is one of the mesh, not of a
// drill.
func All(ctx context.Context, m *Mesh, drills []Drill, o Options) ([]Result, error) {
	var out []Result
	for _, d := range drills {
		controls := []Control{None}
		if o.Controls {
			controls = append(controls, Withheld, Mutated)
		}
		for _, c := range controls {
			if err := ctx.Err(); err != nil {
				return out, context.Cause(ctx)
			}
			r := One(ctx, m, d, c, o.Logger)
			out = append(out, r)
			if o.Each != nil {
				o.Each(r)
			}
		}
	}
	return out, nil
}

// One runs one drill, or one of its controls.
func One(ctx context.Context, m *Mesh, d Drill, control Control, logger *slog.Logger) Result {
	began := time.Now()
	b := d.Budget()
	out := Result{
		Name: d.Name, Severity: b.Severity.String(), Row: b.Row, Form: m.form(), Control: string(control),
		Recovery: string(b.Recovery), StartedAt: began.UTC(), EvidenceIDs: []string{}, Notes: []string{},
		RecoveryBudgetSeconds: d.recoverWithin(m.Scaled).Seconds(),
	}
	if control != None {
		out.Name += "/" + string(control)
	}
	r := &Run{Drill: d, Control: control, Mesh: m, Logger: logger.With(slog.String("drill", out.Name)), result: &out}
	err := r.whole(ctx)
	out.ElapsedSeconds = round(time.Since(began))
	if failed, ok := stageOf(err); ok {
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
	want := StageInjected
	if control == Mutated {
		want = d.mutated
	}
	failed, ok := stageOf(err)
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

// inject makes the fault, unless it is withheld, and verifies by proof, which shares no code with the detector, that it
// took effect.
func (r *Run) inject(ctx context.Context, what string, do, proof func(ctx context.Context) error) error {
	var err error
	if r.before, err = readWorld(ctx, r.Mesh, r.subject); err != nil {
		return at(StageGood, err)
	}
	r.faultAt = time.Now()
	if r.Control != Withheld {
		if err := do(ctx); err != nil {
			return at(StageInjected, fmt.Errorf("%s: %w", what, err))
		}
	}
	if err := await(ctx, "the fault to take", took, proof); err != nil {
		return at(StageInjected, fmt.Errorf("%s: %w", what, err))
	}
	r.result.Injected, r.result.InjectedBy = true, what
	r.note("injected: %s", what)
	return nil
}

// took is how long a fault may take until the host shows it.
const took = 3 * time.Second

// detect polls the API until it gives a verdict, at most for the detection budget.
func (r *Run) detect(ctx context.Context, look func(ctx context.Context) (Verdict, error)) error {
	budget := time.Duration(r.result.DetectionBudgetSeconds * float64(time.Second))
	err := await(ctx, "the verdict", max(time.Until(r.faultAt.Add(budget)), time.Millisecond),
		func(ctx context.Context) error {
			v, err := look(ctx)
			if err == nil {
				r.verdict = v
			}
			return err
		})
	after := time.Since(r.faultAt)
	if err != nil {
		return at(StageDetected, err)
	}
	r.result.DetectedSeconds, r.result.Reason, r.result.UserState = round(after), r.verdict.Reason, r.verdict.UserState
	r.note("detected after %.2f s: %s, %s", after.Seconds(), r.verdict.Reason, r.verdict.UserState)
	if after > budget {
		return at(StageDetected, fmt.Errorf("the verdict came after %.1f s, later than %.1f s", after.Seconds(),
			budget.Seconds()))
	}
	return nil
}

// check compares the verdict with the row's, reads the owner of the reason and the remedy from the API, and checks that
// nothing unrelated changed.
func (r *Run) check(ctx context.Context) error {
	want := r.Drill.Expect
	got, err := explain(ctx, r.Mesh, r.verdict)
	if err != nil {
		return at(StageVerdict, err)
	}
	r.result.Owner, r.result.NextAction = got.Owner, got.Next
	var wrong []string
	for _, c := range []struct{ what, want, got string }{
		{"reason", want.Reason, got.Reason}, {"user_state", want.UserState, got.UserState}, {"owner", want.Owner, got.Owner},
	} {
		if c.want != c.got {
			wrong = append(wrong, fmt.Sprintf("%s is %q, not %q", c.what, c.got, c.want))
		}
	}
	if !strings.Contains(got.Next, want.Next) || got.Next == "" {
		wrong = append(wrong, fmt.Sprintf("the next action is %q and does not speak of %q", got.Next, want.Next))
	}
	now, err := readWorld(ctx, r.Mesh, r.subject)
	if err != nil {
		return at(StageVerdict, err)
	}
	wrong = append(wrong, r.before.changed(now)...)
	if len(wrong) > 0 {
		return at(StageVerdict, errors.New(strings.Join(wrong, "; ")))
	}
	r.note("unrelated layers stayed as they were: %d workspaces, %d nodes", len(now.workspaces), len(now.nodes))
	return nil
}

// recovered waits until the evidence of recovery is complete, at most for the recovery budget.
func (r *Run) recovered(ctx context.Context, what string, checklist func(ctx context.Context) error) error {
	budget := r.Drill.recoverWithin(r.Mesh.Scaled)
	err := await(ctx, what, max(time.Until(r.faultAt.Add(budget)), time.Millisecond), checklist)
	after := time.Since(r.faultAt)
	if err == nil && after > budget {
		err = fmt.Errorf("%s took %.1f s, longer than %.1f s", what, after.Seconds(), budget.Seconds())
	}
	if err != nil {
		return at(StageRecover, err)
	}
	r.result.RecoveredSeconds = round(after)
	r.note("recovered after %.2f s: %s", after.Seconds(), what)
	return nil
}

// pause returns how long to wait between two checks after having waited so long: a fiftieth of that, from 50 to 250
// milliseconds.
func pause(waited time.Duration) time.Duration {
	return min(max(waited/50, 50*time.Millisecond), 250*time.Millisecond)
}

// await checks again until do succeeds or limit has passed; then its error names the awaited condition, with the last
// error of do.
func await(ctx context.Context, what string, limit time.Duration, do func(ctx context.Context) error) error {
	began := time.Now()
	for {
		err := do(ctx)
		if err == nil {
			return nil
		}
		if _, final := stageOf(err); final {
			return err
		}
		if time.Since(began) > limit {
			return fmt.Errorf("waited %.1f s for %s: %w", time.Since(began).Seconds(), what, err)
		}
		if !app.Sleep(ctx, pause(time.Since(began))) {
			return fmt.Errorf("waited %.1f s for %s: %w", time.Since(began).Seconds(), what,
				errors.Join(context.Cause(ctx), err))
		}
	}
}

func round(d time.Duration) float64 { return float64(d.Round(time.Millisecond)) / float64(time.Second) }
