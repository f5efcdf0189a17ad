package detect

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// ReportsConsumer is the name of Follow's cursor.
const ReportsConsumer = "workload-reports"

// ObservedKind is the kind of the events with agents' reports.
const ObservedKind = "workload.observed"

const followBatch = 1000

// Follow reads the event log up to its end and stores the last report of each agent on each workspace.
func (d *Detectors) Follow(ctx context.Context) error {
	for {
		more := false
		err := pg.InTx(ctx, d.pool, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			more, err = d.followOnce(ctx, tx)
			return err
		})
		if err != nil {
			return fmt.Errorf("follow the log: %w", err)
		}
		if !more {
			return nil
		}
	}
}

var makeCursor = pg.Define(pg.RoleLifecycle, "detect.make_cursor",
	`INSERT INTO lifecycle.event_cursor (name) VALUES ($1) ON CONFLICT DO NOTHING`)

var lockCursor = pg.Define(pg.RoleLifecycle, "detect.lock_cursor",
	`SELECT pos FROM lifecycle.event_cursor WHERE name = $1 FOR UPDATE`)

var moveCursor = pg.Define(pg.RoleLifecycle, "detect.move_cursor",
	`UPDATE lifecycle.event_cursor SET pos = $2, updated_at = mesh.clock() WHERE name = $1`)

func (d *Detectors) followOnce(ctx context.Context, tx pgx.Tx) (bool, error) {
	_, err := pg.Exec(ctx, tx, makeCursor, ReportsConsumer)
	if err != nil {
		return false, fmt.Errorf("make cursor: %w", err)
	}
	pos, err := pg.Value[int64](ctx, tx, lockCursor, ReportsConsumer)
	if err != nil {
		return false, fmt.Errorf("read cursor: %w", err)
	}
	records, next, err := events.Read(ctx, tx, pos, []string{ObservedKind}, followBatch)
	if err != nil {
		return false, err
	}
	if next <= pos {
		return false, nil
	}
	if err := writeReports(ctx, tx, lastReports(records)); err != nil {
		return false, err
	}
	if _, err := pg.Exec(ctx, tx, moveCursor, ReportsConsumer, next); err != nil {
		return false, fmt.Errorf("move cursor: %w", err)
	}
	return true, nil
}

// lastReports returns the last of the reports of each agent on each workspace.
func lastReports(records []events.Record) map[place]events.Record {
	seen := map[place]events.Record{}
	for _, r := range records {
		if r.Source == pg.RoleNodeAPI && ids.Valid(r.WorkspaceID) && ids.Valid(r.NodeID) {
			seen[place{r.WorkspaceID, r.NodeID}] = r
		}
	}
	return seen
}

var keepReports = pg.Define(pg.RoleLifecycle, "detect.keep_reports", `
		INSERT INTO lifecycle.observed_workload AS o (workspace_id, node_id, payload, observed_at)
		SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::jsonb[], $4::timestamptz[])
		ON CONFLICT (workspace_id, node_id) DO UPDATE SET payload = EXCLUDED.payload, observed_at = EXCLUDED.observed_at
		WHERE o.observed_at <= EXCLUDED.observed_at`)

// writeReports stores the last report of each agent on each workspace.
func writeReports(ctx context.Context, tx pgx.Tx, seen map[place]events.Record) error {
	if len(seen) == 0 {
		return nil
	}
	var workspaces, nodes, payloads []string
	var at []time.Time
	for p, r := range seen {
		payload, err := r.Payload()
		if err != nil {
			return err
		}
		workspaces, nodes, payloads, at = append(workspaces, p.WorkspaceID), append(nodes, p.NodeID),
			append(payloads, string(payload)), append(at, r.CreatedAt)
	}
	_, err := pg.Exec(ctx, tx, keepReports, workspaces, nodes, payloads, at)
	if err != nil {
		return fmt.Errorf("keep agents' reports: %w", err)
	}
	return nil
}

var forgetReports = pg.Define(pg.RoleLifecycle, "detect.forget_reports",
	`DELETE FROM lifecycle.observed_workload o WHERE `+scan.Page("o.workspace_id")+
		` AND o.observed_at < mesh.clock() - make_interval(secs => $3)
		AND NOT ((o.payload ? 'workloads' OR o.payload ? 'storage')
			AND EXISTS (SELECT FROM lifecycle.node_gate g WHERE g.node_id = o.node_id AND NOT g.retired))`)

// forgetEvery is how often old reports, which are kept for days, are deleted.
const forgetEvery = 10 * time.Minute

// ForgetReportsInTime calls ForgetReports in the first sweep of this process and every ten minutes after it. Only one
// sweep may run at a time.
func (d *Detectors) ForgetReportsInTime(ctx context.Context) error {
	if !d.forgotAt.IsZero() && time.Since(d.forgotAt) < forgetEvery {
		return nil
	}
	if err := d.ForgetReports(ctx); err != nil {
		return err
	}
	d.forgotAt = time.Now()
	return nil
}

// ForgetReports deletes old reports, apart from those of workloads or directories on a node that is not retired:
// nodeapi does not write an unchanged report again, however often the node's session is lost meanwhile.
func (d *Detectors) ForgetReports(ctx context.Context) error {
	err := d.pages.Each(ctx, "workspace", func(ctx context.Context, after, upTo string) error {
		_, err := pg.Exec(ctx, d.db, forgetReports, after, upTo, d.cfg.Keep.Seconds())
		return err
	})
	if err != nil {
		return fmt.Errorf("forget reports: %w", err)
	}
	return nil
}
