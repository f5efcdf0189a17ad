package watchdog

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/runbook"
)

// manualRecovery is a run by which a person recovered a workspace, and the failed run before it.
type manualRecovery struct {
	WorkspaceID string    `db:"workspace_id" expr:"w.workspace_id::text"`
	TenantID    string    `db:"tenant_id" expr:"w.tenant_id::text"`
	Tenant      string    `db:"tenant" expr:"w.tenant"`
	Name        string    `db:"name" expr:"w.name"`
	RunID       string    `db:"run_id" expr:"r.run_id"`
	Kind        string    `db:"kind" expr:"r.kind"`
	Began       time.Time `db:"began" expr:"r.created_at"`
	Ended       time.Time `db:"ended" expr:"r.finished_at"`
	Step        string    `db:"step" expr:"p.step"`
	ErrorCode   string    `db:"error_code" expr:"p.error_code"`
	Error       string    `db:"error" expr:"p.error"`
	FailedAt    time.Time `db:"failed_at" expr:"COALESCE(p.finished_at, p.created_at)"`
	FailedRunID string    `db:"failed_run_id" expr:"p.run_id"`
}

var findManual = pg.Define(pg.RoleRecovery, "watchdog.find_manual_recoveries", `
	SELECT `+pg.Columns[manualRecovery]("")+`
	FROM recovery.watch_run r JOIN recovery.watch_workspace w USING (workspace_id)
	JOIN LATERAL (SELECT b.* FROM recovery.watch_run b
		WHERE b.workspace_id = r.workspace_id AND b.created_at < r.created_at
		ORDER BY b.created_at DESC LIMIT 1) p ON p.state = 'failed'
	WHERE r.state = 'succeeded' AND r.kind IN ('retry', 'recreate')
		AND r.finished_at > mesh.clock() - make_interval(secs => $1)
		AND NOT EXISTS (SELECT FROM unnest($2::text[]) AS p (prefix) WHERE starts_with(r.requester, p.prefix))
		AND NOT EXISTS (SELECT FROM recovery.recovery_record c WHERE c.operation_id = r.run_id)
		AND NOT EXISTS (SELECT FROM recovery.recovery_record c WHERE c.workspace_id = r.workspace_id AND c.ended_at IS NULL)`)

// manualFor is how far back recoveries by people are searched for.
const manualFor = time.Hour

// manual adds a record for each recovery that a person made without the watchdog: a retry or a recreation that
// succeeded after an operation that had failed or hung, and that no record has yet.
func (j *evaluation) manual(ctx context.Context) error {
	list, err := pg.All[manualRecovery](ctx, j.tx, findManual, manualFor.Seconds(), requesterPrefixes)
	if err != nil {
		return fmt.Errorf("look for recoveries by people: %w", err)
	}
	found := make([]*record, 0, len(list))
	for _, m := range list {
		r := &record{
			ID: ids.New(), CorrelationID: ids.New(), Trigger: triggerManual, Outcome: outcomeRecovered, ByPerson: true,
			Impact:      "the workspace was not to be used until it was brought back by hand",
			WorkspaceID: m.WorkspaceID, TenantID: m.TenantID, Workspace: m.Tenant + "/" + m.Name, OperationID: m.RunID,
			WhatWorked: m.Kind, StartedAt: &m.Began, EndedAt: &m.Ended, Step: m.Step, ErrorCode: m.ErrorCode, Cause: m.Error,
			DetectedAt: m.FailedAt,
			RunID:      m.FailedRunID,
		}
		if known, ok := runbook.Of(r.Step); ok && m.Error == "" {
			r.Cause = known.Cause
		}
		if err := j.fleet.Writes(); err != nil {
			return err
		}
		found = append(found, r)
	}
	inserted, err := insertRecords(ctx, j.tx, found)
	if err != nil {
		return err
	}
	for _, r := range inserted {
		j.counts = append(j.counts, j.w.metrics.moved(&record{}, r)...)
	}
	return nil
}
