package drive

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

var releaseLeases = pg.Define(pg.RoleLifecycle, "saga.release_leases",
	`WITH m AS (SELECT * FROM unnest(`+transitionColumns+`, $24::bool[], $25::int[], $26::bigint[],
		$27::float8[], $28::text[])
	AS m (`+transitionNames+`, wakeable, tries, signal, after, stuck)),
u AS (UPDATE lifecycle.saga_run r
	SET state = m.state, owner = NULL, lease_until = NULL, wakeable = m.wakeable, attempts = m.tries, losses = 0,
	next_at = CASE WHEN m.wakeable AND r.signal <> m.signal THEN mesh.clock()
		ELSE mesh.clock() + make_interval(secs => m.after) END,
	why_waiting = m.why, stuck_reason = CASE WHEN m.stuck <> '' THEN m.stuck ELSE `+stuckParked+` END,
	`+setError+`, finished_at = CASE WHEN m.state IN ('succeeded', 'failed') THEN mesh.clock()
		END, open_attempt = 0, open_since = NULL,
	version = r.version + 1`+casRun+`, r.next_at AS now_next, r.finished_at AS now_finished, mesh.clock() AS now),
`+closeAttempt+setMeanwhile+ofOpen+`
SELECT u.id, u.now_version AS version, u.now_stuck AS stuck, u.now_next AS next_at, u.now_finished AS finished_at,
	COALESCE(closed.version, 0) AS closed_version, closed.finished_at AS closed_at
FROM u LEFT JOIN closed ON closed.run_id = u.id`)

// releasedRow is a row of releaseLeases.
type releasedRow struct {
	ID            string     `db:"id"`
	Version       int64      `db:"version"`
	Stuck         string     `db:"stuck"`
	NextAt        time.Time  `db:"next_at"`
	Finished      *time.Time `db:"finished_at"`
	ClosedVersion int64      `db:"closed_version"` // 0: the attempt that was to be closed is not open
	ClosedAt      *time.Time `db:"closed_at"`
}
