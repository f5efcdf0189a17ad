package kit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// explain adds the owner of the verdict's reason and its remedy, as the API explains them.
func explain(ctx context.Context, m *mesh.Mesh, v Verdict) (Verdict, error) {
	var items []*readmodelv1.ReasonText
	err := await.Until(ctx, "the explanation of "+v.Reason, await.Patience, func(ctx context.Context) error {
		resp, err := m.Client.Query.ExplainReason(ctx, &readmodelv1.ExplainReasonRequest{Code: v.Reason})
		items = resp.GetItems()
		if err != nil && !await.Passing(err) {
			return stage.At(stage.Verdict, err)
		}
		return err
	})
	if err != nil {
		return v, err
	}
	if len(items) != 1 {
		return v, fmt.Errorf("the API explains the reason %q %d times", v.Reason, len(items))
	}
	v.Owner = items[0].GetOwner()
	if v.Next == "" {
		v.Next = items[0].GetNextAction()
	}
	return v, nil
}

// Inject makes the fault, unless it is withheld, and verifies by proof, which shares no code with the detector, that it
// took effect.
func (r *Run) Inject(ctx context.Context, what string, do, proof func(ctx context.Context) error) error {
	var err error
	if r.before, err = readWorld(ctx, r.Mesh, r.Subject); err != nil {
		return stage.At(stage.Good, err)
	}
	r.FaultAt = time.Now()
	if r.Control != Withheld {
		if err := do(ctx); err != nil {
			return stage.At(stage.Injected, fmt.Errorf("%s: %w", what, err))
		}
	}
	if err := await.Until(ctx, "the fault to take", await.Took, proof); err != nil {
		return stage.At(stage.Injected, fmt.Errorf("%s: %w", what, err))
	}
	r.Result.Injected, r.Result.InjectedBy = true, what
	r.Note("injected: %s", what)
	return nil
}

// A mutated detector that is not to detect anything is given several times as long as the present one has needed, and
// some seconds at least: a mutation puts its detector out of reach altogether.
const (
	mutatedTimes = 3
	mutatedLeast = 8 * time.Second
)

// patience returns how long a verdict may take: the detection budget, or less of a mutated detector.
func (r *Run) patience() time.Duration {
	budget := time.Duration(r.Result.DetectionBudgetSeconds * float64(time.Second))
	if r.Control != Mutated || r.Drill.FailsAt != stage.Detected || r.seenIn == 0 {
		return budget
	}
	return min(budget, max(mutatedTimes*r.seenIn, mutatedLeast))
}

// Detect polls the API until it gives a verdict, at most for the detection budget.
func (r *Run) Detect(ctx context.Context, detect func(ctx context.Context) (Verdict, error)) error {
	budget := r.patience()
	err := await.Until(ctx, "the verdict", max(time.Until(r.FaultAt.Add(budget)), time.Millisecond),
		func(ctx context.Context) error {
			v, err := detect(ctx)
			if err == nil {
				r.Verdict = v
			}
			return err
		})
	after := time.Since(r.FaultAt)
	if err != nil {
		return stage.At(stage.Detected, err)
	}
	r.Result.DetectedSeconds, r.Result.Reason, r.Result.UserState = Seconds(after), r.Verdict.Reason, r.Verdict.UserState
	r.Note("detected after %.2f s: %s, %s", after.Seconds(), r.Verdict.Reason, r.Verdict.UserState)
	if after > budget {
		return stage.At(stage.Detected, fmt.Errorf("the verdict came after %.1f s, later than %.1f s", after.Seconds(),
			budget.Seconds()))
	}
	return nil
}

// Check compares the verdict with the row's, reads the owner of the reason and the remedy from the API, and checks that
// nothing unrelated changed.
func (r *Run) Check(ctx context.Context) error {
	want := r.Drill.Expect
	got, err := explain(ctx, r.Mesh, r.Verdict)
	if err != nil {
		return stage.At(stage.Verdict, err)
	}
	r.Result.Owner, r.Result.NextAction = got.Owner, got.Next
	r.keepNodes(ctx)
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
	now, err := readWorld(ctx, r.Mesh, r.Subject)
	if err != nil {
		return stage.At(stage.Verdict, err)
	}
	wrong = append(wrong, r.before.changed(now)...)
	if len(wrong) > 0 {
		return stage.At(stage.Verdict, errors.New(strings.Join(wrong, "; ")))
	}
	r.Note("unrelated layers stayed as they were: %d workspaces, %d nodes", len(now.workspaces), len(now.nodes))
	return nil
}

// keepNodes keeps what the API shows of the nodes that the fault is about. They illustrate the result and decide
// nothing: one that cannot be read is left out.
func (r *Run) keepNodes(ctx context.Context) {
	for _, id := range r.Subject {
		resp, err := r.Mesh.Client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: id, Health: true})
		if err == nil {
			r.Result.Nodes = append(r.Result.Nodes, resp.GetNode())
		}
	}
}

// Recovered waits until the evidence of recovery is complete, at most for the recovery budget.
func (r *Run) Recovered(ctx context.Context, what string, checklist func(ctx context.Context) error) error {
	budget := r.Drill.RecoverWithin(r.Mesh.Scaled)
	err := await.Until(ctx, what, max(time.Until(r.FaultAt.Add(budget)), time.Millisecond), checklist)
	after := time.Since(r.FaultAt)
	if err == nil && after > budget {
		err = fmt.Errorf("%s took %.1f s, longer than %.1f s", what, after.Seconds(), budget.Seconds())
	}
	if err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Result.RecoveredSeconds = Seconds(after)
	r.Note("recovered after %.2f s: %s", after.Seconds(), what)
	return nil
}

// Observe takes the snapshot that later ones are compared with. Objects that are made after it are not compared.
func (r *Run) Observe(ctx context.Context) error {
	var err error
	r.before, err = readWorld(ctx, r.Mesh, r.Subject)
	return stage.At(stage.Good, err)
}
