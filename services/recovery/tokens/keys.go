package tokens

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/internal/pg"
)

// A token that was used gets the same answer again until its node is ready on what it got, or that certificate has
// ended: none lives for longer than two days.
var readNeeding = pg.Define(pg.RoleRecovery, "tokens.read_needing_key", `
	SELECT DISTINCT i.name FROM recovery.recovery_token t JOIN recovery.identity i ON i.node_id = t.node_id
	WHERE t.key_id = $1 AND t.state IN ('issued', 'used') AND (t.state = 'issued'
		OR t.state_at > mesh.clock() - interval '2 days' AND NOT EXISTS (
			SELECT FROM recovery.recovery_token l WHERE l.node_id = t.node_id AND l.counted_since > t.state_at))
	LIMIT 4`)

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
