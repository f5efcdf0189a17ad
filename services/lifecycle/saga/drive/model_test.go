package drive_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// TestRandomVerbs throws verbs in any order at one workspace whose steps fail at random, and checks the invariants
// after each.
func TestRandomVerbs(t *testing.T) {
	testkit.IO(t)
	moody := func(name string) saga.Step {
		act := func(ctx context.Context, env *saga.Env, undo bool) (saga.Outcome, error) {
			switch rand.IntN(8) { // moods need no secrecy
			case 0:
				return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, commonv1.Reason_REASON_LAUNCH_FAILED, "",
					nil)
			case 1:
				return saga.Outcome{}, sagatest.ErrBoom
			case 2:
				return saga.Wait(saga.WaitFor{For: 2 * time.Millisecond, Why: "a mood", WakeOnSignal: true}), nil
			}
			if !undo {
				claim, _, err := env.Intent(ctx, claims.Spec{Kind: name, Name: name})
				return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error { return env.ConfirmTx(ctx, tx, claim, name) }),
					err
			}
			claims, err := env.Claims(ctx, name)
			return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
				for _, c := range claims {
					if err := env.ReleaseTx(ctx, tx, c); err != nil {
						return err
					}
				}
				return nil
			}), err
		}
		return saga.Step{
			Name: name, Class: saga.Create, Kinds: []string{name}, Retry: sagatest.Fast(),
			UndoRetry: saga.RetryPolicy{Attempts: 2, First: time.Millisecond, Max: time.Millisecond},
			Do:        func(ctx context.Context, env *saga.Env) (saga.Outcome, error) { return act(ctx, env, false) },
			Undo:      func(ctx context.Context, env *saga.Env) (saga.Outcome, error) { return act(ctx, env, true) },
			Observe: func(context.Context, *saga.Env) (saga.Observation, error) {
				return saga.Observation{Presence: saga.Unknown}, nil
			},
		}
	}
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: []saga.Step{moody("one"), moody("two"), moody("three")},
		States: sagatest.States(),
	})
	b.Drive(b.Config("a"))
	b.Drive(b.Config("b"))
	rapid.Check(t, func(rt *rapid.T) {
		ws, run := b.Create("toy")
		for range rapid.IntRange(1, 8).Draw(rt, "verbs") {
			verb := rapid.SampledFrom([]string{
				"cancel", "reset", "retry", "retry-undo", "skip-undo", "wake",
				"recreate",
			}).Draw(rt, "verb")
			err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
				var err error
				switch verb {
				case "cancel":
					_, err = b.Core.Cancel(ctx, tx, run, "model", "")
				case "reset":
					_, _, err = b.Core.Reset(ctx, tx, ws)
				case "retry":
					var out saga.Retried
					if out, err = b.Core.Retry(ctx, tx,
						saga.RetryRequest{WorkspaceID: ws, Definition: "toy", Override: true, Reason: "model"}); err == nil {
						run = out.RunID
					}
				case "retry-undo":
					_, err = b.Core.RetryUndo(ctx, tx, run, "model")
				case "skip-undo":
					_, _, err = b.Core.SkipUndo(ctx, tx, run, "model", "model")
				case "wake":
					err = b.Core.Wake(ctx, tx, run)
				case "recreate":
					var out saga.Started
					out, err = b.Core.Start(ctx, tx, saga.StartRequest{
						WorkspaceID: ws, Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Definition: "toy", NextEpoch: true,
						From: []commonv1.WorkspaceState{
							commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
							commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
						},
					})
					if err == nil {
						run = out.RunID
					}
				}
				return err
			})
			if _, refused := fault.As(err); err != nil && !refused {
				rt.Fatalf("%s: %v", verb, err)
			}
			if err := b.invariants(ws); err != nil {
				rt.Fatalf("after %s: %v", verb, err)
			}
			if rapid.Bool().Draw(rt, "await") {
				b.Await(run, testkit.Patience, "succeeded", "failed", "stuck")
			}
		}
		r := b.Await(run, testkit.Patience, "succeeded", "failed", "stuck")
		if err := b.invariants(ws); err != nil {
			rt.Fatal(err)
		}
		if err := b.Announced(run); err != nil {
			rt.Fatal(err)
		}
		claims, err := claims.Live(t.Context(), b.DB.Pool(pg.RoleLifecycle), ws)
		if err != nil {
			rt.Fatal(err)
		}
		w := b.Workspace(ws)
		switch want := map[string]string{"succeeded": "active", "failed": "failed", "stuck": "stuck"}[r.State]; {
		case w.State != want:
			rt.Fatalf("a run that is %s left its workspace %s", r.State, w.State)
		case r.State == "failed" && len(claims) > 0:
			rt.Fatalf("failed, and %d claims are live", len(claims))
		case r.State == "succeeded" && len(claims) != 3:
			rt.Fatalf("succeeded with %d claims", len(claims))
		}
	})
}

