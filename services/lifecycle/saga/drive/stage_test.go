package drive_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// TestAStepIsGivenItsStageAgain: a step gets the stage that it was in after a wait, after a failure, and after the loss
// of its driver, also if an attempt between has entered none. The next step gets none.
func TestAStepIsGivenItsStageAgain(t *testing.T) {
	testkit.IO(t)
	var mu sync.Mutex
	var got []string
	call := func(env *saga.Env) int {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, fmt.Sprintf("%s %d %q", env.StepName, env.Attempt, env.Stage))
		return len(got)
	}
	lost := make(chan struct{})
	steps := sagatest.PureSteps("first", "second")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		switch call(env) {
		case 1: // it enters two stages, and waits
			if err := env.Enter(ctx, "begin"); err != nil {
				return saga.Outcome{}, err
			}
			err := env.TxInto(ctx, "middle", func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `UPDATE lifecycle.workspace SET node_name = 'made' WHERE id = $1`, env.WorkspaceID)
				return err
			})
			return saga.Wait(saga.WaitFor{For: time.Millisecond}), err
		case 2: // rolled back, a stage is not entered
			return saga.Outcome{}, env.TxInto(ctx, "end", func(context.Context, pgx.Tx) error { return sagatest.ErrBoom })
		case 3: // the second attempt waits before it enters a stage
			return saga.Wait(saga.WaitFor{For: time.Millisecond}), nil
		case 4: // its driver is lost
			close(lost)
			<-ctx.Done()
			return saga.Outcome{}, context.Cause(ctx)
		default:
			return saga.Done(nil), env.Enter(ctx, "end")
		}
	}
	steps[1].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
		call(env)
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	ws, id := b.Create("toy")
	select {
	case <-lost:
	case <-time.After(testkit.Patience):
		t.Fatal("the step was not called four times")
	}
	b.Exec(`UPDATE lifecycle.saga_run SET next_at = mesh.clock() WHERE id = $1`, id)
	b.Drive(b.Config("b"))
	b.Await(id, testkit.Patience, "succeeded")
	want := []string{
		`first 1 ""`, `first 1 "middle"`, `first 2 "middle"`, `first 2 "middle"`, `first 3 "middle"`, `second 1 ""`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("the steps were called with %q, want %q", got, want)
	}
	var shown []string
	for _, a := range b.Timeline(id) {
		shown = append(shown, a.State+" "+a.Stage)
	}
	if want := []string{"failed middle", "lost ", "succeeded end", "succeeded "}; !slices.Equal(shown, want) {
		t.Errorf("the timeline shows %q, want %q", shown, want)
	}
	if w := b.Workspace(ws); w.NodeName != "made" {
		t.Errorf("the rows of the stage are %q", w.NodeName)
	}
	var reported []string
	for _, e := range testkit.Events(t, b.DB.Pool(pg.RoleLifecycle), `kind = 'step.changed' AND workflow_id = $1`, id) {
		reported = append(reported, e.Text("attempt")+" "+e.Text("stage"))
	}
	if want := []string{"1 begin", "1 middle", "3 end"}; !slices.Equal(reported, want) {
		t.Errorf("the events tell of %q, want %q", reported, want)
	}
}

// TestAStageIsWrittenOnce: entering the stage that an attempt is in writes nothing, and a driver that has lost the run
// enters none.
func TestAStageIsWrittenOnce(t *testing.T) {
	testkit.IO(t)
	versions := make(chan int64, 2)
	refused := make(chan error, 1)
	steps := sagatest.PureSteps("only")
	var b *bed
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		for range 2 {
			if err := env.Enter(ctx, "here"); err != nil {
				return saga.Outcome{}, err
			}
			versions <- b.Timeline(env.RunID)[0].Version
		}
		b.Exec(`UPDATE lifecycle.saga_run SET fence = fence + 1 WHERE id = $1`, env.RunID)
		refused <- env.Enter(ctx, "there")
		b.Exec(`UPDATE lifecycle.saga_run SET fence = fence - 1 WHERE id = $1`, env.RunID)
		return saga.Done(nil), nil
	}
	b = newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	b.Await(id, testkit.Patience, "succeeded")
	if first, second := <-versions, <-versions; first != 2 || second != first {
		t.Errorf("the versions are %d and %d", first, second)
	}
	if err := <-refused; !errors.Is(err, saga.ErrFenced) {
		t.Errorf("without the lease, Enter returns %v", err)
	}
	if list := b.Timeline(id); len(list) != 1 || list[0].Stage != "here" {
		t.Errorf("the timeline shows %+v", list)
	}
}
