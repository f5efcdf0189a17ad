package watchdog

import "github.com/gpuaas/mesh/internal/pg"

// The statements that keep the watchdog's tables.
var (
	noteWorkspace = pg.Define(pg.RoleRecovery, "watchdog.note_workspace", `
		INSERT INTO recovery.watch_workspace AS t (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch,
			run_id, node_id, placement, register_failures, register_failing_since, last_error_code, last_error)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $9, $10, NULLIF($11, '')::uuid, $12, $13, CASE WHEN $13::int > 0
			THEN $8::timestamptz END, $14, $15)
		ON CONFLICT (workspace_id) DO UPDATE
			SET version = EXCLUDED.version, tenant = EXCLUDED.tenant, name = EXCLUDED.name, state = EXCLUDED.state,
			state_at = EXCLUDED.state_at, epoch = EXCLUDED.epoch, run_id = EXCLUDED.run_id, node_id = EXCLUDED.node_id,
				placement = EXCLUDED.placement,
			register_failures = EXCLUDED.register_failures, last_error_code = EXCLUDED.last_error_code,
				last_error = EXCLUDED.last_error,
			register_failing_since = CASE WHEN t.epoch = EXCLUDED.epoch AND t.register_failures > 0
				AND EXCLUDED.register_failures > 0
				THEN t.register_failing_since ELSE EXCLUDED.register_failing_since END
		WHERE t.version < EXCLUDED.version`)

	noteSighting = pg.Define(pg.RoleRecovery, "watchdog.note_sighting", `
		INSERT INTO recovery.class_sighting (step, error_code, run_id, workspace_id, tenant_id, error_layer, seen_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING`)

	noteProgress = pg.Define(pg.RoleRecovery, "watchdog.note_progress", `
		UPDATE recovery.watch_run SET stalled = false
		WHERE run_id = $1 AND stalled AND attempt = $2 AND step = $3 AND attempt_ver < $4 AND stuck_reason LIKE $5 || '%'`)

	noteInstance = pg.Define(pg.RoleRecovery, "watchdog.note_instance", `
		INSERT INTO recovery.watch_instance AS t (workspace_id, epoch, version, instance_id, state, placement, node_id,
			started_at)
		VALUES ($1, $2, $3, $4, $5, $6, NULLIF($7, '')::uuid, $8)
		ON CONFLICT (workspace_id, epoch) DO UPDATE
			SET version = EXCLUDED.version, instance_id = EXCLUDED.instance_id, state = EXCLUDED.state,
			placement = EXCLUDED.placement, node_id = EXCLUDED.node_id, started_at = EXCLUDED.started_at
		WHERE t.instance_id <> EXCLUDED.instance_id OR t.version < EXCLUDED.version`)

	// noteSessions and forgetSessions are for events of different nodes.
	noteSessions = pg.Define(pg.RoleRecovery, "watchdog.note_sessions", `
		INSERT INTO recovery.watch_session AS t (session_id, version, node_id, replica_id, generation, serving, since,
			close_reason)
		SELECT n.session_id, n.version, n.node_id, NULLIF(n.replica_id, '')::uuid, n.generation, n.serving, n.since,
			n.close_reason
		FROM unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::bigint[], $6::boolean[], $7::timestamptz[],
			$8::text[]) AS n (session_id, version, node_id, replica_id, generation, serving, since, close_reason)
		ON CONFLICT (session_id) DO UPDATE
			SET version = EXCLUDED.version, replica_id = EXCLUDED.replica_id, generation = EXCLUDED.generation,
			serving = EXCLUDED.serving, close_reason = EXCLUDED.close_reason,
			since = CASE WHEN t.serving = EXCLUDED.serving THEN t.since ELSE EXCLUDED.since END
		WHERE t.version < EXCLUDED.version`)

	forgetSessions = pg.Define(pg.RoleRecovery, "watchdog.forget_sessions_of_nodes", `
		DELETE FROM recovery.watch_session o USING recovery.watch_session n
		WHERE o.node_id = ANY($1::uuid[]) AND n.node_id = o.node_id AND NOT o.serving
			AND (n.generation, n.session_id) > (o.generation, o.session_id)`)

	noteEmptied = pg.Define(pg.RoleRecovery, "watchdog.note_emptied", `
		INSERT INTO recovery.watch_emptied (finding_id, workspace_id, node_id, since) VALUES ($1, $2, $3, $4)
		ON CONFLICT (finding_id) DO NOTHING`)

	forgetEmptied = pg.Define(pg.RoleRecovery, "watchdog.forget_emptied", `
		DELETE FROM recovery.watch_emptied WHERE finding_id = $1`)

	noteRun = pg.Define(pg.RoleRecovery, "watchdog.note_run", `
		INSERT INTO recovery.watch_run AS t (run_id, version, kind, state, phase, step, stalled, stuck_reason, attempt,
			attempt_ver, requester,
			parent_run, cancel_by, error_code, error, error_layer, finished_at, workspace_id, tenant_id, created_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $19, $20, $21)
		ON CONFLICT (run_id) DO UPDATE SET `+setRun+` WHERE t.version < $2`)

	updateRun = pg.Define(pg.RoleRecovery, "watchdog.update_run",
		`UPDATE recovery.watch_run t SET `+setRun+` WHERE t.run_id = $1 AND t.version < $2`)
)

// setRun is the list of assignments with which noteRun and updateRun write a run. While a run goes back, its failed
// step stays.
const setRun = `version = $2, kind = $3, state = $4, phase = $5,
	step = CASE WHEN $18 AND t.step <> '' THEN t.step ELSE $6 END,
	stalled = $7, stuck_reason = $8, attempt = $9, attempt_ver = $10, requester = $11, parent_run = $12, cancel_by = $13,
	error_code = $14, error = $15, error_layer = $16, finished_at = $17`