// unreported returns the attempts of a workspace whose last change is in no event.
func (b *bed) unreported(ws string) ([]string, error) {
	ctx, pool := testkit.Context(b.T), b.DB.Pool(pg.RoleLifecycle)
	rows, err := pool.Query(ctx, `SELECT run_id::text || ' ' || name || ' ' || version FROM lifecycle.saga_step
		WHERE workspace_id = $1`, ws)
	if err != nil {
		return nil, err
	}
	attempts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	// The events are read after the rows: an event is there whenever its row is.
	list, err := testkit.ReadEvents(ctx, pool, `workspace_id = $1 AND kind IN ('run.changed', 'step.changed')`, ws)
	if err != nil {
		return nil, err
	}
	reported := map[string]bool{}
	for _, e := range list {
		var run lifecyclev1.Run
		var changed lifecyclev1.StepAttempt
		if e.Kind == "step.changed" {
			err = e.Decode(&changed)
			run.ChangedSteps = append(run.ChangedSteps, &changed)
		} else {
			err = e.Decode(&run)
		}
		if err != nil {
			return nil, err
		}
		for _, a := range run.GetChangedSteps() {
			reported[fmt.Sprint(e.WorkflowID, " ", a.GetName(), " ", a.GetVersion())] = true
		}
	}
	return slices.DeleteFunc(attempts, func(a string) bool { return reported[a] }), nil
}

// invariants returns an error unless the invariants of a workspace hold.
func (b *bed) invariants(ws string) error {
	var problems []string
	for what, sql := range map[string]string{
		"live runs beyond one": `SELECT count(*) > 1 FROM lifecycle.saga_run
			WHERE workspace_id = $1 AND state NOT IN ('succeeded', 'failed')`,
		"a live run without a reason": `SELECT count(*) > 0 FROM lifecycle.saga_run
			WHERE workspace_id = $1 AND state NOT IN ('succeeded', 'failed') AND why_waiting = ''`,
		"an open attempt of an ended run": `SELECT count(*) > 0 FROM lifecycle.saga_run r
			LEFT JOIN lifecycle.saga_step s ON s.run_id = r.id
			WHERE r.workspace_id = $1 AND r.state IN ('succeeded', 'failed', 'stuck')
			AND (s.state IN ('running', 'waiting') OR r.open_attempt > 0)`,
		"an op_seq drawn twice": `SELECT count(*) <> count(DISTINCT op_seq) FROM lifecycle.saga_step
			WHERE workspace_id = $1`,
		"an op_seq that was not drawn": `SELECT count(*) > 0 FROM lifecycle.saga_step s
			JOIN lifecycle.workspace w ON w.id = s.workspace_id WHERE w.id = $1 AND s.op_seq > w.op_seq`,
		"an attempt open without a lease": `SELECT count(*) > 0 FROM lifecycle.saga_run r
			WHERE r.workspace_id = $1 AND r.open_attempt > 0 AND r.owner IS NULL`,
		"two live claims of one resource": `SELECT count(*) <> count(DISTINCT (kind, deterministic_name))
			FROM lifecycle.resource_claim WHERE workspace_id = $1 AND released_at IS NULL AND orphaned_at IS NULL`,
		"an event that is not of its row": `SELECT count(*) > 0 FROM lifecycle.saga_run r
			WHERE r.workspace_id = $1 AND NOT EXISTS (SELECT FROM events.event e
			WHERE e.kind = 'run.changed' AND e.aggregate_id = r.id::text AND e.aggregate_version = r.version)`,
	} {
		var broken bool
		if err := b.DB.Pool(pg.RoleLifecycle).QueryRow(testkit.Context(b.T), sql, ws).Scan(&broken); err != nil {
			return err
		}
		if broken {
			problems = append(problems, what)
		}
	}
	unreported, err := b.unreported(ws)
	if err != nil {
		return err
	}
	if len(unreported) > 0 {
		problems = append(problems, fmt.Sprintf("attempts without their last change: %v", unreported))
	}
	if len(problems) > 0 {
		return fmt.Errorf("broken: %s", strings.Join(problems, "; "))
	}
	return nil
}
