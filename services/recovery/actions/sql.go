package actions

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

var (
	readClock = pg.Define(pg.RoleRecovery, "actions.read_clock", `SELECT mesh.clock()`)

	lockOpen = pg.Define(pg.RoleRecovery, "actions.lock_open", `
		SELECT `+pg.Columns[row]("a")+` FROM recovery.recovery_action a
		WHERE a.node_id = ANY ($1::uuid[]) AND a.state = 'open' ORDER BY a.node_id, a.kind FOR UPDATE`)

	lockFailed = pg.Define(pg.RoleRecovery, "actions.lock_failed", `
		SELECT `+pg.Columns[row]("a")+` FROM recovery.recovery_action a
		WHERE a.node_id = $1 AND a.kind = $2 AND a.state = 'failed' AND a.correlation_id = $3
		ORDER BY a.action_id DESC LIMIT 1 FOR UPDATE`)

	// insertActions leaves out those of which another one is open.
	insertActions = pg.Define(pg.RoleRecovery, "actions.begin", `
		INSERT INTO recovery.recovery_action (action_id, node_id, kind, state, reason, requester, correlation_id,
			agent_correlation_id, first_rejected_at, begun_at, effect_at, session_at, healthy_at, ended_at, fails_at,
			attempts, outcome, version)
		SELECT n.*`+fromColumns+`
		ON CONFLICT (node_id, kind) WHERE state = 'open' DO NOTHING`)

	updateActions = pg.Define(pg.RoleRecovery, "actions.change", `
		UPDATE recovery.recovery_action a SET state = n.state, reason = n.reason,
			correlation_id = n.correlation_id, agent_correlation_id = n.agent_correlation_id,
			first_rejected_at = n.first_rejected_at, effect_at = n.effect_at,
			session_at = n.session_at, healthy_at = n.healthy_at, ended_at = n.ended_at, fails_at = n.fails_at,
			attempts = n.attempts, outcome = n.outcome, version = n.version`+fromColumns+`
		WHERE a.action_id = n.action_id AND a.version = n.version - 1`)

	// noteSessions names the first session on the certificates that actions have brought. It locks in the order of
	// lockOpen: the judge locks the actions of many nodes at once too.
	noteSessions = pg.Define(pg.RoleRecovery, "actions.note_sessions", `
		WITH unused AS MATERIALIZED (
			SELECT o.action_id FROM recovery.recovery_action o
			WHERE o.node_id = ANY ($1::uuid[]) AND o.state = 'open' AND o.kind = ANY ($2) AND o.effect_at IS NOT NULL
				AND o.session_at IS NULL
			ORDER BY o.node_id, o.kind FOR UPDATE)
		UPDATE recovery.recovery_action a SET session_at = mesh.clock() FROM unused u WHERE a.action_id = u.action_id
		RETURNING a.node_id::text AS node_id, a.correlation_id`)

	// ofSessions reads one a node: the newest.
	ofSessions = pg.Define(pg.RoleRecovery, "actions.read_of_sessions", `
		SELECT DISTINCT ON (a.node_id) a.node_id::text AS node_id, a.correlation_id FROM recovery.recovery_action a
		WHERE a.node_id = ANY ($1::uuid[]) AND a.state = 'open' AND a.kind = ANY ($2) AND a.session_at IS NOT NULL
		ORDER BY a.node_id, a.begun_at DESC`)

	rejections = pg.Define(pg.RoleRecovery, "actions.read_rejections", `
		SELECT DISTINCT ON (e.node_id) e.node_id::text AS node_id, e.reason, e.observed_at, e.correlation_id
		FROM recovery.evidence e
		WHERE e.node_id = ANY ($1::uuid[]) AND e.source IN ('ingress', 'attempts') AND e.reason <> 'unspecified'
			AND e.correlation_id <> ''
		ORDER BY e.node_id, e.observed_at`)

	failDue = pg.Define(pg.RoleRecovery, "actions.take_due", `
		SELECT `+pg.Columns[row]("a")+` FROM recovery.recovery_action a
		WHERE a.state = 'open' AND a.fails_at <= mesh.clock() AND a.kind = ANY ($1) AND NOT mesh.rolled_back()
		ORDER BY a.fails_at, a.action_id LIMIT $2 FOR UPDATE SKIP LOCKED`)
)

// fromColumns are the arguments of columnsOf as rows.
const fromColumns = `
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
			$9::timestamptz[], $10::timestamptz[], $11::timestamptz[], $12::timestamptz[], $13::timestamptz[],
			$14::timestamptz[], $15::timestamptz[], $16::integer[], $17::text[], $18::bigint[])
			AS n (action_id, node_id, kind, state, reason, requester, correlation_id, agent_correlation_id,
				first_rejected_at, begun_at, effect_at, session_at, healthy_at, ended_at, fails_at, attempts, outcome,
				version)`

// columnsOf returns actions as arguments of the statements that write them.
func columnsOf(list []*Action) []any {
	text := func(of func(*Action) string) []string { return column(list, of) }
	at := func(of func(*Action) *time.Time) []*time.Time { return column(list, of) }
	return []any{
		text(func(a *Action) string { return a.ID }),
		text(func(a *Action) string { return a.NodeID }),
		text(func(a *Action) string { return a.row.Kind }),
		text(func(a *Action) string { return a.State }),
		text(func(a *Action) string { return a.row.Reason }),
		text(func(a *Action) string { return a.Requester }),
		text(func(a *Action) string { return a.CorrelationID }),
		text(func(a *Action) string { return a.AgentCorrelationID }),
		at(func(a *Action) *time.Time { return a.FirstRejectedAt }),
		at(func(a *Action) *time.Time { return &a.BegunAt }),
		at(func(a *Action) *time.Time { return a.EffectAt }),
		at(func(a *Action) *time.Time { return a.SessionAt }),
		at(func(a *Action) *time.Time { return a.HealthyAt }),
		at(func(a *Action) *time.Time { return a.EndedAt }),
		at(func(a *Action) *time.Time { return &a.FailsAt }),
		column(list, func(a *Action) int32 { return a.Attempts }),
		text(func(a *Action) string { return a.Outcome }),
		column(list, func(a *Action) int64 { return a.Version }),
	}
}

func column[T any](list []*Action, of func(*Action) T) []T {
	out := make([]T, len(list))
	for i, a := range list {
		out[i] = of(a)
	}
	return out
}
