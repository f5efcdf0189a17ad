package saga

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// resumeBatch is how many runs one transaction resumes at most.
const resumeBatch = 100

// Resumed is a run that goes on after a pause of length Stood.
type Resumed struct {
	RunID, WorkspaceID string
	Stood              time.Duration
}

// pause is the pause of a run that has ended.
type pause struct {
	RunID   string  `db:"run_id"`
	Seconds float64 `db:"seconds"`
}

// Resume lets paused runs go on once rollback mode is over. It moves their deadlines on by the length of their pauses,
// and returns how many runs go on.
func (c *Core) Resume(ctx context.Context) (int, error) {
	total := 0
	for {
		n, err := c.resumeOnce(ctx)
		if err != nil {
			return total, fmt.Errorf("resume runs: %w", err)
		}
		if n > 0 {
			c.stats.Resumed.Add(int64(n))
			c.runnable.Notify()
			c.Committed()
		}
		if total += n; n < resumeBatch {
			return total, nil
		}
	}
}

func (c *Core) resumeOnce(ctx context.Context) (int, error) {
	n := 0
	due, err := pg.Value[bool](ctx, c.db, anyPaused)
	if err != nil || !due {
		return 0, err
	}
	err = pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		n = 0
		paused, err := c.lockPaused(ctx, tx)
		if err != nil || len(paused) == 0 {
			return err
		}
		ended, err := pg.All[pause](ctx, tx, endPauses, paused)
		if err != nil {
			return fmt.Errorf("end pauses: %w", err)
		}
		if n = len(ended); n == 0 {
			return nil
		}
		return c.extendDeadlines(ctx, tx, ended)
	})
	return n, err
}

// lockPaused returns the ids of paused runs, and locks their tasks, which come before the runs in the order of locks.
func (c *Core) lockPaused(ctx context.Context, tx pgx.Tx) ([]string, error) {
	paused, err := pg.Values[string](ctx, tx, pausedRuns, resumeBatch)
	if err != nil {
		return nil, fmt.Errorf("list paused runs: %w", err)
	}
	if c.lockDeadlines == nil || len(paused) == 0 {
		return paused, nil
	}
	return paused, c.lockDeadlines(ctx, tx, paused)
}

// extendDeadlines makes runs due, and postpones the deadlines of the runs and their attempts, and by PostponeDeadlines
// those of their tasks and workspaces, by the length of each run's pause.
func (c *Core) extendDeadlines(ctx context.Context, tx pgx.Tx, ended []pause) error {
	runIDs := pg.Column(ended, func(p pause) string { return p.RunID })
	stood := pg.Column(ended, func(p pause) float64 { return p.Seconds })
	moved, err := pg.All[runs.Run](ctx, tx, extendRuns, runIDs, stood)
	if err != nil {
		return fmt.Errorf("move deadlines of runs: %w", err)
	}
	steps, err := runs.ChangeAttempts(ctx, tx, extendAttempts, runIDs, stood)
	if err != nil {
		return err
	}
	var buffer runs.Buffer
	for i := range steps {
		buffer.Attempt(&steps[i])
	}
	list := make([]Resumed, 0, len(moved))
	for i := range moved {
		buffer.Run(&moved[i])
		for _, p := range ended {
			if p.RunID == moved[i].ID {
				length := time.Duration(p.Seconds * float64(time.Second))
				list = append(list, Resumed{RunID: p.RunID, WorkspaceID: moved[i].WorkspaceID, Stood: length})
			}
		}
	}
	if c.postpone != nil {
		if err := c.postpone(ctx, tx, list); err != nil {
			return err
		}
	}
	return buffer.Flush(ctx, tx)
}
