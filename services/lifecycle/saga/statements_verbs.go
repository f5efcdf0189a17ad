package saga

import "github.com/gpuaas/mesh/internal/pg"

// adoptedClaim is a claim that Intent wrote, and whether it existed before.
type adoptedClaim struct {
	Claim
	Adopted bool `db:"adopted" expr:"@.xmax <> 0"`
}

// claimSetting is the SET list of a change of a claim. Its argument is $2.
type claimSetting string

const (
	setConfirmed claimSetting = `confirmed_at = COALESCE(c.confirmed_at, mesh.clock()), last_seen_at = mesh.clock(),
		external_ref = CASE WHEN $2 <> '' THEN $2 ELSE c.external_ref END`
	setReleased claimSetting = `released_at = COALESCE(c.released_at, mesh.clock()),
		last_seen_at = COALESCE($2::text::timestamptz, c.last_seen_at)`
	setOrphaned claimSetting = `orphaned_at = COALESCE(c.orphaned_at, mesh.clock()),
		orphaned_by = ($2::text[])[1], orphan_reason = ($2::text[])[2]`
)

// orphanChange is the SET list of a change of orphan claims, and the condition that selects them.
type orphanChange struct{ set, which string }

// reaped appends to the reason for which a claim was given up how its resource is known to be gone.
const reaped = `released_at = mesh.clock(), orphan_reason = c.orphan_reason || '; reaped: ' || $1`

var (
	reapOfEpoch    = orphanChange{reaped, `c.workspace_id = $2 AND c.epoch = $3 AND c.kind = ANY ($4)`}
	reapOne        = orphanChange{reaped, `c.id = $2`}
	readoptOfEpoch = orphanChange{`orphaned_at = NULL, orphaned_by = '', orphan_reason = ''`, `c.workspace_id = $1
		AND c.epoch = $2
		AND NOT EXISTS (SELECT 1 FROM lifecycle.resource_claim l WHERE l.workspace_id = c.workspace_id AND l.kind = c.kind
			AND l.deterministic_name = c.deterministic_name AND l.id <> c.id AND l.released_at IS NULL
			AND (l.orphaned_at IS NULL OR l.id > c.id))`}
)

var (
	changeClaim = pg.DefineDynamic(pg.RoleLifecycle, "saga.change_claim", func(s claimSetting) string {
		return `UPDATE lifecycle.resource_claim c SET ` + string(s) + `, version = c.version + 1
			WHERE c.id = $1 AND c.released_at IS NULL RETURNING ` + claimColumns
	}, setConfirmed, setReleased, setOrphaned)
	changeOrphans = pg.DefineDynamic(pg.RoleLifecycle, "saga.change_orphans", func(o orphanChange) string {
		return `UPDATE lifecycle.resource_claim c SET ` + o.set + `, version = c.version + 1
			WHERE ` + o.which + ` AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL RETURNING ` + claimColumns
	}, reapOfEpoch, reapOne, readoptOfEpoch)
)

