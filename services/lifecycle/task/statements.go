package task

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// record is a Row as it is read, with its state as it is stored.
type record struct {
	Row
	StateName string `db:"state"`
}

var columns = pg.Columns[record]("t")

func (r record) row() (Row, error) {
	out := r.Row
	var err error
	if out.State, err = names.Parse[commonv1.TaskState](r.StateName); err != nil {
		return Row{}, fmt.Errorf("read state of task %s: %w", r.TaskID, err)
	}
	return out, nil
}

// one runs a statement and returns its only task. Without one the error is pgx.ErrNoRows.
func one(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Row, error) {
	r, err := pg.One[record](ctx, q, s, args...)
	if err != nil {
		return Row{}, err
	}
	return r.row()
}

// all runs a statement and returns its tasks.
func all(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) ([]Row, error) {
	records, err := pg.All[record](ctx, q, s, args...)
	if err != nil {
		return nil, err
	}
	return aside.Rows(ctx, "task", records, func(r record) string { return r.TaskID }, record.row)
}

// Rows with the other columns that their statements return.
type (
	// leasedRow is a task that was leased.
	leasedRow struct {
		record
		Payload []byte `db:"payload"`
		Report  bool   `db:"report"` // an event is due
		KeyID   string `db:"key_id"`
	}
	// reportedRow is a task that a report moved, with its state before.
	reportedRow struct {
		record
		Was   string    `db:"was"`
		WasAt time.Time `db:"was_at"` // since when
		// LeasedAt is when the task was leased, if no event has reported that.
		LeasedAt *time.Time `db:"leased_at"`
	}
	// staleRow is a task that the sweep ended.
	staleRow struct {
		record
		// LeasedAt is when the task was leased, if no event has reported that.
		LeasedAt *time.Time `db:"leased_at"`
	}
	// aheadRow is a task below the attempt that a report names, with the place of that report.
	aheadRow struct {
		record
		Place int64 `db:"place"`
	}
	// queuedAt has the columns that the database computes for a task that is queued; the others are as requested.
	queuedAt struct {
		CreatedAt time.Time `db:"created_at"`
		NotBefore time.Time `db:"not_before"`
		ExpiresAt time.Time `db:"expires_at"`
		StateAt   time.Time `db:"state_at"`
	}
	// queuedNow is queuedAt of one of several tasks.
	queuedNow struct {
		TaskID string `db:"task_id" expr:"@.task_id::text"`
		queuedAt
		Leased bool `db:"leased" expr:"@.state = 'dispatched'"` // to the session that was named for it
	}
	// cancelRow is a task in flight that is to stop.
	cancelRow struct {
		NodeID  string `db:"node_id" expr:"@.node_id::text"`
		TaskID  string `db:"task_id" expr:"@.task_id::text"`
		Attempt int32  `db:"attempt"`
		Epoch   int64  `db:"epoch"`
		Reason  string `db:"cancel_reason"`
	}
	// waitingNode is a node with open tasks, and whether they may be leased: 0 none, 1 some later without an event, 2 some
	// now.
	waitingNode struct {
		NodeID string `db:"node_id"`
		Work   int    `db:"work"`
	}
	// latePiece is a late result, and whether it is kept as a row.
	latePiece struct {
		TaskID string `db:"task_id"`
		State  string `db:"state"`
		Kept   bool   `db:"kept"`
	}
)

// setting is the SET list of a change of a task beside its state. Its detail is $4.
type setting string

const (
	setCancelled setting = `cancel_requested_at = coalesce(t.cancel_requested_at, mesh.clock()), cancel_reason = $4`
	// The window is the one of the first time: expires_at - created_at grows with each time, and with the pauses of a run.
	setQueued setting = `expires_at = mesh.clock() + coalesce(t.start_within, t.expires_at - t.created_at),
		start_within = coalesce(t.start_within, t.expires_at - t.created_at), cancel_requested_at = NULL,
		reason = '', error = $4`
	setError   setting = `error = $4`
	setRefused setting = `error = $4, reason = $5`
)