// forgottenAtOnce is the most rows that a statement of forget deletes, of the tables that grow with the fleet.
const forgottenAtOnce = 500

// forgottenByRule are the statements of forget whose terms are fixed, in their order.
var forgottenByRule = []*pg.Statement{
	// Triggers mark the instances of earlier epochs. The epoch is compared again, since that of a workspace may have been
	// set back since.
	pg.Define(pg.RoleRecovery, "watchdog.forget_ended_instances", `
		DELETE FROM recovery.watch_instance i WHERE i.state = 'ended' AND i.ctid = ANY (ARRAY(
			SELECT x.ctid FROM recovery.watch_instance x WHERE x.state = 'ended' AND x.superseded AND x.epoch < (
				SELECT w.epoch FROM recovery.watch_workspace w WHERE w.workspace_id = x.workspace_id)
			ORDER BY x.workspace_id LIMIT 500))`),
	pg.Define(pg.RoleRecovery, "watchdog.forget_sightings", `
		DELETE FROM recovery.class_sighting s WHERE s.ctid = ANY (ARRAY(
			SELECT x.ctid FROM recovery.class_sighting x
			WHERE x.seen_at < mesh.clock() - interval '1 day' ORDER BY x.seen_at LIMIT 500))`),
	// A finding resolves within minutes of the change of its workspace; its event may have been set aside.
	pg.Define(pg.RoleRecovery, "watchdog.forget_over_emptied", `
		DELETE FROM recovery.watch_emptied e WHERE NOT EXISTS (SELECT FROM recovery.watch_workspace w
			WHERE w.workspace_id = e.workspace_id AND w.state <> 'decommissioned')`),
	pg.Define(pg.RoleRecovery, "watchdog.forget_budgets", `
		DELETE FROM recovery.churn_bucket WHERE at < mesh.clock() - interval '1 day'`),
}

// forgottenByAge are the statements of forget whose term is $1, Config.ForgetAfter in seconds, in their order.
var forgottenByAge = []*pg.Statement{
	// The workspace is read by a subquery for each run: an anti-join would read all workspaces for the few that failed.
	pg.Define(pg.RoleRecovery, "watchdog.forget_runs", `
		DELETE FROM recovery.watch_run t WHERE t.run_id = ANY (ARRAY(
			SELECT r.run_id FROM recovery.watch_run r
			WHERE r.finished_at < mesh.clock() - least(interval '2 hours', make_interval(secs => $1))
				AND NOT EXISTS (SELECT FROM recovery.recovery_record c
					WHERE c.workspace_id = r.workspace_id AND c.ended_at IS NULL)
				AND coalesce((SELECT w.run_id <> r.run_id OR w.state <> 'failed' FROM recovery.watch_workspace w
					WHERE w.workspace_id = r.workspace_id), true)
			ORDER BY r.finished_at LIMIT 500))`),
	// Sessions that have ended, and those of replicas that are gone, which would count as serving for ever.
	pg.Define(pg.RoleRecovery, "watchdog.forget_sessions", `
		WITH RECURSIVE servers AS (
			(SELECT s.replica_id FROM recovery.watch_session s WHERE s.serving ORDER BY s.replica_id LIMIT 1)
			UNION ALL
			SELECT (SELECT s.replica_id FROM recovery.watch_session s WHERE s.serving AND s.replica_id > v.replica_id
				ORDER BY s.replica_id LIMIT 1)
			FROM servers v WHERE v.replica_id IS NOT NULL
		), over AS (
			SELECT s.session_id FROM recovery.watch_session s
				WHERE NOT s.serving AND s.since < mesh.clock() - make_interval(secs => $1)
			UNION ALL SELECT s.session_id FROM recovery.watch_session s WHERE s.serving AND s.replica_id IS NULL
			UNION ALL SELECT o.session_id FROM servers v, LATERAL (
				SELECT s.session_id FROM recovery.watch_session s WHERE s.serving AND s.replica_id = v.replica_id
					ORDER BY s.replica_id) o
			WHERE v.replica_id IS NOT NULL
				AND NOT EXISTS (SELECT FROM mesh.replica p
					WHERE p.replica_id = v.replica_id AND p.beat_at > mesh.clock() - make_interval(secs => $1))
		)
		DELETE FROM recovery.watch_session t WHERE t.session_id = ANY (ARRAY(
			SELECT s.session_id FROM recovery.watch_session s WHERE s.session_id = ANY (ARRAY(SELECT o.session_id FROM over o))
				AND s.since < mesh.clock() - make_interval(secs => $1)
				AND NOT EXISTS (SELECT FROM recovery.watch_workspace w WHERE w.node_id = s.node_id AND w.state = 'active')
			ORDER BY s.since LIMIT 500))`),
	// With their instances, which nothing else would find once the workspace is gone.
	pg.Define(pg.RoleRecovery, "watchdog.forget_workspaces", `
		WITH over AS (
			SELECT w.workspace_id FROM recovery.watch_workspace w
			WHERE w.state = 'decommissioned' AND w.state_at < mesh.clock() - make_interval(secs => $1)
				AND NOT EXISTS (SELECT FROM recovery.recovery_record c
					WHERE c.workspace_id = w.workspace_id AND c.ended_at IS NULL)
			ORDER BY w.state_at LIMIT 500
		), instances AS (
			DELETE FROM recovery.watch_instance i WHERE i.workspace_id = ANY (ARRAY(SELECT o.workspace_id FROM over o))
		)
		DELETE FROM recovery.watch_workspace w WHERE w.workspace_id = ANY (ARRAY(SELECT o.workspace_id FROM over o))`),
}