// Statements of a step's environment.
var (
	holdRun = pg.Define(pg.RoleLifecycle, "saga.hold_run", `
		SELECT r.fence = $2 AND r.owner IS NOT NULL AND r.step = $3 AND r.phase = $4, mesh.rolled_back()
		FROM lifecycle.saga_run r WHERE r.id = $1 FOR SHARE`)
	readProgress = pg.Define(pg.RoleLifecycle, "saga.read_progress", `
		SELECT COALESCE(o.progress->>'note' = $6, false), COALESCE((
			SELECT p.progress->>'note' <> $6 FROM lifecycle.saga_step p
			WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND p.progress ? 'note' AND `+sameTry("p")+`
			ORDER BY p.attempt DESC LIMIT 1), true), COALESCE((
			SELECT p.progress->>'note' <> $6 FROM lifecycle.saga_step p
			WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND p.progress ? 'note' ORDER BY p.attempt DESC
				LIMIT 1), true)
		FROM lifecycle.saga_run r
		CROSS JOIN LATERAL (SELECT r.id AS run_id, $3::int AS step, $4::text AS dir, $5::int AS attempt) s
		LEFT JOIN lifecycle.saga_step o ON o.run_id = s.run_id AND o.step = s.step AND o.dir = s.dir AND o.attempt = s.attempt
		WHERE r.id = $1 AND r.fence = $2 AND (o.state = 'running'
			OR o.run_id IS NULL AND r.step = s.step AND r.phase = s.dir AND r.open_attempt = s.attempt)`)
	progressRun = pg.Define(pg.RoleLifecycle, "saga.progress_run", `
		UPDATE lifecycle.saga_run r SET version = r.version + 1,
			progress_at = CASE WHEN $3 THEN mesh.clock() ELSE r.progress_at END,
			stuck_reason = CASE WHEN $4 AND r.stuck_reason NOT LIKE 'run_stalled%' THEN '' ELSE r.stuck_reason END
		WHERE r.id = $1 AND r.fence = $2 RETURNING `+runColumns)
	progressStep = pg.Define(pg.RoleLifecycle, "saga.progress_step", `
		UPDATE lifecycle.saga_step s SET progress_at = CASE WHEN $6 THEN mesh.clock() ELSE s.progress_at END,
			stalled = s.stalled AND NOT $6, version = s.version + 1, progress = jsonb_build_object('note', $5::text)
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4 AND s.state = 'running'
		RETURNING `+stepColumns)
	writeIntent = pg.Define(pg.RoleLifecycle, "saga.write_intent", `
		INSERT INTO lifecycle.resource_claim AS c
			(id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name, epoch, node_id)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, NULLIF($10, '')::uuid)
		ON CONFLICT (workspace_id, kind, deterministic_name) WHERE released_at IS NULL AND orphaned_at IS NULL
		DO UPDATE SET run_id = EXCLUDED.run_id, step = EXCLUDED.step, epoch = GREATEST(c.epoch, EXCLUDED.epoch),
			node_id = COALESCE(EXCLUDED.node_id, c.node_id), version = c.version + 1
		RETURNING `+pg.Columns[adoptedClaim]("c"))
	liveClaims = pg.Define(pg.RoleLifecycle, "saga.live_claims", `
		SELECT `+claimColumns+` FROM lifecycle.resource_claim c
		WHERE c.workspace_id = $1 AND c.released_at IS NULL AND c.orphaned_at IS NULL
			AND (cardinality($2::text[]) = 0 OR c.kind = ANY ($2))
		ORDER BY c.intent_at, c.id`)
)

