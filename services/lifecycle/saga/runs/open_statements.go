package runs

import "github.com/gpuaas/mesh/internal/pg"

// Statements of the attempt that is open in a run's row. They run in a transaction that holds the row's lock.
var (
	// keepOpen gives the open attempts of runs their rows, if they have none, as they were announced.
	keepOpen = pg.Define(pg.RoleLifecycle, "runs.keep_open", `
		INSERT INTO lifecycle.saga_step (`+openInto+`, state)
		SELECT `+openRow+`, 'running' FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) AND r.open_attempt > 0
		ON CONFLICT `+StepKey+` DO NOTHING`)
	// loseOpen inserts attempts as lost that were open in the rows of runs when these were leased again, and that have no
	// row of their own.
	loseOpen = pg.Define(pg.RoleLifecycle, "runs.lose_open", `
		INSERT INTO lifecycle.saga_step AS s (`+openInto+`, state, finished_at, outcome, error, version)
		SELECT r.id, r.step, `+stepName+`, r.phase, o.attempt, r.workspace_id, r.tenant_id, o.fence, r.op_seq,
			r.id || '/' || `+stepName+` || '/' || r.phase, o.since, interval '5 minutes',
			'lost', mesh.clock(), 'lost', 'its driver lost the lease', 2
		FROM unnest($1::uuid[], $2::int[], $3::bigint[], $4::timestamptz[]) AS o (run_id, attempt, fence, since)
		JOIN lifecycle.saga_run r ON r.id = o.run_id
		ON CONFLICT `+StepKey+` DO NOTHING RETURNING `+AttemptColumns)
)
