package watchdog

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/runbook"
)

// classes makes one incident of what the same step does to many: the same error at ClassTenants tenants, or at two tenants and ClassPair workspaces,
// within ClassWindow. It is closed when it has not been seen for ClassQuiet.
func (j *judging) classes(ctx context.Context) error {
	cfg := j.w.cfg
	rows, err := j.tx.Query(ctx, `
		SELECT c.step, c.error_code, array_agg(DISTINCT c.tenant_id::text), array_agg(DISTINCT c.workspace_id::text), count(*), max(c.seen_at), max(c.error_layer)
		FROM recovery.class_sighting c WHERE c.seen_at > mesh.clock() - make_interval(secs => $1) GROUP BY c.step, c.error_code
		ORDER BY c.step, c.error_code`, cfg.ClassWindow.Seconds())
	if err != nil {
		return fmt.Errorf("look for classes: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*incident, error) {
		i := &incident{Kind: kindClass, Severity: commonv1.Severity_SEVERITY_P1}
		return i, row.Scan(&i.Step, &i.ErrorCode, &i.Tenants, &i.Workspaces, &i.Count, &i.LastSeenAt, &i.layerText)
	})
	if err != nil {
		return fmt.Errorf("look for classes: %w", err)
	}
	for _, i := range found {
		i.Key = i.Step + "/" + i.ErrorCode
		if i.layerText != "" {
			if i.OwnerLayer, err = names.Parse[commonv1.OwnerLayer](i.layerText); err != nil {
				return fmt.Errorf("look for classes: %w", err)
			}
		}
		i.NextAction = "this is one cause, not one of each: do not retry them one by one"
		if row, ok := runbook.Of(i.Step); ok {
			i.NextAction += "; likely: " + row.Cause
		}
		many := len(i.Tenants) >= cfg.ClassTenants || (len(i.Tenants) >= 2 && len(i.Workspaces) >= cfg.ClassPair)
		if many {
			i.Summary = fmt.Sprintf("%q fails with %s at %d tenants, %d workspaces", i.Step, i.ErrorCode, len(i.Tenants), len(i.Workspaces))
			err = j.raise(ctx, i)
		} else {
			seen := i.LastSeenAt
			err = j.seenAgain(ctx, i, seen)
		}
		if err != nil {
			return err
		}
	}
	return j.closeOthers(ctx, kindClass, func(i *incident) bool { return j.now.Sub(i.LastSeenAt) < cfg.ClassQuiet })
}

// seenAgain keeps an open class open: fewer than make a new one are enough for that.
func (j *judging) seenAgain(ctx context.Context, i *incident, seen time.Time) error {
	was, err := openIncident(ctx, j.tx, i.Kind, i.Key)
	if err != nil || was == nil || !seen.After(was.LastSeenAt) {
		return err
	}
	i.Summary = was.Summary
	return j.goOn(ctx, was, i)
}

// machines keeps one incident for each shared machine that cannot be asked. Its workspaces stay where they are.
func (j *judging) machines(ctx context.Context) error {
	lost, unknown := map[string]*incident{}, map[string]bool{}
	for _, s := range j.subjects {
		if !s.static() || s.NodeID == "" || s.State != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
			continue
		}
		switch {
		case s.Reach == reachUnknown:
			unknown[s.NodeID] = true
		case s.Reach == reachLost && (s.Identity == "" || s.Identity == "active"):
			i := lost[s.NodeID]
			if i == nil {
				i = &incident{
					Kind: kindMachine, Key: s.NodeID, Severity: commonv1.Severity_SEVERITY_P1, OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
					NextAction: "restart the machine or its agent; its workspaces come back with it. To move them, recreate each with a fenced proof",
				}
				lost[s.NodeID] = i
			}
			i.about(s.TenantID, s.WorkspaceID, s.NodeID)
		}
	}
	for node, i := range lost {
		i.Summary = fmt.Sprintf("machine %s cannot be reached; its %d workspaces are kept: nothing proves that their work has ended", node, len(i.Workspaces))
		if err := j.raise(ctx, i); err != nil {
			return err
		}
	}
	return j.closeOthers(ctx, kindMachine, func(i *incident) bool { return lost[i.Key] != nil || unknown[i.Key] })
}

// manualFor is how far back recoveries by people are looked for.
const manualFor = time.Hour

// manual keeps the record of what people brought back by themselves: a retry or a recreation that succeeded after an operation that had failed or hung, and
// of which no record knows.
func (j *judging) manual(ctx context.Context) error {
	rows, err := j.tx.Query(ctx, `
		SELECT w.workspace_id::text, w.tenant_id::text, w.tenant, w.name, r.run_id, r.kind, r.created_at, r.finished_at, p.step, p.error_code, p.error,
			COALESCE(p.finished_at, p.created_at), p.run_id
		FROM recovery.watch_run r JOIN recovery.watch_workspace w USING (workspace_id)
		JOIN LATERAL (SELECT b.* FROM recovery.watch_run b WHERE b.workspace_id = r.workspace_id AND b.created_at < r.created_at
			ORDER BY b.created_at DESC LIMIT 1) p ON p.state = 'failed'
		WHERE r.state = 'succeeded' AND r.kind IN ('retry', 'recreate') AND r.finished_at > mesh.clock() - make_interval(secs => $1)
			AND r.requester NOT LIKE $2 || '%'
			AND NOT EXISTS (SELECT FROM recovery.recovery_record c WHERE c.operation_id = r.run_id)
			AND NOT EXISTS (SELECT FROM recovery.recovery_record c WHERE c.workspace_id = r.workspace_id AND c.ended_at IS NULL)`,
		manualFor.Seconds(), requesterName)
	if err != nil {
		return fmt.Errorf("look for recoveries by people: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*record, error) {
		r := &record{
			ID: ids.New(), CorrelationID: ids.New(), Trigger: triggerManual, Outcome: outcomeRecovered, ByPerson: true,
			Impact: "the workspace was not to be used until it was brought back by hand",
		}
		var tenant, name, text string
		var began, ended time.Time
		err := row.Scan(&r.WorkspaceID, &r.TenantID, &tenant, &name, &r.OperationID, &r.WhatWorked, &began, &ended, &r.Step, &r.ErrorCode, &text, &r.DetectedAt,
			&r.RunID)
		r.Workspace, r.StartedAt, r.EndedAt, r.Cause = tenant+"/"+name, &began, &ended, text
		if known, ok := runbook.Of(r.Step); ok && text == "" {
			r.Cause = known.Cause
		}
		return r, err
	})
	if err != nil {
		return fmt.Errorf("look for recoveries by people: %w", err)
	}
	for _, r := range list {
		inserted, err := r.insert(ctx, j.tx)
		if err != nil {
			return err
		}
		if inserted {
			j.counts = append(j.counts, j.w.metrics.moved(&record{}, r)...)
		}
	}
	return nil
}