// Statements of the verbs that people use on runs.
var (
	cancelRun = pg.Define(pg.RoleLifecycle, "saga.cancel_run", `
		UPDATE lifecycle.saga_run r SET cancel_requested_at = mesh.clock(), cancel_by = $2, cancel_reason = $3,
			signal = r.signal + 1, next_at = CASE WHEN r.owner IS NULL THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END,
				version = r.version + 1
		WHERE r.id = $1 RETURNING `+runColumns)
	amendRun = pg.Define(pg.RoleLifecycle, "saga.amend_run", `
		UPDATE lifecycle.saga_run r SET input = $3, signal = r.signal + 1, version = r.version + 1,
			next_at = CASE WHEN r.owner IS NULL AND r.wakeable THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END
		WHERE r.id = $1 AND r.phase = 'do' AND r.step_names[r.step + 1] = $2 AND r.cancel_requested_at IS NULL
			AND r.state IN ('pending', 'running', 'waiting') RETURNING `+runColumns)
	archiveRuns = pg.Define(pg.RoleLifecycle, "saga.archive_runs", `
		UPDATE lifecycle.saga_run r SET archived_at = mesh.clock() WHERE r.workspace_id = $1
			AND r.archived_at IS NULL`)
	resetWorkspace = pg.Define(pg.RoleLifecycle, "saga.reset_workspace", `
		UPDATE lifecycle.workspace w SET reset_done = true, version = w.version + 1
		WHERE w.id = $1 AND w.state = 'failed' AND NOT w.reset_done`)
	listOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.list_open_attempts", `
		SELECT format('attempt %s at %s the step "%s" of operation %s is open: it is %s', s.attempt,
			CASE s.dir WHEN 'do' THEN 'doing' ELSE 'undoing' END, s.name, s.run_id, s.state)
		FROM lifecycle.saga_step s JOIN lifecycle.saga_run r ON r.id = s.run_id
		WHERE r.workspace_id = $1 AND s.state IN ('running', 'waiting') ORDER BY s.op_seq LIMIT 10`)
	formerRunsOf = pg.Define(pg.RoleLifecycle, "saga.former_runs", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.workspace_id = $1 ORDER BY r.created_at DESC, r.id DESC
			LIMIT 2`)
	orphanOfStep = pg.Define(pg.RoleLifecycle, "saga.orphan_of_step", `
		UPDATE lifecycle.resource_claim c SET orphaned_at = mesh.clock(), orphaned_by = $4, orphan_reason = $5,
			version = c.version + 1
		WHERE c.workspace_id = $1 AND c.released_at IS NULL AND c.orphaned_at IS NULL
			AND (c.kind = ANY ($2) OR (cardinality($2::text[]) = 0 AND c.run_id = $6 AND c.step = $3))
		RETURNING `+claimColumns)
	endStuckRun = pg.Define(pg.RoleLifecycle, "saga.end_stuck", `
		UPDATE lifecycle.saga_run r SET state = $2, finished_at = mesh.clock(), stuck_reason = '',
			why_waiting = '',
			version = r.version + 1
		WHERE r.id = $1 AND r.state = 'stuck' RETURNING `+runColumns)
	unstickRun = pg.Define(pg.RoleLifecycle, "saga.unstick", `
		UPDATE lifecycle.saga_run r SET state = $2, step = $3, attempts = 0, losses = 0,
			tried_since = mesh.clock(), stuck_reason = '',
			why_waiting = 'waiting for a worker: ' || $4, next_at = mesh.clock(), wakeable = true, version = r.version + 1,
			deadline_at = CASE WHEN r.deadline_at <= mesh.clock() THEN mesh.clock() + make_interval(secs => $5)
				ELSE r.deadline_at END
		WHERE r.id = $1 AND r.state = 'stuck' RETURNING `+runColumns)
	lockRunByID = pg.Define(pg.RoleLifecycle, "saga.lock_run", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.id = $1 FOR NO KEY UPDATE`)
	lockLiveRun = pg.Define(pg.RoleLifecycle, "saga.lock_live_run", `
		SELECT FROM lifecycle.saga_run r
		WHERE r.workspace_id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating',
			'stuck') FOR NO KEY UPDATE`)
	cancelParked = pg.Define(pg.RoleLifecycle, "saga.cancel_parked", `
		UPDATE lifecycle.saga_run r SET state = 'failed', fence = mesh.next(r.fence),
			cancel_requested_at = mesh.clock(), cancel_by = $3, cancel_reason = $4, error_code = $5, error = $6,
			error_layer = $7, error_step = r.step, stuck_reason = '', why_waiting = '', finished_at = mesh.clock(),
			version = r.version + 1
		WHERE r.id = $1 AND r.state = 'waiting' AND r.owner IS NULL AND r.phase = 'do'
			AND r.step_names[r.step + 1] = $2 AND r.cancel_requested_at IS NULL
		RETURNING `+runColumns)
	cancelOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.cancel_open_attempts", `
		UPDATE lifecycle.saga_step s SET state = 'cancelled', outcome = 'cancelled',
			finished_at = mesh.clock(), why_waiting = '', error_code = $2, error = $3, error_layer = $4, version = s.version + 1
		WHERE s.run_id = $1 AND s.state IN ('running', 'waiting') RETURNING `+stepColumns)
)
