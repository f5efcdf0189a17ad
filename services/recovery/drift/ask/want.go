package ask

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// mostWaiting is about how many nodes may wait. Where more have verdicts at once the cause is rather not on their
	// hosts. A transaction counts what was committed before, so transactions at the same time may exceed it together.
	mostWaiting = 256
	// waits is after how long a request is given up.
	waits = time.Hour
)

// Request asks for the record of one node's host.
type Request struct {
	NodeID        string
	Began         int64     // the version of the verdict with which the reason began
	Since         time.Time // of the first evidence of that reason
	CorrelationID string
}

// want leaves a request that is under way as it is: what it brings explains the later verdict too. Of nodes without a
// request, those whose reasons are oldest come first while there is room; a request that waits is replaced without.
var want = pg.Define(pg.RoleRecovery, "ask.want", `
	INSERT INTO recovery.record_request AS r (node_id, began, correlation_id, due_at, until)
	SELECT n.node_id, n.began, n.correlation_id, mesh.clock(), mesh.clock() + $5::interval
	FROM (
		SELECT w.node_id, w.began, w.correlation_id, k.node_id IS NOT NULL AS known,
			row_number() OVER (PARTITION BY k.node_id IS NOT NULL ORDER BY w.since, w.node_id) AS place
		FROM unnest($1::uuid[], $2::bigint[], $3::text[], $4::timestamptz[]) AS w (node_id, began, correlation_id, since)
		LEFT JOIN recovery.record_request k ON k.node_id = w.node_id
	) n
	WHERE n.known OR n.place <= $6 - (SELECT count(*) FROM recovery.record_request)
	ORDER BY n.node_id
	ON CONFLICT (node_id) DO UPDATE SET began = EXCLUDED.began, correlation_id = EXCLUDED.correlation_id,
		due_at = EXCLUDED.due_at, task_at = NULL, until = EXCLUDED.until
		WHERE r.asked_at IS NULL AND r.began < EXCLUDED.began`)

// Want writes requests. The rows of their nodes must be locked.
func Want(ctx context.Context, tx pgx.Tx, list []Request) error {
	if len(list) == 0 {
		return nil
	}
	nodeIDs, correlations := make([]string, len(list)), make([]string, len(list))
	began, since := make([]int64, len(list)), make([]time.Time, len(list))
	for i, r := range list {
		nodeIDs[i], began[i], since[i], correlations[i] = r.NodeID, r.Began, r.Since, r.CorrelationID
	}
	if _, err := pg.Exec(ctx, tx, want, nodeIDs, began, correlations, since, waits, mostWaiting); err != nil {
		return fmt.Errorf("ask for records of hosts: %w", err)
	}
	return nil
}
