package saga_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

func TestCancelReachesTheContextAndUndoes(t *testing.T) {
	testkit.IO(t)
	var rec record
	began, asked := make(chan struct{}), make(chan struct{})
	steps := recorded(&rec, "one", "two", "three")
	steps[1].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		close(began)
		<-ctx.Done()
		rec.add("cause %v", context.Cause(ctx))
		return saga.Outcome{}, context.Cause(ctx)
	}
	undo := steps[1].Undo
	steps[1].Undo = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		select { // the run goes on until it was cancelled twice
		case <-asked:
			return undo(ctx, env)
		case <-ctx.Done():
			return saga.Outcome{}, context.Cause(ctx)
		}
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()})
	b.drive(b.config("a"))
	ws, id := b.create("toy")
	<-began
	cancel := func() (saga.Verb, error) {
		var v saga.Verb
		err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
			var err error
			v, err = b.core.Cancel(ctx, tx, id, "alice", "changed my mind")
			return err
		})
		return v, err
	}
	if v, err := cancel(); err != nil || !v.Changed {
		t.Fatalf("cancel = %+v, %v", v, err)
	}
	if v, err := cancel(); err != nil || v.Changed {
		t.Fatalf("second cancel = %+v, %v", v, err)
	}
	close(asked)
	r := b.await(id, 5*time.Second, "failed")
	want := []string{"do one", "cause " + saga.ErrCancelRequested.Error(), "undo two", "undo one"}
	if got := rec.all(); !slices.Equal(got, want) {
		t.Errorf("calls = %v, want %v", got, want)
	}
	if r.ErrorCode != "cancel_requested" || b.workspace(ws).State != "failed" {
		t.Errorf("run error %q, workspace %s", r.ErrorCode, b.workspace(ws).State)
	}
	if list := b.timeline(id); list[1].State != "cancelled" {
		t.Errorf("attempt = %+v", list[1])
	}
	if _, err := cancel(); fault.ReasonOf(err) != commonv1.Reason_REASON_STATE_TERMINAL {
		t.Errorf("cancel of an ended run = %v", err)
	}
}

// TestCancelOfADeafStepIsAbandoned: the step ignores its context, and its later writes are refused.
func TestCancelOfADeafStepIsAbandoned(t *testing.T) {
	testkit.IO(t)
	began, release, late := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	steps := pureSteps("deaf")
	steps[0].Undo = noop
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		close(began)
		<-release
		_, _, err := env.Intent(context.WithoutCancel(ctx), claims.Spec{Kind: "instance", Name: "zombie"})
		late <- err
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()})
	cfg := b.config("a")
	cfg.CancelGrace = 2 * time.Second // it is waited for
	b.drive(cfg)
	ws, id := b.create("toy")
	<-began
	if err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.core.Cancel(ctx, tx, id, "alice", "")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	b.await(id, 5*time.Second, "failed")
	close(release)
	if err := <-late; !errors.Is(err, saga.ErrFenced) {
		t.Errorf("the zombie's intent = %v, want %v", err, saga.ErrFenced)
	}
	if claims, err := claims.Live(t.Context(), b.db.Pool(pg.RoleLifecycle), ws); err != nil || len(claims) != 0 {
		t.Errorf("claims = %v, %v", claims, err)
	}
	if list := b.timeline(id); list[0].State != "abandoned" || list[1].Fence <= list[0].Fence {
		t.Errorf("timeline = %+v", list)
	}
}

