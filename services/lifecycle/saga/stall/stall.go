// Package stall finds runs and steps that show no progress, and flags them with a reason.
//
// It decides when something counts as stalled, by the database's clock, and nothing else: a flag stops no step and
// takes no lease. It knows the core of the sagas by its definitions and its database.
package stall

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// batch bounds how many stalls of each kind are flagged at once.
const batch = 100

// quietSince is the SQL of the time at which the step of an attempt s last made progress.
var quietSince = `GREATEST(
	(SELECT max(p.progress_at) FROM lifecycle.saga_step p WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir),
	LEAST(s.started_at, (SELECT min(p.started_at) FROM lifecycle.saga_step p
		WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND ` + runs.SameTry("p") + `)))`

// openOrStored selects the open attempt of a run r: its row, or the columns in the run's row while it has no row of its
// own.
const openOrStored = `SELECT o.run_id, o.step, o.dir, o.attempt, o.name, o.stall_after, o.stalled, o.started_at
	FROM lifecycle.saga_step o
	WHERE o.run_id = r.id AND o.step = r.step AND o.dir = r.phase AND o.state IN ('running', 'waiting')
	UNION ALL
	SELECT r.id, r.step, r.phase, r.open_attempt, r.step_names[r.step + 1], interval '5 minutes', false, r.open_since
	WHERE r.open_attempt > 0 AND NOT EXISTS (SELECT FROM lifecycle.saga_step o
		WHERE o.run_id = r.id AND o.step = r.step AND o.dir = r.phase AND o.attempt = r.open_attempt)`

// notPaused is the condition that rollback mode is not set and a run r is not paused: a paused run makes no progress by
// intention, and in the mode every run is about to be paused.
const notPaused = `NOT (SELECT mesh.rolled_back()) AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause h
	WHERE h.run_id = r.id AND h.since IS NOT NULL)`

type stall struct {
	RunID   string  `db:"run_id"`
	Step    int     `db:"step"`
	Dir     string  `db:"dir"`
	Attempt int     `db:"attempt"` // 0: the run as a whole
	Reason  string  `db:"reason"`
	After   float64 `db:"after"` // seconds that it may be quiet, for an attempt
}

// Mark flags stalls: attempts without progress for longer than their step allows, runs that no driver has leased
// for silent after they were due, and runs that last longer than their definition expects. A flag is a reason and an
// event; it stops nothing. Mark returns how many it flagged.
func Mark(ctx context.Context, core *saga.Core, silent time.Duration) (int, error) {
	found, err := find(ctx, core, silent)
	if err != nil {
		return 0, err
	}
	n := 0
	for _, s := range found {
		marked, err := mark(ctx, core, s)
		if err != nil {
			return n, err
		}
		if marked {
			n++
		}
	}
	if n > 0 {
		core.Stats().Stalled.Add(int64(n))
		core.Appended().Notify()
	}
	return n, nil
}

func find(ctx context.Context, core *saga.Core, silent time.Duration) ([]stall, error) {
	var definitions, keys, steps []string
	var after, quiet []float64
	for _, d := range core.Registry().All() {
		definitions, after = append(definitions, d.Name), append(after, core.StallAfter(d, nil).Seconds())
	}
	for _, d := range core.Registry().Versions() {
		for i := range d.Steps {
			keys, steps, quiet = append(keys, d.Key()), append(steps, d.Steps[i].Name),
				append(quiet, core.StallAfter(d, &d.Steps[i]).Seconds())
		}
	}
	found, err := pg.All[stall](ctx, core.DB(), findStalls, batch, silent.Seconds(), definitions, after, keys, steps,
		quiet)
	if err != nil {
		return nil, fmt.Errorf("find stalls: %w", err)
	}
	return found, nil
}

// mark flags one stall, and reports whether it did: not if the run or the attempt made progress meanwhile.
func mark(ctx context.Context, core *saga.Core, s stall) (bool, error) {
	marked := false
	err := pg.InTx(ctx, core.DB(), func(ctx context.Context, tx pgx.Tx) error {
		marked = false
		r, err := pg.One[runs.Run](ctx, tx, flagRun, s.RunID, s.Step, s.Dir, s.Reason, s.Attempt)
		if pg.IsNoRows(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("flag run: %w", err)
		}
		if err := r.Unread(); err != nil {
			aside.Note(ctx, "run", r.ID, err) // no driver of this build leases it
		}
		var buffer runs.Buffer
		if s.Attempt > 0 {
			if err := runs.KeepOpen(ctx, tx, s.RunID); err != nil {
				return err
			}
			a, err := pg.One[runs.Attempt](ctx, tx, flagAttempt, s.RunID, s.Step, s.Dir, s.Attempt, s.After)
			if pg.IsNoRows(err) {
				return errMoved
			}
			if err != nil {
				return fmt.Errorf("flag attempt: %w", err)
			}
			buffer.Attempt(&a)
		}
		buffer.Run(&r)
		marked = true
		return buffer.Flush(ctx, tx)
	})
	if err == errMoved { //nolint:errorlint // our own sentinel, returned as it is
		return false, nil
	}
	return marked, err
}

var errMoved = fmt.Errorf("it moved meanwhile")