// inFlight selects the ids of the tasks in flight at nodes, and of those in $2: each part by an index of its own,
// however many tasks have ended.
func inFlight(nodes string) string {
	return `SELECT o.task_id FROM lifecycle.task o WHERE o.node_id = ` + nodes + ` AND o.open
		AND o.state <> 'queued' UNION SELECT unnest($2::uuid[])`
}

// StoredDeploys lists deploys whose values are not all sealed with the first key, between two lists of keys. It does
// not read deploys that are sealed with the first key.
var StoredDeploys = pg.Define(pg.RoleLifecycle, "task.stored_deploys", `SELECT `+pg.Columns[storedDeploy]("t")+`
	FROM lifecycle.task t
	WHERE type = 'workload.deploy' AND payload <> '' AND coalesce(secret_keys, '!') <> ''
		AND ((coalesce(secret_keys, '!')) COLLATE "C", task_id) > ($1, $2::uuid)
			AND (coalesce(secret_keys, '!')) COLLATE "C" < $3
	ORDER BY (coalesce(secret_keys, '!')) COLLATE "C", task_id LIMIT $4`)

var (
	changeTask = pg.DefineDynamic(pg.RoleLifecycle, "task.change", func(s setting) string {
		return `
			UPDATE lifecycle.task t SET state = $2::text,
				state_at = CASE WHEN t.state = $2::text THEN t.state_at ELSE mesh.clock() END, version = t.version + 1,
				payload = ` + payloadAt("$2::text") + `, ` + markReported + `, ` + string(s) + `
			WHERE t.task_id = $1 AND t.state = $3 RETURNING ` + columns
	}, setCancelled, setQueued, setError, setRefused)
	listCancels = pg.Define(pg.RoleLifecycle, "task.list_cancels", `
		SELECT `+pg.Columns[cancelRow]("t")+` FROM lifecycle.task t
		WHERE t.cancel_requested_at IS NOT NULL AND t.open AND t.state <> 'queued' AND NOT (SELECT mesh.rolled_back())
			AND EXISTS (SELECT FROM lifecycle.node_gate g WHERE g.node_id = t.node_id AND g.session_open)
		ORDER BY t.task_id LIMIT $1`)
	lockBehindReports = pg.Define(pg.RoleLifecycle, "task.lock_behind_reports", `
		SELECT u.place, `+columns+` FROM unnest($1::uuid[], $2::uuid[], $3::int[]) WITH ORDINALITY AS u (task_id, node_id,
			attempt, place)
		JOIN lifecycle.task t ON t.task_id = u.task_id AND t.node_id = u.node_id AND t.attempt < u.attempt
		ORDER BY t.task_id, u.attempt FOR UPDATE OF t`)
	adoptAttempt = pg.Define(pg.RoleLifecycle, "task.adopt_attempt", `
		UPDATE lifecycle.task t SET attempt = $2, version = t.version + 1,
			state = CASE WHEN t.open THEN 'dispatched' ELSE t.state END,
			state_at = CASE WHEN t.open AND t.state <> 'dispatched' THEN mesh.clock() ELSE t.state_at END,
			session_epoch = CASE WHEN t.open THEN $3 ELSE t.session_epoch END,
			session_id = CASE WHEN t.open THEN nullif($4, '')::uuid ELSE t.session_id END,
			offered_at = CASE WHEN t.open THEN mesh.clock() + interval '1 microsecond' ELSE t.offered_at END,
			key_id = CASE WHEN t.open THEN $6 ELSE t.key_id END
		WHERE t.task_id = $1 AND t.attempt < $2 AND t.node_id = $5 RETURNING `+columns)
	lockLate = pg.Define(pg.RoleLifecycle, "task.lock_of_late_results", `
		SELECT FROM lifecycle.task WHERE task_id = ANY($1::uuid[]) ORDER BY task_id FOR UPDATE`)
	keepLateEvidence = pg.Define(pg.RoleLifecycle, "task.keep_late_evidence", `
		WITH late AS (
			SELECT DISTINCT ON (u.task_id, u.attempt, u.session_epoch, u.state) u.*
			FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::text[]) WITH ORDINALITY
				AS u (task_id, node_id, attempt, session_epoch, state, detail, place)
			JOIN lifecycle.task t ON t.task_id = u.task_id AND t.node_id = u.node_id AND u.attempt <= t.attempt
			WHERE NOT (t.attempt = u.attempt AND t.state = u.state) AND NOT EXISTS (
				SELECT FROM lifecycle.late_evidence e
				WHERE e.task_id = u.task_id AND e.attempt = u.attempt AND e.session_epoch = u.session_epoch AND e.state = u.state)
			ORDER BY u.task_id, u.attempt, u.session_epoch, u.state, u.place
		), placed AS (
			SELECT l.*, row_number() OVER (PARTITION BY l.task_id ORDER BY l.place) +
				(SELECT count(*) FROM lifecycle.late_evidence e WHERE e.task_id = l.task_id) AS nth
			FROM late l
		), kept AS (
			INSERT INTO lifecycle.late_evidence (task_id, attempt, node_id, session_epoch, state, detail)
			SELECT p.task_id, p.attempt, p.node_id, p.session_epoch, p.state, p.detail FROM placed p WHERE p.nth <= $7
		)
		SELECT p.task_id::text AS task_id, p.state, p.nth <= $7 AS kept FROM placed p ORDER BY p.task_id, p.nth`)
	countLateResult = pg.Define(pg.RoleLifecycle, "task.count_late_result", `
		UPDATE lifecycle.task t SET late_evidence = t.late_evidence + 1, version = t.version + 1, `+markReported+` WHERE t.task_id = $1
			RETURNING `+columns)
	lateResults = pg.Define(pg.RoleLifecycle, "task.late_results", `
		SELECT late_evidence FROM lifecycle.task WHERE task_id = $1`)
	countLateResults = pg.Define(pg.RoleLifecycle, "task.count_late_results", `
		UPDATE lifecycle.task SET late_evidence = least(late_evidence::bigint + $2, 2147483647) WHERE task_id = $1`)
	leaseTasks = pg.Define(pg.RoleLifecycle, "task.lease", `
		WITH asked AS (
			SELECT a.* FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::int[]) AS a (node_id, session_id, generation, most)
				JOIN lifecycle.node_gate g ON g.node_id = a.node_id AND `+gate.MayLeaseSQL("a.generation", "$5::text")+`
		), fresh AS (
			SELECT q.task_id, true AS fresh, false AS report, mesh.clock() AS at, a.session_id, a.generation
			FROM asked a CROSS JOIN LATERAL (
				SELECT t.task_id FROM lifecycle.task t
				WHERE t.node_id = a.node_id AND t.open AND t.state = 'queued' AND t.cancel_requested_at IS NULL
					AND t.not_before <= mesh.clock() AND t.expires_at > mesh.clock()
				  AND `+dispatchable("t")+`
				ORDER BY t.task_id LIMIT a.most FOR UPDATE SKIP LOCKED
			) q
		), again AS (
			SELECT q.task_id, false AS fresh, q.unreported AS report, mesh.clock() AS at, a.session_id, a.generation
			FROM asked a CROSS JOIN LATERAL (
				SELECT t.task_id, t.offered_at = t.state_at AS unreported FROM lifecycle.task t
				WHERE t.node_id = a.node_id AND t.open AND t.state = 'dispatched' AND t.cancel_requested_at IS NULL
					AND t.session_epoch = a.generation
				  AND t.offered_at < mesh.clock() - interval '`+offerAgainAfter+`' AND t.expires_at > mesh.clock()
					AND `+dispatchable("t")+`
				ORDER BY t.task_id LIMIT a.most FOR UPDATE SKIP LOCKED
			) q
		), chosen AS (
			SELECT * FROM fresh UNION ALL SELECT * FROM again
		), leased AS (
			UPDATE lifecycle.task t SET
				state = 'dispatched', attempt = t.attempt + CASE WHEN c.fresh THEN 1 ELSE 0 END,
				session_epoch = c.generation, session_id = c.session_id, offered_at = c.at,
				state_at = CASE WHEN c.fresh THEN c.at ELSE t.state_at END,
				key_id = CASE WHEN c.fresh THEN $5::text ELSE coalesce(t.key_id, $5::text) END,
				version = t.version + CASE WHEN c.report THEN 1 ELSE 0 END
			FROM chosen c WHERE t.task_id = c.task_id AND t.state IN ('queued', 'dispatched')
			RETURNING t.*, c.report
		)
		SELECT t.payload, t.report, t.key_id, `+columns+` FROM leased t ORDER BY t.task_id`)
	// Goes from one node with open tasks to the next, so that it reads a few rows of each node, however many tasks that
	// has.
	nodesWithTasks = pg.Define(pg.RoleLifecycle, "task.nodes_with_tasks", `
		WITH RECURSIVE now AS MATERIALIZED (SELECT mesh.clock() AS at), node (node_id, n) AS (
			SELECT (SELECT t.node_id FROM lifecycle.task t WHERE t.open AND t.node_id > $2::uuid ORDER BY t.node_id LIMIT 1), 1
			UNION ALL
			SELECT (SELECT t.node_id FROM lifecycle.task t WHERE t.open AND t.node_id > v.node_id ORDER BY t.node_id LIMIT 1), v.n + 1
			FROM node v WHERE v.node_id IS NOT NULL AND v.n < $1
		)
		SELECT v.node_id::text AS node_id, CASE
			WHEN NOT EXISTS (SELECT FROM lifecycle.node_gate g WHERE g.node_id = v.node_id AND g.admitted AND g.session_open
				AND `+gate.HoldsSigningKeySQL+`) THEN 0
			WHEN EXISTS (SELECT FROM lifecycle.task t, now
				WHERE t.node_id = v.node_id AND t.open AND t.expires_at > now.at AND `+dispatchable("t")+`
					AND (t.state = 'queued' AND t.not_before <= now.at
						OR t.state = 'dispatched' AND t.offered_at < now.at - interval '`+offerAgainAfter+`')) THEN 2
			WHEN EXISTS (SELECT FROM lifecycle.task t, now
				WHERE t.node_id = v.node_id AND t.open AND t.expires_at > now.at AND `+dispatchable("t")+`
					AND t.state IN ('queued', 'dispatched')) THEN 1
			ELSE 0 END AS work
		FROM node v
		WHERE v.node_id IS NOT NULL ORDER BY v.node_id`)
	clearPayloads = pg.Define(pg.RoleLifecycle, "task.clear_payloads", `
		WITH over AS (
			SELECT t.task_id FROM lifecycle.task t
			WHERE NOT t.open AND t.payload <> '' AND NOT (SELECT mesh.rolled_back())
			ORDER BY t.expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
		)
		UPDATE lifecycle.task t SET payload = '' FROM over WHERE t.task_id = over.task_id`)
	lockInFlight = pg.Define(pg.RoleLifecycle, "task.lock_in_flight", `
		SELECT FROM lifecycle.task t
		WHERE t.task_id IN (`+inFlight("ANY ($1::uuid[])")+`) AND t.node_id = ANY ($1::uuid[])
			AND (t.open AND t.state <> 'queued' OR t.task_id = ANY ($2::uuid[])) ORDER BY t.task_id FOR UPDATE`)
	lockRunsInFlight = pg.Define(pg.RoleLifecycle, "task.lock_runs_in_flight", `
		SELECT FROM lifecycle.saga_run r WHERE r.id IN (
			SELECT t.run_id FROM lifecycle.task t WHERE t.node_id = ANY ($1::uuid[]) AND t.open AND t.state <> 'queued'
				AND (t.cancel_requested_at IS NOT NULL OR t.node_id = ANY ($2::uuid[]))
			UNION
			SELECT w.id FROM lifecycle.saga_run w WHERE w.workspace_id = ANY ($3::uuid[])
				AND w.state IN ('pending', 'running', 'waiting', 'compensating'))
		AND r.state IN ('pending', 'running', 'waiting', 'compensating') ORDER BY r.id FOR NO KEY UPDATE`)
	tasksInFlight = pg.Define(pg.RoleLifecycle, "task.in_flight", `
		SELECT `+columns+` FROM lifecycle.task t
		WHERE t.task_id IN (`+inFlight("$1")+`) AND t.node_id = $1
			AND (t.open AND t.state <> 'queued' OR t.task_id = ANY ($2::uuid[]))
		ORDER BY t.task_id FOR UPDATE`)
	holdBack = pg.Define(pg.RoleLifecycle, "task.hold_back", `
		UPDATE lifecycle.task t SET
			offered_at = CASE WHEN t.state = 'queued' THEN t.offered_at ELSE mesh.clock() END,
			not_before = CASE WHEN t.state <> 'queued' THEN t.not_before ELSE
				greatest(t.not_before, least(mesh.clock() + interval '`+offerAgainAfter+`', t.expires_at - interval '1 second')) END
		WHERE t.task_id = $1`)
	moveTask = pg.Define(pg.RoleLifecycle, "task.move", `
		UPDATE lifecycle.task t SET state = $2::text, session_epoch = $3, session_id = nullif($4, '')::uuid,
			state_at = CASE WHEN t.state = $2::text THEN t.state_at ELSE mesh.clock() END,
			offered_at = CASE WHEN $2::text = 'dispatched' THEN mesh.clock() - interval '1 hour' ELSE t.offered_at END,
			payload = `+payloadAt("$2::text")+`, version = t.version + 1
		WHERE t.task_id = $1 RETURNING `+columns)
	relaxCommit = pg.Define(pg.RoleLifecycle, "task.relax_commit", `
		SELECT set_config('synchronous_commit', 'off', true)`)
	applyReports = pg.Define(pg.RoleLifecycle, "task.apply_reports", `
		WITH said AS (
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bytea[])
				AS u (task_id, node_id, attempt, state, note, reason, error, output)
		), held AS (
			SELECT t.task_id, t.state AS was, t.state_at AS was_at,
				CASE WHEN t.state = 'dispatched' AND t.offered_at = t.state_at THEN t.state_at END AS leased_at, u.*
			FROM said u JOIN lifecycle.node_gate g ON g.node_id = u.node_id AND `+gate.AdmittedSQL+`
				JOIN lifecycle.task t ON t.task_id = u.task_id AND t.node_id = u.node_id AND t.attempt = u.attempt
			WHERE t.state IN ('dispatched', 'delivered', 'running')
			ORDER BY t.task_id FOR UPDATE OF t
		)
		UPDATE lifecycle.task t SET
			state = CASE WHEN h.state = '' THEN t.state ELSE h.state END,
			state_at = CASE WHEN h.state = '' THEN t.state_at ELSE mesh.clock() END,
			note = CASE WHEN h.note = '' THEN t.note ELSE h.note END,
			reason = h.reason, error = h.error, output = h.output, version = t.version + 1, `+markReported+`,
			payload = `+payloadAt("h.state")+`
		FROM held h(task_id, was, was_at, leased_at, u_task_id, node_id, attempt, state, note, reason, error, output)
		WHERE t.task_id = h.task_id AND (h.state = '' OR
			array_position(ARRAY['dispatched', 'delivered', 'running'], h.was) <
			coalesce(array_position(ARRAY['dispatched', 'delivered', 'running'], h.state), 9))
		RETURNING h.was, h.was_at, h.leased_at, `+columns)
	sealDeploy = pg.Define(pg.RoleLifecycle, "task.seal_deploy", `
		UPDATE lifecycle.task SET payload = $3, secret_keys = $4 WHERE task_id = $1 AND payload = $2`)
	lockTask = pg.Define(pg.RoleLifecycle, "task.lock", `
		SELECT `+columns+` FROM lifecycle.task t WHERE t.task_id = $1 FOR UPDATE`)
	lockOpenOfRun = pg.Define(pg.RoleLifecycle, "task.lock_open_of_run", `
		SELECT `+columns+` FROM lifecycle.task t
		WHERE t.run_id = $1 AND t.idem_key LIKE $1::text || '/%/do/%'
			AND t.state IN ('queued', 'dispatched', 'delivered', 'running')
		  AND t.cancel_requested_at IS NULL
		ORDER BY t.task_id FOR UPDATE`)
	endStale = pg.Define(pg.RoleLifecycle, "task.end_stale", `
		WITH stale AS (
			SELECT t.task_id, CASE WHEN t.state = 'dispatched' AND t.offered_at = t.state_at THEN t.state_at END AS leased_at
			FROM lifecycle.task t LEFT JOIN lifecycle.node_gate g ON g.node_id = t.node_id
			WHERE t.expires_at <= mesh.clock() AND t.open AND `+dispatchable("t")+`
			  -- What a run queued that stands still gets its time back when the run goes on.
			  AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause p WHERE p.run_id = t.run_id AND p.since IS NOT NULL)
			  AND (t.state = 'queued' OR g.node_id IS NULL OR NOT `+gate.ConnectedSQL+`
			       OR t.state = 'dispatched' AND t.expires_at <= mesh.clock() - interval '`+undeliveredFor+`')
			ORDER BY t.task_id LIMIT $1 FOR UPDATE OF t SKIP LOCKED
		)
		UPDATE lifecycle.task t SET state = CASE WHEN t.state = 'queued' THEN 'expired' ELSE 'outcome_unknown' END,
			payload = `+payloadAt("CASE WHEN t.state = 'queued' THEN 'expired' ELSE 'outcome_unknown' END")+`,
			state_at = mesh.clock(), reason = 'task_outside_window', version = t.version + 1
		FROM stale WHERE t.task_id = stale.task_id RETURNING stale.leased_at, `+columns)
	lockOfRuns = pg.Define(pg.RoleLifecycle, "task.lock_of_runs", `
		SELECT FROM lifecycle.task t WHERE t.run_id = ANY ($1::uuid[]) AND t.open AND t.state IN ('queued', 'dispatched')
		ORDER BY t.task_id FOR UPDATE`)
	extendTasks = pg.Define(pg.RoleLifecycle, "task.extend", `
		UPDATE lifecycle.task t SET expires_at = t.expires_at + make_interval(secs => x.stood), version = t.version + 1, `+markReported+`
		FROM unnest($1::uuid[], $2::float8[]) AS x (run_id, stood)
		WHERE t.run_id = x.run_id AND t.open AND t.state IN ('queued', 'dispatched') RETURNING `+columns)
	reportLeased = pg.DefineDynamic(pg.RoleLifecycle, "task.report_leased", func(s unreportedSet) string {
		return `
			WITH unreported AS (
				SELECT t.task_id FROM lifecycle.task t
				WHERE t.open AND t.state = 'dispatched' AND t.offered_at = t.state_at AND ` + string(s) + `
			)
			UPDATE lifecycle.task t SET version = t.version + 1, ` + markReported + `
			FROM unreported u WHERE t.task_id = u.task_id AND t.state = 'dispatched' AND t.offered_at = t.state_at RETURNING ` + columns
	}, unreportedOfNode, unreportedOfAll)
	enqueueTask = pg.Define(pg.RoleLifecycle, "task.enqueue", `
		INSERT INTO lifecycle.task AS t (task_id, type, node_id, workspace_id, tenant_id, run_id, epoch, op_seq, state,
			idem_key, payload, expires_at, start_within,
			correlation_id, created_by, secret_keys)
		VALUES ($1, $2, $3, nullif($4, '')::uuid, nullif($5, '')::uuid, nullif($6, '')::uuid, $7, $8, 'queued', $9, $10,
			mesh.clock() + $11::interval, $11::interval, $12, $13, $14)
		ON CONFLICT (idem_key) DO NOTHING RETURNING `+pg.Columns[queuedAt]("t"))
	enqueueTasks = pg.Define(pg.RoleLifecycle, "task.enqueue_many", `
		WITH gates AS (
			-- Each as it was locked. One that a fence holds, or another writer, is not waited for: its tasks are queued, and leased later.
			SELECT g.* FROM lifecycle.node_gate g WHERE g.node_id = ANY ($15::uuid[]) ORDER BY g.node_id FOR SHARE SKIP LOCKED
		)
		INSERT INTO lifecycle.task AS t (task_id, type, node_id, workspace_id, tenant_id, run_id, epoch, op_seq,
			idem_key, payload, created_at, not_before, state_at, expires_at, start_within,
			correlation_id, created_by, secret_keys,
			state, attempt, session_epoch, session_id, offered_at, key_id)
		SELECT q.task_id, q.type, q.node_id,
			nullif(q.workspace_id, '')::uuid, nullif(q.tenant_id, '')::uuid, nullif(q.run_id, '')::uuid,
			q.epoch, q.op_seq, q.idem_key, q.payload, now.at, now.at, now.at, now.at + q.within, q.within,
			q.correlation_id, q.created_by, q.secret_keys,
			CASE WHEN l.leased THEN 'dispatched' ELSE 'queued' END, CASE WHEN l.leased THEN 1 ELSE 0 END,
			CASE WHEN l.leased THEN q.generation ELSE 0 END, CASE WHEN l.leased THEN q.session_id::uuid END,
			CASE WHEN l.leased THEN now.at END, CASE WHEN l.leased THEN $18::text END
		FROM unnest($1::uuid[], $2::text[], $3::uuid[], $4::text[], $5::text[], $6::text[],
			$7::bigint[], $8::bigint[], $9::text[],
			$10::bytea[], $11::interval[], $12::text[], $13::text[], $14::text[],
			$16::text[], $17::bigint[]) WITH ORDINALITY AS q (task_id, type, node_id,
			workspace_id, tenant_id, run_id, epoch, op_seq, idem_key, payload, within,
			correlation_id, created_by, secret_keys, session_id, generation, place)
		JOIN lifecycle.node_gate n ON n.node_id = q.node_id AND NOT n.retired
		LEFT JOIN gates g ON g.node_id = q.node_id AND q.session_id <> '',
		(SELECT mesh.clock() AS at OFFSET 0) now,
		LATERAL (SELECT coalesce(g.session_open AND `+gate.MayLeaseSQL("q.generation", "$18::text")+`
			AND `+dispatchable("q")+`, false) AS leased OFFSET 0) l
		ORDER BY q.place
		ON CONFLICT (idem_key) DO NOTHING RETURNING `+pg.Columns[queuedNow]("t"))
	tasksByKeys = pg.Define(pg.RoleLifecycle, "task.by_keys", `
		SELECT `+columns+` FROM lifecycle.task t WHERE t.idem_key = ANY ($1::text[])`)
	taskByKey = pg.Define(pg.RoleLifecycle, "task.by_key", `
		SELECT `+columns+` FROM lifecycle.task t WHERE t.idem_key = $1`)
	latestOfRun = pg.Define(pg.RoleLifecycle, "task.latest_of_run", `
		SELECT `+columns+` FROM lifecycle.task t
		WHERE t.run_id = $1 AND starts_with(t.idem_key, $2) ORDER BY t.task_id DESC LIMIT 1`)
	// The bounds enclose every key that begins with the prefix and goes on with digits, in any collation of the database.
	lastNumbered = pg.Define(pg.RoleLifecycle, "task.last_numbered", `
		SELECT `+columns+` FROM lifecycle.task t
		WHERE t.idem_key > $1::text AND t.idem_key < $1::text || '99999999999999999999' AND starts_with(t.idem_key, $1::text)
		ORDER BY t.idem_key DESC LIMIT 1`)
)
