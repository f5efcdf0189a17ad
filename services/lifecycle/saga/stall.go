package saga

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

const stallBatch = 100

// sameTry says of an attempt p of the step of an attempt s that both are one try: nothing but lost drivers lies between them. A step that wedges and takes its
// worker with it has been wedged since then, not since another worker began to wait for it.
//
// Scenario: saga-step-wedged.
func sameTry(p string) string {
	return p + `.attempt > COALESCE((SELECT max(q.attempt) FROM lifecycle.saga_step q
		WHERE q.run_id = s.run_id AND q.step = s.step AND q.dir = s.dir AND q.attempt < s.attempt AND q.state <> 'lost'), 0)`
}

// quietSince is when the step of an attempt s last moved.
var quietSince = `GREATEST(
	(SELECT max(p.progress_at) FROM lifecycle.saga_step p WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir),
	(SELECT min(p.started_at) FROM lifecycle.saga_step p WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND ` + sameTry("p") + `))`

// notPaused holds for a run r that does not stand still: one that does shows no life on purpose.
const notPaused = `NOT (SELECT mesh.rolled_back()) AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause h WHERE h.run_id = r.id AND h.since IS NOT NULL)`

type stall struct {
	runID   string
	step    int
	dir     string
	attempt int // 0: the run as a whole
	reason  string
	after   float64 // seconds that it may be quiet, for an attempt
}

// stallAfter is how long a step may show no progress now; without a step, how long a run may last.
func (c *Core) stallAfter(def *Definition, step *Step) time.Duration {
	name, after := "", def.StallAfter
	if step != nil {
		name, after = step.Name, step.StallAfter
	}
	if c.stalls != nil {
		if by := c.stalls(def.Name, name); by > 0 {
			return by
		}
	}
	return after
}

// MarkStalls flags what shows no life, by two clocks: attempts without progress for longer than their step allows, and runs that no driver has
// touched for silent after they were due. Runs that last longer than their definition expects are flagged as well. A flag is a reason and an
// event; nothing is stopped by it. It answers how many were flagged.
func (c *Core) MarkStalls(ctx context.Context, silent time.Duration) (int, error) {
	found, err := c.findStalls(ctx, silent)
	if err != nil {
		return 0, err
	}
	n := 0
	for _, s := range found {
		marked, err := c.markStall(ctx, s)
		if err != nil {
			return n, err
		}
		if marked {
			n++
		}
	}
	if n > 0 {
		c.stats.Stalled.Add(int64(n))
		c.appended.Notify()
	}
	return n, nil
}

func (c *Core) findStalls(ctx context.Context, silent time.Duration) ([]stall, error) {
	var definitions, keys, steps []string
	var after, quiet []float64
	for _, d := range c.registry.newest {
		definitions, after = append(definitions, d.Name), append(after, c.stallAfter(d, nil).Seconds())
	}
	for k, d := range c.registry.byKey {
		for i := range d.Steps {
			keys, steps, quiet = append(keys, k), append(steps, d.Steps[i].Name), append(quiet, c.stallAfter(d, &d.Steps[i]).Seconds())
		}
	}
	rows, err := c.db.Query(ctx, `
		(SELECT s.run_id, s.step, s.dir, s.attempt, 'step_stalled: no progress at "' || s.name || '" for ' || p.after, extract(epoch FROM p.after)::float8
		FROM lifecycle.saga_run r JOIN lifecycle.saga_step s ON s.run_id = r.id AND s.step = r.step AND s.dir = r.phase
		CROSS JOIN LATERAL (SELECT COALESCE((SELECT make_interval(secs => x.after) FROM unnest($5::text[], $6::text[], $7::float8[]) AS x (key, name, after)
			WHERE x.key = r.definition || ':' || r.def_version AND x.name = s.name), s.stall_after) AS after) p
		WHERE r.state IN ('running', 'waiting', 'compensating') AND s.state IN ('running', 'waiting') AND NOT s.stalled AND `+quietSince+` + p.after < mesh.clock()
			AND `+notPaused+` LIMIT $1)
		UNION ALL
		(SELECT r.id, r.step, r.phase, 0, 'driver_silent: due since ' || to_char(r.next_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') ||
			' and taken up by no worker', 0
		FROM lifecycle.saga_run r
		WHERE r.state IN ('pending', 'running', 'waiting', 'compensating') AND r.next_at < mesh.clock() - make_interval(secs => $2)
			AND r.stuck_reason = '' AND `+notPaused+` LIMIT $1)
		UNION ALL
		(SELECT r.id, r.step, r.phase, 0, 'run_stalled: not over after ' || make_interval(secs => d.after), 0
		FROM lifecycle.saga_run r JOIN unnest($3::text[], $4::float8[]) AS d (name, after) ON d.name = r.definition
		WHERE r.state IN ('pending', 'running', 'waiting', 'compensating') AND r.stuck_reason = '' AND `+notPaused+`
			AND r.created_at + make_interval(secs => d.after) + COALESCE((SELECT p.total FROM lifecycle.run_pause p WHERE p.run_id = r.id), '0') < mesh.clock() LIMIT $1)`, stallBatch, silent.Seconds(), definitions, after, keys, steps, quiet)
	if err != nil {
		return nil, fmt.Errorf("find stalls: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (stall, error) {
		var s stall
		return s, row.Scan(&s.runID, &s.step, &s.dir, &s.attempt, &s.reason, &s.after)
	})
	if err != nil {
		return nil, fmt.Errorf("find stalls: %w", err)
	}
	return found, nil
}

// markStall flags one, unless it moved meanwhile.
func (c *Core) markStall(ctx context.Context, s stall) (bool, error) {
	marked := false
	err := pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		marked = false
		r := &Run{}
		err := tx.QueryRow(ctx, `UPDATE lifecycle.saga_run r SET seal = NULL, stuck_reason = $4, version = r.version + 1
			WHERE r.id = $1 AND r.step = $2 AND r.phase = $3 AND r.state IN ('pending', 'running', 'waiting', 'compensating')
				AND ($5 > 0 OR r.stuck_reason = '') RETURNING `+runColumns, s.runID, s.step, s.dir, s.reason, s.attempt).Scan(r.targets()...)
		if pg.IsNoRows(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("flag run: %w", err)
		}
		var j journal
		if s.attempt > 0 {
			a := &Attempt{}
			err := tx.QueryRow(ctx, `UPDATE lifecycle.saga_step s SET stalled = true, version = s.version + 1
				WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4 AND s.state IN ('running', 'waiting') AND NOT s.stalled
					AND `+quietSince+` + make_interval(secs => $5) < mesh.clock() RETURNING `+stepColumns, s.runID, s.step, s.dir, s.attempt, s.after).Scan(a.targets()...)
			if pg.IsNoRows(err) {
				return errMoved
			}
			if err != nil {
				return fmt.Errorf("flag attempt: %w", err)
			}
			j.step(a)
		}
		j.run(r)
		marked = true
		return j.flush(ctx, tx)
	})
	if err == errMoved { //nolint:errorlint // our own sentinel, returned as it is
		return false, nil
	}
	return marked, err
}

var errMoved = fmt.Errorf("it moved meanwhile") //nolint:gochecknoglobals // a sentinel
