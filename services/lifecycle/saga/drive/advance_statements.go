package drive

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// advanceRuns closes the open attempts of runs and opens the next ones. The attempt that it opens is the first of its
// step and direction: a run comes to a step once forward and once back, and a lease opens the attempt that follows a
// failure, a loss or an operator's verb.
var advanceRuns = pg.Define(pg.RoleLifecycle, "saga.advance_runs",
	`WITH m AS (SELECT * FROM unnest(`+transitionColumns+`, $24::int[], $25::text[], $26::bool[])
	AS m (`+transitionNames+`, n_step, n_phase, bump)),
u AS (UPDATE lifecycle.saga_run r SET step = m.n_step, phase = m.n_phase, state = m.state, attempts = 0, losses = 0,
	tried_since = mesh.clock(), fence = CASE WHEN m.bump THEN mesh.next(r.fence) ELSE r.fence
		END, why_waiting = m.why, stuck_reason = `+stuckKept+`,
	`+setError+`, op_seq = mesh.next(r.op_seq), open_attempt = 1, open_since = mesh.clock(),
		version = r.version + 1`+casRun+`,
	r.fence AS now_fence, r.signal AS now_signal, r.op_seq AS now_op_seq, r.op_last AS now_op_last,
		r.tried_since AS now_tried, r.open_since AS now),
`+closeAttempt+setAttemptError+ofOpen+`
SELECT u.id, u.now_version AS version, u.now_stuck AS stuck, u.now_fence AS fence, u.now_signal AS signal,
	u.now_op_seq AS op_seq,
	u.now_op_last AS op_last, u.now_tried AS tried_since, u.now AS open_since, (SELECT mesh.rolled_back()) AS paused,
	COALESCE(closed.version, 0) AS closed_version, closed.finished_at AS closed_at
FROM u LEFT JOIN closed ON closed.run_id = u.id`)

// advancedRow is a row of advanceRuns.
type advancedRow struct {
	ID            string     `db:"id"`
	Version       int64      `db:"version"`
	Stuck         string     `db:"stuck"`
	Fence         int64      `db:"fence"`
	Signal        int64      `db:"signal"`
	OpSeq         int64      `db:"op_seq"`
	OpLast        int64      `db:"op_last"`
	TriedSince    time.Time  `db:"tried_since"`
	OpenSince     time.Time  `db:"open_since"`
	Paused        bool       `db:"paused"`
	ClosedVersion int64      `db:"closed_version"` // 0: the attempt that was to be closed is not open
	ClosedAt      *time.Time `db:"closed_at"`
}
