package tokens

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/internal/pg"
)

// readNeeding names the nodes with tokens that need a key. A token that was used gets the same answer again until its
// node is ready on what it got, or that certificate has ended: none lives for longer than two days.
var readNeeding = pg.Define(pg.RoleRecovery, "tokens.read_needing_key", `
	SELECT DISTINCT i.name FROM recovery.recovery_token t JOIN recovery.identity i ON i.node_id = t.node_id
	WHERE t.key_id = $1 AND t.state IN ('issued', 'used') AND (t.state = 'issued'
		OR t.state_at > mesh.clock() - interval '2 days' AND NOT EXISTS (
			SELECT FROM recovery.recovery_token l WHERE l.node_id = t.node_id AND l.counted_since > t.state_at))
	ORDER BY i.name LIMIT 4`)

// countKeys counts the keys of recovery tokens, and those among them that were made by a rotation.
var countKeys = pg.Define(pg.RoleRecovery, "tokens.count_keys", `
	SELECT count(*)::int AS keys, (count(*) FILTER (WHERE k.endorsed_by <> ''))::int AS rotated
	FROM mesh.signing_key k WHERE k.kind = 'recovery_token'`)

// KeyCount is how many keys of recovery tokens the set has, and how many of them were made by a rotation.
type KeyCount struct {
	Keys    int32 `db:"keys"`
	Rotated int32 `db:"rotated"`
}

// CountKeys counts the keys of recovery tokens in the set.
func CountKeys(ctx context.Context, q pg.Querier) (KeyCount, error) {
	out, err := pg.One[KeyCount](ctx, q, countKeys)
	if err != nil {
		return KeyCount{}, fmt.Errorf("count keys of recovery tokens: %w", err)
	}
	return out, nil
}

// NeedKey returns a description of the nodes that may have a token of a key which counts; "" if there are none.
func NeedKey(ctx context.Context, q pg.Querier, keyID string) (string, error) {
	names, err := pg.Values[string](ctx, q, readNeeding, keyID)
	if err != nil {
		return "", fmt.Errorf("read who needs key %s: %w", keyID, err)
	}
	const most = 3
	switch {
	case len(names) == 0:
		return "", nil
	case len(names) > most:
		return "recovery tokens of nodes: " + strings.Join(names[:most], ", ") + " and others", nil
	}
	return "recovery tokens of nodes: " + strings.Join(names, ", "), nil
}
