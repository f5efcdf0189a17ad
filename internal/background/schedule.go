package background

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// dueRow is a job as a replica finds it when it looks what is due.
type dueRow struct {
	Name  string  `db:"name"`
	Taken bool    `db:"taken"` // it was due, and is this replica's to run
	Free  bool    `db:"free"`  // it is taken, and locked: no run of it is under way
	Late  float64 `db:"late"`  // seconds after it was due; of one that is taken
	Left  float64 `db:"left"`  // seconds until it is due next
}

var (
	// A job that is new is due at once.
	addJobs = pg.DefineShared(runners, "background.add_jobs", `
		INSERT INTO mesh.periodic_job (service, name, due_at) SELECT current_user, n.name, mesh.clock() FROM unnest($1::text[]) AS n (name) ORDER BY n.name
		ON CONFLICT (service, name) DO NOTHING`)

	// takeJobs moves what is due by its period and returns all. What is due later than in a period is due as well: the period was longer when it was moved,
	// or the database went back. What is taken is locked for the session, but for those of $3, which run here. The lock is named by jobLock.
	// Of two replicas that look at once one takes nothing, and looks again soon: an advisory lock decides that, as one of a row would be logged. What another
	// moved between a replica's snapshot and its lock is due at another time by then, and stays as it is.
	takeJobs = pg.DefineShared(runners, "background.take_jobs", `
		WITH wanted AS (
			SELECT n.name, make_interval(secs => n.every) AS every FROM unnest($1::text[], $2::float8[]) AS n (name, every)
		), due AS MATERIALIZED (
			SELECT j.name, j.due_at, w.every FROM mesh.periodic_job j JOIN wanted w USING (name)
			WHERE j.service = current_user AND (j.due_at <= mesh.clock() OR j.due_at > mesh.clock() + w.every)
		), alone AS MATERIALIZED (
			SELECT due.* FROM due WHERE (SELECT pg_try_advisory_xact_lock(hashtextextended('mesh.periodic_job/' || current_user, 0)))
		), taken AS (
			UPDATE mesh.periodic_job j SET due_at = mesh.clock() + due.every FROM alone due
			WHERE j.service = current_user AND j.name = due.name AND j.due_at = due.due_at
			RETURNING j.name, j.due_at AS next_at, due.due_at
		)
		SELECT j.name, t.name IS NOT NULL AS taken,
			CASE WHEN t.name IS NOT NULL AND j.name <> ALL ($3::text[]) THEN pg_try_advisory_lock(`+jobLock("j.name")+`) ELSE false END AS free,
			COALESCE(GREATEST(extract(epoch FROM mesh.clock() - t.due_at), 0), 0)::float8 AS late,
			extract(epoch FROM COALESCE(t.next_at, j.due_at) - mesh.clock())::float8 AS left
		FROM mesh.periodic_job j JOIN wanted w USING (name) LEFT JOIN taken t USING (name)
		WHERE j.service = current_user`)
)

// schedule is when jobs are due, by the database's clock.
type schedule struct {
	names []string
	every []float64 // seconds
}

// take returns the jobs that are this replica's to run now, and how long to sleep until another is due. Those that are free are locked by the session;
// of those that run here none is. Jobs that have no row get one, and are due at once.
func (s *schedule) take(ctx context.Context, session pg.Querier, running []string) ([]dueRow, time.Duration, error) {
	rows, err := pg.All[dueRow](ctx, session, takeJobs, s.names, s.every, running)
	if err != nil {
		return nil, 0, fmt.Errorf("take periodic work: %w", err)
	}
	var due []dueRow
	left := longestSleep
	for _, row := range rows {
		if row.Taken {
			due = append(due, row)
		}
		left = min(left, max(seconds(row.Left), 0))
	}
	if len(rows) < len(s.names) { // those that are taken have been moved and locked: they run whatever is added
		if _, err := pg.Exec(ctx, session, addJobs, s.names); err != nil {
			return nil, 0, fmt.Errorf("add periodic work: %w", err)
		}
		left = 0
	}
	return due, left, nil
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }
