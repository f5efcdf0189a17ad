// Package joinkeys decides which nodes may have a join state that a key has signed, and so when the key may be retired.
//
// A node's row has the keys of the join states that it may have. Rows from before keys were recorded, and what a
// restored database has lost, count as having the keys of their time.
package joinkeys

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
)

// None is the value in join_keys of a node instance that has been given no join state yet.
const None = "none"

// With returns the keys of a node that may have, from now on, a join state which a key has signed, the newest last.
func With(keys []string, keyID string) []string {
	return append(slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return k == keyID || k == None }), keyID)
}

// Outstanding returns a description of the nodes that may have a join state of a key; "" if there are none.
func Outstanding(ctx context.Context, q pg.Querier, key keyset.Key) (string, error) {
	names, err := pg.Values[string](ctx, q, readNeeding, key.KeyID, key.First(), key.MadeAt, key.Returned)
	if err != nil {
		return "", fmt.Errorf("read who needs key %s: %w", key.KeyID, err)
	}
	const shown = 3
	switch {
	case len(names) == 0:
		return "", nil
	case len(names) > shown:
		return "join states of nodes: " + strings.Join(names[:shown], ", ") + " and others", nil
	default:
		return "join states of nodes: " + strings.Join(names, ", "), nil
	}
}

// readNeeding finds nodes that may hold a join state of a key, at most four. $2 is whether the key existed before keys
// were recorded, $3 when it was made, and $4 whether it came back from its file: a node that has confirmed no
// generation since the database was restored may have a join state of each key from before that, which the database has
// lost. Nodes are read by the few distinct sets of keys; all nodes are read only if the key may be from before a
// restore.
var readNeeding = pg.Define(pg.RoleRecovery, "identity.read_nodes_that_need_key", `
	WITH RECURSIVE sets AS (
		(SELECT i.join_keys FROM recovery.identity i WHERE i.state <> 'retired' ORDER BY i.join_keys LIMIT 1)
		UNION ALL
		SELECT (SELECT i.join_keys FROM recovery.identity i WHERE i.state <> 'retired' AND i.join_keys > s.join_keys
			ORDER BY i.join_keys LIMIT 1)
		FROM sets s WHERE s.join_keys IS NOT NULL
	)
	SELECT x.name FROM (
		(SELECT i.name FROM sets s, LATERAL (
			SELECT n.name FROM recovery.identity n
				WHERE n.state <> 'retired' AND n.join_keys >= s.join_keys AND n.join_keys <= s.join_keys
			ORDER BY n.join_keys LIMIT 4) i
			WHERE $1 = ANY (s.join_keys) LIMIT 4)
		UNION
		(SELECT i.name FROM recovery.identity i WHERE $2 AND i.state <> 'retired' AND i.join_keys = '{}' AND i.issued > 0
			ORDER BY i.join_keys LIMIT 4)
		UNION
		(SELECT i.name FROM mesh.era e JOIN recovery.identity i ON i.confirmed < e.era << 40
			WHERE e.era > 0 AND ($3::timestamptz < e.raised_at OR $4) AND i.state <> 'retired' AND i.issued > 0 LIMIT 4)
	) x ORDER BY x.name LIMIT 4`)
