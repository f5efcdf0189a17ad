package drive_test

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
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

func TestCancelReachesTheContextAndUndoes(t *testing.T) {
	testkit.IO(t)
	var rec sagatest.Record
	began, asked := make(chan struct{}), make(chan struct{})
	steps := sagatest.Recorded(&rec, "one", "two", "three")
	steps[1].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		close(began)
		<-ctx.Done()
		rec.Add("cause %v", context.Cause(ctx))
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
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	ws, id := b.Create("toy")
	<-began
	cancel := func() (saga.Verb, error) {
		var v saga.Verb
		err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
			var err error
			v, err = b.Core.Cancel(ctx, tx, id, "alice", "changed my mind")
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
	r := b.Await(id, testkit.Patience, "failed")
	want := []string{"do one", "cause " + saga.ErrCancelRequested.Error(), "undo two", "undo one"}
	if got := rec.All(); !slices.Equal(got, want) {
		t.Errorf("calls = %v, want %v", got, want)
	}
	if r.ErrorCode != "cancel_requested" || b.Workspace(ws).State != "failed" {
		t.Errorf("run error %q, workspace %s", r.ErrorCode, b.Workspace(ws).State)
	}
	if list := b.Timeline(id); list[1].State != "cancelled" {
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
	steps := sagatest.PureSteps("deaf")
	steps[0].Undo = sagatest.Noop
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		close(began)
		<-release
		_, _, err := env.Intent(context.WithoutCancel(ctx), claims.Spec{Kind: "instance", Name: "zombie"})
		late <- err
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	cfg := b.Config("a")
	cfg.CancelGrace = 2 * time.Second // it is waited for
	b.Drive(cfg)
	ws, id := b.Create("toy")
	<-began
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.Core.Cancel(ctx, tx, id, "alice", "")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	b.Await(id, testkit.Patience, "failed")
	close(release)
	if err := <-late; !errors.Is(err, saga.ErrFenced) {
		t.Errorf("the zombie's intent = %v, want %v", err, saga.ErrFenced)
	}
	if claims, err := claims.Live(t.Context(), b.DB.Pool(pg.RoleLifecycle), ws); err != nil || len(claims) != 0 {
		t.Errorf("claims = %v, %v", claims, err)
	}
	if list := b.Timeline(id); list[0].State != "abandoned" || list[1].Fence <= list[0].Fence {
		t.Errorf("timeline = %+v", list)
	}
}

// TestShortCancelGraceOutlivesRestart: the grace of a cancel bounds cancels alone. A step that ends after its driver
// was told to stop, and after that grace, is parked for the next driver, and the restart is no failed attempt.
func TestShortCancelGraceOutlivesRestart(t *testing.T) {
	testkit.IO(t)
	began := make(chan struct{})
	var b *bed
	steps := sagatest.PureSteps("slow")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if env.Fence != 1 { // the next driver's
			return saga.Done(nil), nil
		}
		close(began)
		<-ctx.Done()
		// It finishes its work, which takes longer than the grace.
		for range 5 {
			b.Run(env.RunID)
		}
		return saga.Outcome{}, context.Cause(ctx)
	}
	b = newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	cfg := b.Config("a")
	cfg.CancelGrace, cfg.StopGrace = time.Nanosecond, time.Minute
	stop := b.Drive(cfg)
	_, id := b.Create("toy")
	<-began
	stop()
	r := b.Run(id)
	if list := b.Timeline(id); r.State != "waiting" || r.Attempts != 0 || len(list) != 1 || list[0].State != "waiting" {
		t.Fatalf("after the restart the run is %s with %d failures, and its attempt %s: %s",
			r.State, r.Attempts, list[0].State, list[0].Error)
	}
	b.Drive(b.Config("b"))
	b.Await(id, testkit.Patience, "succeeded")
}

func TestCancelWhileCompensatingChangesNothing(t *testing.T) {
	testkit.IO(t)
	undoing, release := make(chan struct{}), make(chan struct{})
	steps := sagatest.PureSteps("one", "two")
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
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	<-undoing
	var v saga.Verb
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		var err error
		v, err = b.Core.Cancel(ctx, tx, id, "alice", "")
		return err
	}); err != nil || v.Changed {
		t.Errorf("cancel = %+v, %v", v, err)
	}
	close(release)
	if r := b.Await(id, testkit.Patience, "failed"); r.ErrorCode != "launch_failed" {
		t.Errorf("error = %s", r.ErrorCode)
	}
}

func TestCancelOfAnUnleasedRun(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States()})
	ws, id := b.Create("toy")
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.Core.Cancel(ctx, tx, id, "alice", "")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if w := b.Workspace(ws); w.State != "cancelling" {
		t.Errorf("workspace = %s", w.State)
	}
	b.Drive(b.Config("a"))
	b.Await(id, testkit.Patience, "failed")
}

// TestTeardownSticksAndGoesOn: a run of a definition that Sticks ends stuck, and an operator's verbs take it forward.
func TestTeardownSticksAndGoesOn(t *testing.T) {
	testkit.IO(t)
	for _, help := range []string{"retry", "skip"} {
		t.Run(help, func(t *testing.T) {
			var rec sagatest.Record
			mended := make(chan struct{})
			steps := sagatest.Recorded(&rec, "one", "two")
			steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
				select {
				case <-mended:
					return saga.Done(nil), nil
				default:
					return saga.Outcome{}, sagatest.ErrBoom
				}
			}
			b := newBed(t, saga.Definition{
				Name: "down", Version: 1, Steps: steps, States: sagatest.States(), Sticks: true,
				Uncancellable: true,
			})
			b.Drive(b.Config("a"))
			ws, id := b.Create("down")
			b.Await(id, testkit.Patience, "stuck")
			err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
				if help == "retry" {
					close(mended)
					_, err := b.Core.RetryUndo(ctx, tx, id, "op")
					return err
				}
				_, _, err := b.Core.SkipUndo(ctx, tx, id, "op", "the host is gone")
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			b.Await(id, testkit.Patience, "succeeded")
			if w := b.Workspace(ws); w.State != "active" {
				t.Errorf("workspace = %s", w.State)
			}
			if got := rec.All(); !slices.Equal(got, []string{"do two"}) {
				t.Errorf("calls = %v: nothing is undone", got)
			}
		})
	}
	b := newBed(t, saga.Definition{
		Name: "down", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States(),
		Uncancellable: true,
	})
	_, id := b.Create("down")
	err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.Core.Cancel(ctx, tx, id, "alice", "")
		return err
	})
	if fault.ReasonOf(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Errorf("cancel of a teardown = %v", err)
	}
}
