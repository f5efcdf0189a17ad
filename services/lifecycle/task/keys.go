package task

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
)

// usingNode is a node with tasks under way that a key has signed.
type usingNode struct {
	Name  string `db:"name"`
	Total int64  `db:"total"`
}

// usingShown is how many nodes are named.
const usingShown = 5

// readUsing finds the nodes with tasks that were offered, have not ended and were signed by the key $1. $2 is true if
// the key is older than the column key_id, so that tasks without one count as signed by it. $3 is when the key was
// made, and $4 is true if it returned from its file. A node that has had no session since the database was restored may
// have attempts from before the restore: the database has lost them and adopts them by their envelopes. Such a node
// needs every key that was made before the restore or returned from its file. $5 is how many nodes are named.
var readUsing = pg.Define(pg.RoleLifecycle, "task.read_nodes_that_need_key", `
	SELECT n.name, count(*) OVER () AS total FROM (
		SELECT DISTINCT coalesce(nullif(g.name, ''), t.node_id::text) AS name
		FROM lifecycle.task t LEFT JOIN lifecycle.node_gate g ON g.node_id = t.node_id
		WHERE t.open AND t.state <> 'queued' AND (t.key_id = $1 OR $2 AND t.key_id IS NULL)
		UNION
		SELECT coalesce(nullif(g.name, ''), g.node_id::text) FROM lifecycle.node_gate g, mesh.era e
		WHERE NOT g.retired AND g.session_epoch > 0 AND e.era > 0 AND g.session_epoch < e.era << 40
			AND ($3::timestamptz < e.raised_at OR $4)
	) n ORDER BY n.name LIMIT $5`)

// NeedKey returns a text that names the nodes with tasks under way that a key has signed; "" means none.
func NeedKey(ctx context.Context, q pg.Querier, key keyset.Key) (string, error) {
	rows, err := pg.All[usingNode](ctx, q, readUsing, key.KeyID, key.First(), key.MadeAt, key.Returned, usingShown)
	if err != nil {
		return "", fmt.Errorf("read who needs key %s: %w", key.KeyID, err)
	}
	if len(rows) == 0 {
		return "", nil
	}
	names := make([]string, len(rows))
	for i, row := range rows {
		names[i] = row.Name
	}
	text := "tasks under way on nodes: " + strings.Join(names, ", ")
	if more := rows[0].Total - int64(len(rows)); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text, nil
}
