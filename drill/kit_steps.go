package drill

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// explain adds the owner of the verdict's reason and its remedy, as the API explains them.
func explain(ctx context.Context, m *Mesh, v Verdict) (Verdict, error) {
	var items []*readmodelv1.ReasonText
	err := await(ctx, "the explanation of "+v.Reason, patience, func(ctx context.Context) error {
		resp, err := m.Client.Query.ExplainReason(ctx, &readmodelv1.ExplainReasonRequest{Code: v.Reason})
		items = resp.GetItems()
		if err != nil && !passing(err) {
			return at(StageVerdict, err)
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
	r.result.DetectedSeconds, r.result.Reason, r.result.UserState = seconds(after), r.verdict.Reason, r.verdict.UserState
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
	r.result.RecoveredSeconds = seconds(after)
	r.note("recovered after %.2f s: %s", after.Seconds(), what)
	return nil
}

// observe takes the snapshot that later ones are compared with. Objects that are made after it are not compared.
func (r *Run) observe(ctx context.Context) error {
	var err error
	r.before, err = readWorld(ctx, r.Mesh, r.subject)
	return at(StageGood, err)
}
