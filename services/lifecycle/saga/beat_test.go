package saga_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// lockedRun locks a run's row as a step's long transaction does, until the test ends or the returned function is
// called.
func (b *bed) lockedRun(id string) func() {
	b.t.Helper()
	ctx := testkit.Context(b.t)
	tx, err := b.db.Pool(pg.RoleLifecycle).Begin(ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := tx.Exec(ctx, `SELECT 1 FROM lifecycle.saga_run WHERE id = $1 FOR SHARE`, id); err != nil {
		b.t.Fatal(err)
	}
	free := func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }
	b.t.Cleanup(free)
	return free
}

// blockedBeats lists the heartbeats that wait for a row: the process and the moment at which each began.
func (b *bed) blockedBeats() []string {
	b.t.Helper()
	rows, err := b.db.Pool(pg.RoleLifecycle).Query(testkit.Context(b.t), `
		SELECT format('%s since %s', pid, query_start) FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%saga.beat_run %' ORDER BY pid`)
	if err != nil {
		b.t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		b.t.Fatal(err)
	}
	return list
}

// waiting makes a definition whose one step ends with its context, and reports the causes.
func waiting(causes chan<- error) saga.Definition {
	steps := pureSteps("wait")
	steps[0].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return saga.Outcome{}, context.Cause(ctx)
	}
	return saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()}
}

// TestBlockedBeatsGoOnApart: a run whose row is locked does not delay the extension of another run's lease or the
// detection of a cancel.
func TestBlockedBeatsGoOnApart(t *testing.T) {
	testkit.IO(t)
	causes := make(chan error, 8)
	b := newBed(t, waiting(causes))
	cfg := b.config("a")
	cfg.Lease, cfg.Heartbeat = 2*time.Minute, 5*time.Second
	b.drive(cfg)
	var runs []string
	for range 3 {
		_, id := b.create("toy")
		runs = append(runs, id)
	}
	for _, id := range runs {
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.run(id); r.State != "running" {
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
	cfg := b.config("a")
	// the row stays locked for less time than an idle transaction may last
	cfg.Lease, cfg.Heartbeat = 2*time.Minute, 15*time.Second
	b.drive(cfg)
	_, locked := b.create("toy")
	_, cancelled := b.create("toy")
	for _, id := range []string{locked, cancelled} {
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.run(id); r.State != "running" {
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
	if err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.core.Cancel(ctx, tx, cancelled, "alice", "")
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
	b.await(cancelled, time.Minute, "failed")
}
