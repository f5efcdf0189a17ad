package ask

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// mostWaiting is how many nodes may wait. Where more have verdicts at once the cause is rather not on their hosts.
	mostWaiting = 256
	// waits is how long a request may wait for its node to be connected, or for a place.
	waits = time.Hour
)

// Request asks for the record of one node's host.
type Request struct {
	NodeID        string
	Began         int64 // the version of the verdict with which the reason began
	CorrelationID string
}

// want leaves a request that is under way as it is: what it brings explains the later verdict too.
var want = pg.Define(pg.RoleRecovery, "ask.want", `
	INSERT INTO recovery.record_request AS r (node_id, began, correlation_id, due_at, until)
	SELECT n.node_id, n.began, n.correlation_id, mesh.clock(), mesh.clock() + $4::interval
	FROM unnest($1::uuid[], $2::bigint[], $3::text[]) AS n (node_id, began, correlation_id)
	ORDER BY n.node_id LIMIT GREATEST(0, $5 - (SELECT count(*) FROM recovery.record_request))
	ON CONFLICT (node_id) DO UPDATE SET began = EXCLUDED.began, correlation_id = EXCLUDED.correlation_id,
		due_at = EXCLUDED.due_at, until = EXCLUDED.until
		WHERE r.asked_at IS NULL AND r.began < EXCLUDED.began`)

// Want writes requests. The rows of their nodes must be locked.
func Want(ctx context.Context, tx pgx.Tx, list []Request) error {
	if len(list) == 0 {
		return nil
	}
	nodeIDs, correlations := make([]string, len(list)), make([]string, len(list))
	began := make([]int64, len(list))
	for i, r := range list {
		nodeIDs[i], began[i], correlations[i] = r.NodeID, r.Began, r.CorrelationID
	}
	if _, err := pg.Exec(ctx, tx, want, nodeIDs, began, correlations, waits, mostWaiting); err != nil {
		return fmt.Errorf("ask for records of hosts: %w", err)
	}
	return nil
}
