package identity

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
)

// noKey is the value in join_keys of a node instance that has been given no join state yet.
const noKey = "none"

// issuedWith records that a key has signed a join state that the node may have from now on.
func (r *Record) issuedWith(keyID string) {
	r.JoinKeys = append(slices.DeleteFunc(slices.Clone(r.JoinKeys),
		func(k string) bool { return k == keyID || k == noKey }), keyID)
}

// NeedKey returns a description of the nodes that may have a join state of a key; "" if there are none.
func NeedKey(ctx context.Context, q pg.Querier, key keyset.Key) (string, error) {
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
