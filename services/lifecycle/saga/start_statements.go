package saga

import (
	"strconv"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// Statements that start runs.
var (
	// startRun inserts a run and gives it its workspace, according to the workspace's row once it is locked. It returns no
	// row if another run is live, or if the workspace does not allow the run: then the inserted run must be rolled back.
	startRun = pg.Define(pg.RoleLifecycle, "saga.start_run", `
		WITH r AS (
			INSERT INTO lifecycle.saga_run AS r (id, workspace_id, tenant_id, kind, definition, def_version, round,
				parent_run_id,
				correlation_id, requester, step_names, input, epoch, state, deadline_at, why_waiting, op_seq, op_last,
				owner, fence, lease_until, next_at, heartbeat_at, open_attempt, open_since)
			SELECT $1, w.id, w.tenant_id, $3, $4, $5, $6, NULLIF($7, '')::uuid, $8, $9, $10, $11,
				CASE WHEN $12 THEN mesh.next(w.epoch) ELSE w.epoch END, CASE WHEN $20 = '' THEN 'pending' ELSE 'running' END,
				mesh.clock() + make_interval(secs => $13), $21,
				mesh.next(w.op_seq) - ($20 = '')::int, mesh.next(w.op_seq) + `+strconv.Itoa(runs.RangeSize-1)+`,
				NULLIF($20, ''), CASE WHEN $20 = '' THEN 0 ELSE mesh.next(0) END,
				CASE WHEN $20 <> '' THEN mesh.clock() + make_interval(secs => $22) END, mesh.clock() + make_interval(secs => $22),
				CASE WHEN $20 <> '' THEN mesh.clock() END, ($20 <> '')::int, CASE WHEN $20 <> '' THEN mesh.clock() END
			FROM lifecycle.workspace w WHERE w.id = $2
			ON CONFLICT (workspace_id) WHERE state IN ('pending', 'running', 'waiting', 'compensating', 'stuck') DO NOTHING
			RETURNING r.id, r.workspace_id, r.epoch, r.op_seq, r.op_last, r.created_at, r.next_at, r.deadline_at, r.fence,
				r.lease_until, r.heartbeat_at, r.open_since, r.tried_since),
		w AS (
			UPDATE lifecycle.workspace w SET run_id = r.id, epoch = r.epoch, state = $14, state_at = mesh.clock(),
				last_error_code = '', last_error = '', reset_done = false, version = w.version + 1,
				op_seq = mesh.next(w.op_seq) +
					`+strconv.Itoa(runs.RangeSize-1)+`, desired_state = COALESCE(NULLIF($15, ''), w.desired_state),
				retry_used = `+healthyReset+` + $16,
				retry_window_start = CASE WHEN $16 = 1 AND `+healthyReset+` = 0 THEN mesh.clock() ELSE w.retry_window_start END
			FROM r WHERE w.id = r.workspace_id AND (cardinality($17::text[]) = 0 OR w.state = ANY ($17))
				AND r.epoch = CASE WHEN $12 THEN mesh.next(w.epoch) ELSE w.epoch END
				AND ($16 = 0 OR (w.reset_done AND w.retry_used = $18)) AND ($19 = 0::bigint OR w.epoch = $19)
			RETURNING w.*)
		SELECT `+workspace.Columns+`, r.op_seq AS run_op_seq, r.op_last AS run_op_last, r.created_at AS run_created_at,
			r.next_at AS run_next_at, r.deadline_at AS run_deadline_at, r.fence AS run_fence, r.lease_until AS run_lease_until,
			r.heartbeat_at AS run_heartbeat_at, r.open_since AS run_open_since, r.tried_since AS run_tried_since,
			(SELECT mesh.rolled_back()) AS paused
		FROM w JOIN r ON r.workspace_id = w.id`)
	// giveRange gives a run that was just inserted another range of numbers, if numbers of its workspace were drawn
	// meanwhile.
	giveRange = pg.Define(pg.RoleLifecycle, "saga.give_range", `
		UPDATE lifecycle.saga_run r SET op_seq = $2, op_last = $3 WHERE r.id = $1`)
)
