package events

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

const recordColumns = `pos, id::text, source, kind, aggregate_type, aggregate_id, aggregate_version, payload, created_at,
	COALESCE(correlation_id, ''), COALESCE(tenant_id, ''), COALESCE(workspace_id, ''), COALESCE(workflow_id, ''),
	COALESCE(allocation_id, ''), COALESCE(task_id, ''), COALESCE(node_id, ''), COALESCE(node_instance_id, '')`

func scanRecord(row pgx.CollectableRow) (Record, error) {
	var r Record
	err := row.Scan(&r.Pos, &r.ID, &r.Source, &r.Kind, &r.AggregateType, &r.AggregateID, &r.AggregateVersion, &r.Payload, &r.CreatedAt,
		&r.CorrelationID, &r.TenantID, &r.WorkspaceID, &r.WorkflowID, &r.AllocationID, &r.TaskID, &r.NodeID, &r.NodeInstanceID)
	return r, err
}

// Horizon is the highest position given so far, zero in an empty log.
func Horizon(ctx context.Context, q pg.Querier) (int64, error) {
	var pos int64
	if err := q.QueryRow(ctx, "SELECT COALESCE(max(pos), 0) FROM events.event").Scan(&pos); err != nil {
		return 0, fmt.Errorf("read event horizon: %w", err)
	}
	return pos, nil
}

// Read returns up to limit events after a position, in order, of the given kinds (all if none are given), and the
// position to read on from, which passes over events of other kinds. At the end of the log it equals the horizon.
func Read(ctx context.Context, q pg.Querier, after int64, kinds []string, limit int) ([]Record, int64, error) {
	// The horizon comes first: everything up to it is visible to any later statement.
	horizon, err := Horizon(ctx, q)
	if err != nil || horizon <= after {
		return nil, after, err
	}
	sql, args := "SELECT "+recordColumns+" FROM events.event WHERE pos > $1 AND pos <= $2", []any{after, horizon, limit}
	if len(kinds) > 0 {
		sql, args = sql+" AND kind = ANY($4)", append(args, kinds)
	}
	rows, err := q.Query(ctx, sql+" ORDER BY pos LIMIT $3", args...)
	if err != nil {
		return nil, after, fmt.Errorf("read events: %w", err)
	}
	records, err := pgx.CollectRows(rows, scanRecord)
	if err != nil {
		return nil, after, fmt.Errorf("read events: %w", err)
	}
	if len(records) == limit {
		return records, records[limit-1].Pos, nil
	}
	return records, horizon, nil
}

// At reads the event at a position.
func At(ctx context.Context, q pg.Querier, pos int64) (Record, error) {
	rows, err := q.Query(ctx, "SELECT "+recordColumns+" FROM events.event WHERE pos = $1", pos)
	if err != nil {
		return Record{}, fmt.Errorf("read event at %d: %w", pos, err)
	}
	r, err := pgx.CollectExactlyOneRow(rows, scanRecord)
	if err != nil {
		return Record{}, fmt.Errorf("read event at %d: %w", pos, err)
	}
	return r, nil
}