// TestShortCancelGraceOutlivesRestart: the grace of a cancel bounds cancels alone. A step that ends after its driver
// was told to stop, and after that grace, is parked for the next driver, and the restart is no failed attempt.
func TestShortCancelGraceOutlivesRestart(t *testing.T) {
	testkit.IO(t)
	began := make(chan struct{})
	var b *bed
	steps := pureSteps("slow")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if env.Fence != 1 { // the next driver's
			return saga.Done(nil), nil
		}
		close(began)
		<-ctx.Done()
		// It finishes its work, which takes longer than the grace.
		for range 5 {
			b.run(env.RunID)
		}
		return saga.Outcome{}, context.Cause(ctx)
	}
	b = newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()})
	cfg := b.config("a")
	cfg.CancelGrace, cfg.StopGrace = time.Nanosecond, time.Minute
	stop := b.drive(cfg)
	_, id := b.create("toy")
	<-began
	stop()
	r := b.run(id)
	if list := b.timeline(id); r.State != "waiting" || r.Attempts != 0 || len(list) != 1 || list[0].State != "waiting" {
		t.Fatalf("after the restart the run is %s with %d failures, and its attempt %s: %s",
			r.State, r.Attempts, list[0].State, list[0].Error)
	}
	b.drive(b.config("b"))
	b.await(id, 30*time.Second, "succeeded")
}

func TestCancelWhileCompensatingChangesNothing(t *testing.T) {
	testkit.IO(t)
	undoing, release := make(chan struct{}), make(chan struct{})
	steps := pureSteps("one", "two")
	steps[0].Undo = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		close(undoing)
		select {
		case <-release:
			return saga.Done(nil), nil
		case <-ctx.Done():
			t.Errorf("the undo's context ended: %v", context.Cause(ctx))
			return saga.Outcome{}, context.Cause(ctx)
		}
	}
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		return saga.Outcome{}, saga.Fail(0, commonv1.Reason_REASON_LAUNCH_FAILED, "", nil)
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()})
	b.drive(b.config("a"))
	_, id := b.create("toy")
	<-undoing
	var v saga.Verb
	if err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
		var err error
		v, err = b.core.Cancel(ctx, tx, id, "alice", "")
		return err
	}); err != nil || v.Changed {
		t.Errorf("cancel = %+v, %v", v, err)
	}
	close(release)
	if r := b.await(id, 5*time.Second, "failed"); r.ErrorCode != "launch_failed" {
		t.Errorf("error = %s", r.ErrorCode)
	}
}

func TestCancelOfAnUnleasedRun(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: pureSteps("one"), States: states()})
	ws, id := b.create("toy")
	if err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.core.Cancel(ctx, tx, id, "alice", "")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if w := b.workspace(ws); w.State != "cancelling" {
		t.Errorf("workspace = %s", w.State)
	}
	b.drive(b.config("a"))
	b.await(id, 5*time.Second, "failed")
}

// TestTeardownSticksAndGoesOn: a run of a definition that Sticks ends stuck, and an operator's verbs take it forward.
func TestTeardownSticksAndGoesOn(t *testing.T) {
	testkit.IO(t)
	for _, help := range []string{"retry", "skip"} {
		t.Run(help, func(t *testing.T) {
			var rec record
			mended := make(chan struct{})
			steps := recorded(&rec, "one", "two")
			steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
				select {
				case <-mended:
					return saga.Done(nil), nil
				default:
					return saga.Outcome{}, errBoom
				}
			}
			b := newBed(t, saga.Definition{
				Name: "down", Version: 1, Steps: steps, States: states(), Sticks: true,
				Uncancellable: true,
			})
			b.drive(b.config("a"))
			ws, id := b.create("down")
			b.await(id, 10*time.Second, "stuck")
			err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
				if help == "retry" {
					close(mended)
					_, err := b.core.RetryUndo(ctx, tx, id, "op")
					return err
				}
				_, _, err := b.core.SkipUndo(ctx, tx, id, "op", "the host is gone")
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			b.await(id, 10*time.Second, "succeeded")
			if w := b.workspace(ws); w.State != "active" {
				t.Errorf("workspace = %s", w.State)
			}
			if got := rec.all(); !slices.Equal(got, []string{"do two"}) {
				t.Errorf("calls = %v: nothing is undone", got)
			}
		})
	}
	b := newBed(t, saga.Definition{
		Name: "down", Version: 1, Steps: pureSteps("one"), States: states(),
		Uncancellable: true,
	})
	_, id := b.create("down")
	err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.core.Cancel(ctx, tx, id, "alice", "")
		return err
	})
	if fault.ReasonOf(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Errorf("cancel of a teardown = %v", err)
	}
}
