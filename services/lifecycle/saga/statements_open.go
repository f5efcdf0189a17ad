package saga

import (
	"strconv"

	"github.com/gpuaas/mesh/internal/pg"
)

// opRange is how many operation numbers a run is given at once. An attempt takes one, so that few runs need a second
// range. While a run is live no other run or reaper draws numbers of its workspace: the numbers that reapers draw
// afterwards are above the range.
const opRange = 64

// openRow selects, as columns of saga_step, the attempt that is open in the row of a run r and has no row of its own
// yet. The driver adds its deadline; the time after which it stalls is that of its definition, or this one.
const (
	openInto = `run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, idem_key, started_at, stall_after`
	openRow  = `r.id, r.step, ` + stepName + `, r.phase, r.open_attempt, r.workspace_id, r.tenant_id, r.fence, r.op_seq,
		r.id || '/' || ` + stepName + ` || '/' || r.phase, r.open_since, interval '5 minutes'`
	stepName = `COALESCE(r.step_names[r.step + 1], '?')`
	stepKey  = `(run_id, step, dir, attempt)`
)

// lostAttempt is the SET list that closes an attempt whose driver lost its lease.
const lostAttempt = `state = 'lost', finished_at = mesh.clock(), outcome = 'lost', why_waiting = '',
	error = 'its driver lost the lease', error_code = '', error_layer = '', cause = '', last_output = ''`

// Statements of the attempt that is open in a run's row. All of them run in a transaction that holds the row's lock.
var (
	// keepOpen gives the open attempts of runs their rows, if they have none, as they were announced.
	keepOpen = pg.Define(pg.RoleLifecycle, "saga.keep_open", `
		INSERT INTO lifecycle.saga_step (`+openInto+`, state)
		SELECT `+openRow+`, 'running' FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) AND r.open_attempt > 0
		ON CONFLICT `+stepKey+` DO NOTHING`)
	loseAttempts = pg.Define(pg.RoleLifecycle, "saga.lose_attempts", `
		UPDATE lifecycle.saga_step s SET `+lostAttempt+`, version = s.version + 1
		WHERE s.run_id = ANY ($1::uuid[]) AND s.state = 'running' RETURNING `+stepColumns)
	// loseOpen inserts attempts as lost that were open in the rows of runs when these were leased again, and that have no
	// row of their own.
	loseOpen = pg.Define(pg.RoleLifecycle, "saga.lose_open", `
		INSERT INTO lifecycle.saga_step AS s (`+openInto+`, state, finished_at, outcome, error, version)
		SELECT r.id, r.step, `+stepName+`, r.phase, o.attempt, r.workspace_id, r.tenant_id, o.fence, r.op_seq,
			r.id || '/' || `+stepName+` || '/' || r.phase, o.since, interval '5 minutes',
			'lost', mesh.clock(), 'lost', 'its driver lost the lease', 2
		FROM unnest($1::uuid[], $2::int[], $3::bigint[], $4::timestamptz[]) AS o (run_id, attempt, fence, since)
		JOIN lifecycle.saga_run r ON r.id = o.run_id
		ON CONFLICT `+stepKey+` DO NOTHING RETURNING `+stepColumns)
	// dropOpen takes back the attempts that a lease has just opened of runs that cannot be driven.
	dropOpen = pg.Define(pg.RoleLifecycle, "saga.drop_open", `
		UPDATE lifecycle.saga_run r SET open_attempt = 0, open_since = NULL
		WHERE r.id = ANY ($1::uuid[]) AND r.open_attempt > 0`)
	// useUpRange marks the rest of the runs' ranges as used.
	useUpRange = pg.Define(pg.RoleLifecycle, "saga.use_up_range", `
		UPDATE lifecycle.saga_run r SET op_seq = r.op_last WHERE r.id = ANY ($1::uuid[])`)
	// insertAttempts opens the next attempt of runs that were just leased.
	insertAttempts = pg.Define(pg.RoleLifecycle, "saga.open_attempts", `
		UPDATE lifecycle.saga_run r SET op_seq = mesh.next(r.op_seq), open_since = mesh.clock(),
			open_attempt = 1 + COALESCE((SELECT max(p.attempt) FROM lifecycle.saga_step p
				WHERE p.run_id = r.id AND p.step = r.step AND p.dir = r.phase), 0)
		WHERE r.id = ANY ($1::uuid[]) RETURNING r.id, r.op_seq, r.op_last, r.open_attempt, r.open_since`)
	// drawRange gives runs new ranges above everything that was drawn for their workspaces, and the open attempts the
	// first numbers of these.
	drawRange = pg.Define(pg.RoleLifecycle, "saga.draw_range", `
		WITH ws AS (UPDATE lifecycle.workspace w SET op_seq = mesh.next(w.op_seq) + `+strconv.Itoa(opRange-1)+`
			FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) AND w.id = r.workspace_id RETURNING r.id, w.op_seq)
		UPDATE lifecycle.saga_run r SET op_seq = ws.op_seq - `+strconv.Itoa(opRange-1)+`, op_last = ws.op_seq
		FROM ws WHERE r.id = ws.id RETURNING r.id, r.op_seq, r.op_last, r.open_attempt, r.open_since`)
	attemptByKey = pg.Define(pg.RoleLifecycle, "saga.attempt_by_key", `
		SELECT `+stepColumns+` FROM lifecycle.saga_step s
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4`)
)
