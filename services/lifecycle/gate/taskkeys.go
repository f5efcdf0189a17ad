package gate

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// lackingNode is a node whose agent lacks a key of tasks.
type lackingNode struct {
	Name     string `db:"name"`
	Reported bool   `db:"reported"` // its agent reports its keys
	Total    int64  `db:"total"`    // of nodes like this one
}

// lackingShown is how many nodes of each sort are named.
const lackingShown = 5

var (
	// readLacking finds the nodes because of which a key of tasks may not sign yet. A node that is disconnected and has
	// reported its keys before is not among them: it gets the key in its next Welcome, before it may lease tasks.
	readLacking = pg.Define(pg.RoleLifecycle, "gate.read_nodes_without_key", `
		SELECT w.name, w.reported, w.total FROM (
			SELECT n.*, count(*) OVER (PARTITION BY n.reported) AS total, row_number() OVER (PARTITION BY n.reported
				ORDER BY n.name) AS place
			FROM (
				SELECT coalesce(nullif(g.name, ''), g.node_id::text) AS name,
					`+taskKeysSQL+` IS NOT NULL AS reported FROM lifecycle.node_gate g
				WHERE NOT g.retired AND (`+taskKeysSQL+` IS NULL AND NOT $3 AND (g.admitted OR g.session_epoch > 0)
					OR g.admitted AND `+ConnectedSQL+` AND NOT $1 = ANY (`+taskKeysSQL+`))
			) n
		) w WHERE w.place <= $2 ORDER BY w.reported DESC, w.name`)
	setTaskKeys = pg.Define(pg.RoleLifecycle, "gate.set_task_keys", `
		UPDATE lifecycle.node_gate g SET task_keys = string_to_array(n.keys, ','), task_keys_epoch = g.session_epoch
		FROM unnest($1::uuid[], $2::uuid[], $3::text[]) AS n (node_id, session_id, keys)
		WHERE g.node_id = n.node_id AND g.session_id = n.session_id RETURNING g.session_id::text`)
)

// Distributed returns a text that names the nodes whose agents must store a key of tasks before it may sign; "" means
// none. For a key that returned from its file after a restore, agents that report no keys are not among them: the key
// signed before, and the rows of nodes that were removed since the backup never change.
func Distributed(ctx context.Context, q pg.Querier, keyID string, returned bool) (string, error) {
	rows, err := pg.All[lackingNode](ctx, q, readLacking, keyID, lackingShown, returned)
	if err != nil {
		return "", fmt.Errorf("read which nodes lack key %s: %w", keyID, err)
	}
	var lacking, silent []string
	var lackingTotal, silentTotal int64
	for _, row := range rows {
		if row.Reported {
			lacking, lackingTotal = append(lacking, row.Name), row.Total
		} else {
			silent, silentTotal = append(silent, row.Name), row.Total
		}
	}
	var out []string
	if len(lacking) > 0 {
		out = append(out, "agents that have not stored it: "+listOf(lacking, lackingTotal))
	}
	if len(silent) > 0 {
		out = append(out, "agents that do not report their keys, because they are of an earlier build or have not "+
			"connected yet: "+
			listOf(silent, silentTotal)+"; update the agent, start it, or retire the node")
	}
	return strings.Join(out, "; "), nil
}

func listOf(shown []string, total int64) string {
	text := strings.Join(shown, ", ")
	if more := total - int64(len(shown)); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// KeysHeld stores which keys of tasks agents report during their sessions, and returns the sessions whose report it
// stored.
func (s *Server) KeysHeld(ctx context.Context, req *lifecyclev1.KeysHeldRequest) (*lifecyclev1.KeysHeldResponse,
	error,
) {
	nodes, byNode := make([]string, 0, len(req.GetSessions())), map[string]*lifecyclev1.SessionKeys{}
	for _, session := range req.GetSessions() {
		if byNode[session.GetNodeId()] == nil {
			nodes = append(nodes, session.GetNodeId())
		}
		byNode[session.GetNodeId()] = session // only the last of a node is stored; the replica of another repeats its report
	}
	sessions, keys := make([]string, len(nodes)), make([]string, len(nodes))
	for i, node := range nodes {
		sessions[i], keys[i] = byNode[node].GetSessionId(), strings.Join(byNode[node].GetKeyIds(), ",")
	}
	var taken []string
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := lockUpdate(ctx, tx, nodes); err != nil {
			return err
		}
		var err error
		if taken, err = pg.Values[string](ctx, tx, setTaskKeys, nodes, sessions, keys); err != nil {
			return fmt.Errorf("note keys of agents: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &lifecyclev1.KeysHeldResponse{SessionIds: taken}, nil
}
