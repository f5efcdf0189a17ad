package lease_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// lockedRun locks a run's row as a step's long transaction does, until the test ends or the returned function is
// called.
func (b *bed) lockedRun(id string) func() {
	b.T.Helper()
	ctx := testkit.Context(b.T)
	tx, err := b.DB.Pool(pg.RoleLifecycle).Begin(ctx)
	if err != nil {
		b.T.Fatal(err)
	}
	if _, err := tx.Exec(ctx, `SELECT 1 FROM lifecycle.saga_run WHERE id = $1 FOR SHARE`, id); err != nil {
		b.T.Fatal(err)
	}
	free := func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }
	b.T.Cleanup(free)
	return free
}

// blockedBeats lists the heartbeats that wait for a row: the process and the moment at which each began.
func (b *bed) blockedBeats() []string {
	b.T.Helper()
	rows, err := b.DB.Pool(pg.RoleLifecycle).Query(testkit.Context(b.T), `
		SELECT format('%s since %s', pid, query_start) FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%saga.beat_run %' ORDER BY pid`)
	if err != nil {
		b.T.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		b.T.Fatal(err)
	}
	return list
}

// waiting makes a definition whose one step ends with its context, and reports the causes.
func waiting(causes chan<- error) saga.Definition {
	steps := sagatest.PureSteps("wait")
	steps[0].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return saga.Outcome{}, context.Cause(ctx)
	}
	return saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
}

// TestBlockedBeatsGoOnApart: a run whose row is locked does not delay the extension of another run's lease or the
// detection of a cancel.
func TestBlockedBeatsGoOnApart(t *testing.T) {
	testkit.IO(t)
	causes := make(chan error, 8)
	b := newBed(t, waiting(causes))
	cfg := b.Config("a")
	cfg.Lease, cfg.Heartbeat = 2*time.Minute, 5*time.Second
	b.Drive(cfg)
	var runs []string
	for range 3 {
		_, id := b.Create("toy")
		runs = append(runs, id)
	}
	for _, id := range runs {
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.Run(id); r.State != "running" {
				return fmt.Errorf("run is %s", r.State)
			}
			return nil
		})
	}
	first, second := b.lockedRun(runs[0]), b.lockedRun(runs[1])
	// Both wait for their rows at once: neither waits for the other.
	var blocked []string
	testkit.Eventually(t, testkit.Patience, func() error {
		if blocked = b.blockedBeats(); len(blocked) < 2 {
			return fmt.Errorf("heartbeats that wait: %v, want two", blocked)
		}
		return nil
	})
	first()
	second()
}

// TestCancelPassesABlockedBeat: a cancel is seen while the heartbeat of another run waits for its row.
func TestCancelPassesABlockedBeat(t *testing.T) {
	testkit.IO(t)
	causes := make(chan error, 8)
	b := newBed(t, waiting(causes))
	cfg := b.Config("a")
	// the row stays locked for less time than an idle transaction may last
	cfg.Lease, cfg.Heartbeat = 2*time.Minute, 15*time.Second
	b.Drive(cfg)
	_, locked := b.Create("toy")
	_, cancelled := b.Create("toy")
	for _, id := range []string{locked, cancelled} {
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.Run(id); r.State != "running" {
				return fmt.Errorf("run is %s", r.State)
			}
			return nil
		})
	}
	free := b.lockedRun(locked)
	var before []string
	testkit.Eventually(t, testkit.Patience, func() error {
		if before = b.blockedBeats(); len(before) != 1 {
			return fmt.Errorf("heartbeats that wait: %v, want one", before)
		}
		return nil
	})
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.Core.Cancel(ctx, tx, cancelled, "alice", "")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	<-causes
	// The same heartbeat waits still: the cancel did not wait for it.
	if after := b.blockedBeats(); len(after) != 1 || after[0] != before[0] {
		t.Errorf("heartbeats that wait: %v, then %v", before, after)
	}
	free()
	b.Await(cancelled, time.Minute, "failed")
}

// TestALeaseThatIsTakenAgainEndsTheFormerStep: a driver that leases a run again which it still drives, as its lease
// ended while the process was paused, ends the former step at once and closes its attempt as lost.
func TestALeaseThatIsTakenAgainEndsTheFormerStep(t *testing.T) {
	testkit.IO(t)
	began, causes := make(chan struct{}, 2), make(chan error, 2)
	steps := sagatest.PureSteps("wait")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		began <- struct{}{}
		if env.Attempt > 1 {
			return saga.Done(nil), nil
		}
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return saga.Outcome{}, context.Cause(ctx)
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	cfg := b.Config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, 20*time.Minute // neither a heartbeat nor the lease's end ends the step
	b.Drive(cfg)
	_, id := b.Create("toy")
	<-began
	b.Exec(`UPDATE lifecycle.saga_run SET next_at = mesh.clock() WHERE id = $1`, id)
	b.Core.Runnable().Notify()
	select {
	case cause := <-causes:
		if !errors.Is(cause, saga.ErrFenced) {
			t.Errorf("the former step ended with %v, want %v", cause, saga.ErrFenced)
		}
	case <-time.After(testkit.Patience):
		t.Fatal("the former step did not end")
	}
	b.Await(id, testkit.Patience, "succeeded")
}
