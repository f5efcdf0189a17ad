package dispatch

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// queuedNow is queuedAt of one of several tasks.
type queuedNow struct {
	TaskID string `db:"task_id" expr:"@.task_id::text"`
	task.QueuedAt
	Leased bool `db:"leased" expr:"@.state = 'dispatched'"` // to the session that was named for it
}

var (
	enqueueTasks = pg.Define(pg.RoleLifecycle, "dispatch.enqueue_many", `
		WITH gates AS (
			-- Each as it was locked. One that a fence holds, or another writer, is not waited for: its tasks are queued, and
			-- leased later.
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
			AND `+dispatchable("q")+` AND (NOT `+gate.DiagnosisOnlySQL+`
				OR `+task.StartsNothingSQL("q")+`), false) AS leased OFFSET 0) l
		ORDER BY q.place
		ON CONFLICT (idem_key) DO NOTHING RETURNING `+pg.Columns[queuedNow]("t"))
	tasksByKeys = pg.Define(pg.RoleLifecycle, "dispatch.by_keys", `
		SELECT `+task.Columns+` FROM lifecycle.task t WHERE t.idem_key = ANY ($1::text[])`)
)
