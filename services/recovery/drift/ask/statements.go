package ask

import (
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

var (
	takeLock = pg.Define(pg.RoleRecovery, "ask.take_lock", `SELECT pg_advisory_xact_lock($1)`)

	// pending reports whether there is any request, which is read without a lock.
	pending = pg.Define(pg.RoleRecovery, "ask.pending", `SELECT EXISTS (SELECT FROM recovery.record_request)`)

	// giveUp takes away requests that have lasted too long, and those of nodes that are not active any more. One that is
	// locked is left to the next round.
	giveUp = pg.Define(pg.RoleRecovery, "ask.give_up", `
		WITH over AS (
			SELECT r.node_id FROM recovery.record_request r JOIN recovery.judgement j USING (node_id)
			WHERE r.until <= mesh.clock() OR r.task_at <= mesh.clock() - $1::interval OR j.identity_state <> $2
			ORDER BY r.node_id FOR UPDATE OF r SKIP LOCKED
		)
		DELETE FROM recovery.record_request r USING over o WHERE r.node_id = o.node_id`)

	// take takes what is under way and due, and as many of those that wait as there are places, the oldest first, of
	// nodes that are connected and whose gate is open, as far as is known. A row that is locked is left to the next round.
	take = pg.Define(pg.RoleRecovery, "ask.take", `
		WITH waiting AS (
			SELECT r.node_id FROM recovery.record_request r JOIN recovery.judgement j USING (node_id)
			WHERE r.asked_at IS NULL AND r.due_at <= mesh.clock() AND j.identity_state = $3 AND j.replica_id IS NOT NULL
				AND NOT EXISTS (SELECT FROM recovery.evidence e WHERE e.node_id = r.node_id AND e.source = 'gate'
					AND e.part = 'tasks' AND e.reason <> 'unspecified')
			ORDER BY r.until, r.node_id LIMIT GREATEST(0, $1 -
				(SELECT count(*) FROM recovery.record_request r WHERE r.asked_at IS NOT NULL))
		), taken AS (
			SELECT r.node_id FROM recovery.record_request r
			WHERE r.node_id IN (SELECT w.node_id FROM waiting w) OR r.asked_at IS NOT NULL AND r.due_at <= mesh.clock()
			ORDER BY r.node_id FOR UPDATE SKIP LOCKED
		)
		UPDATE recovery.record_request r SET due_at = mesh.clock() + $2::interval,
			asked_at = COALESCE(r.asked_at, mesh.clock())
		FROM taken t WHERE r.node_id = t.node_id
		RETURNING r.node_id::text AS node_id, r.began, r.correlation_id`)

	// open has lifecycle asked again for a task that has not ended.
	open = pg.Define(pg.RoleRecovery, "ask.open", `
		UPDATE recovery.record_request r SET due_at = mesh.clock() + $3::interval,
			task_at = COALESCE(r.task_at, mesh.clock())
		WHERE r.node_id = $1 AND r.began = $2`)

	// refused has lifecycle asked again at a later time, and frees the place until then.
	refused = pg.Define(pg.RoleRecovery, "ask.refused", `
		UPDATE recovery.record_request r SET due_at = mesh.clock() + $3::interval, asked_at = NULL
		WHERE r.node_id = $1 AND r.began = $2`)

	// unanswered has lifecycle asked again at a later time, and frees the places of those of which no task is known.
	unanswered = pg.Define(pg.RoleRecovery, "ask.unanswered", `
		WITH asked AS (
			SELECT r.node_id FROM recovery.record_request r
			JOIN unnest($1::uuid[], $2::bigint[]) AS n (node_id, began) ON r.node_id = n.node_id AND r.began = n.began
			ORDER BY r.node_id FOR UPDATE OF r
		)
		UPDATE recovery.record_request r SET due_at = mesh.clock() + $3::interval,
			asked_at = CASE WHEN r.task_at IS NOT NULL THEN r.asked_at END
		FROM asked a WHERE r.node_id = a.node_id`)

	end = pg.Define(pg.RoleRecovery, "ask.end", `
		DELETE FROM recovery.record_request r WHERE r.node_id = $1 AND r.began = $2`)
)

// requestRow is a request that was taken.
type requestRow struct {
	NodeID        string `db:"node_id"`
	Began         int64  `db:"began"`
	CorrelationID string `db:"correlation_id"`
}

// key is the same for one verdict, whichever replica asks and however often.
func (r requestRow) key() string { return fmt.Sprintf("verdict/%d", r.Began) }
