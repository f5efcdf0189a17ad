package background

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// dueRow is a job as a replica reads it when it queries what is due.
type dueRow struct {
	Name  string  `db:"name"`
	Taken bool    `db:"taken"` // it was due, and this replica runs it
	Free  bool    `db:"free"`  // it is taken, and locked: no run of it is under way
	Late  float64 `db:"late"`  // seconds after it was due; set if it is taken
	Left  float64 `db:"left"`  // seconds until it is due next
}

var (
	// A job that is new is due at once.
	addJobs = pg.DefineShared(runners, "background.add_jobs", `
		INSERT INTO mesh.periodic_job (service, name, due_at) SELECT current_user, n.name, mesh.clock()
			FROM unnest($1::text[]) AS n (name) ORDER BY n.name
		ON CONFLICT (service, name) DO NOTHING`)

	// takeJobs moves each job that is due by its period and returns all jobs. A job whose time is more than a period ahead
	// is due as well: its period was longer when it was moved, or the database was restored to an earlier state. The jobs
	// taken are locked for the session, except those of $3, which run here. jobLock names the lock. Of two replicas that
	// query at once, one takes nothing and queries again soon: an advisory lock decides which, because a row lock would be
	// written to the WAL. A job that another replica moved between this replica's snapshot and its lock has another due
	// time by then, and is left as it is.
	takeJobs = pg.DefineShared(runners, "background.take_jobs", `
		WITH wanted AS (
			SELECT n.name, make_interval(secs => n.every) AS every FROM unnest($1::text[], $2::float8[]) AS n (name, every)
		), due AS MATERIALIZED (
			SELECT j.name, j.due_at, w.every FROM mesh.periodic_job j JOIN wanted w USING (name)
			WHERE j.service = current_user AND (j.due_at <= mesh.clock() OR j.due_at > mesh.clock() + w.every)
		), alone AS MATERIALIZED (
			SELECT due.* FROM due
				WHERE (SELECT pg_try_advisory_xact_lock(hashtextextended('mesh.periodic_job/' || current_user, 0)))
		), taken AS (
			UPDATE mesh.periodic_job j SET due_at = mesh.clock() + due.every FROM alone due
			WHERE j.service = current_user AND j.name = due.name AND j.due_at = due.due_at
			RETURNING j.name, j.due_at AS next_at, due.due_at
		)
		SELECT j.name, t.name IS NOT NULL AS taken,
			CASE WHEN t.name IS NOT NULL AND j.name <> ALL ($3::text[])
				THEN pg_try_advisory_lock(`+jobLock("j.name")+`) ELSE false END AS free,
			COALESCE(GREATEST(extract(epoch FROM mesh.clock() - t.due_at), 0), 0)::float8 AS late,
			extract(epoch FROM COALESCE(t.next_at, j.due_at) - mesh.clock())::float8 AS left
		FROM mesh.periodic_job j JOIN wanted w USING (name) LEFT JOIN taken t USING (name)
		WHERE j.service = current_user`)
)

// schedule holds the jobs and their periods; the database's clock decides when they are due.
type schedule struct {
	names []string
	every []float64 // seconds
}

// take returns the jobs that are this replica's to run now, and how long to sleep until another is due. The session
// locks the jobs that are free; none of those that run here is free. Jobs that have no row get one, and are due at
// once.
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
	if len(rows) < len(s.names) {
		// The taken jobs have been moved and locked: they run even if adding the others fails, which is tried again at the
		// next call.
		if _, err := pg.Exec(ctx, session, addJobs, s.names); err != nil && len(due) == 0 {
			return nil, 0, fmt.Errorf("add periodic work: %w", err)
		}
		left = 0
	}
	return due, left, nil
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }
