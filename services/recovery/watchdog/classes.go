package watchdog

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/runbook"
)

// class is a failure of the same step with the same error in many workspaces.
type class struct {
	Step       string    `db:"step"`
	ErrorCode  string    `db:"error_code"`
	Tenants    []string  `db:"tenants" expr:"array_agg(DISTINCT @.tenant_id::text)"`
	Workspaces []string  `db:"workspaces" expr:"array_agg(DISTINCT @.workspace_id::text)"`
	Count      int64     `db:"count" expr:"count(*)"`
	LastSeenAt time.Time `db:"last_seen_at" expr:"max(@.seen_at)"`
	Layer      string    `db:"layer" expr:"max(@.error_layer)"`
}

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

var (
	findClasses = pg.Define(pg.RoleRecovery, "watchdog.find_classes", `
		SELECT `+pg.Columns[class]("c")+`
		FROM recovery.class_sighting c WHERE c.seen_at > mesh.clock() - make_interval(secs => $1) GROUP BY c.step, c.error_code
		ORDER BY c.step, c.error_code`)

	findManual = pg.Define(pg.RoleRecovery, "watchdog.find_manual_recoveries", `
		SELECT `+pg.Columns[manualRecovery]("")+`
		FROM recovery.watch_run r JOIN recovery.watch_workspace w USING (workspace_id)
		JOIN LATERAL (SELECT b.* FROM recovery.watch_run b WHERE b.workspace_id = r.workspace_id AND b.created_at < r.created_at
			ORDER BY b.created_at DESC LIMIT 1) p ON p.state = 'failed'
		WHERE r.state = 'succeeded' AND r.kind IN ('retry', 'recreate') AND r.finished_at > mesh.clock() - make_interval(secs => $1)
			AND NOT starts_with(r.requester, $2)
			AND NOT EXISTS (SELECT FROM recovery.recovery_record c WHERE c.operation_id = r.run_id)
			AND NOT EXISTS (SELECT FROM recovery.recovery_record c WHERE c.workspace_id = r.workspace_id AND c.ended_at IS NULL)`)
)

// classes makes one incident of a failure of the same step in many workspaces: the same error at ClassTenants tenants,
// or at two tenants and ClassPair workspaces, within ClassWindow. The incident is closed when the failure has not
// occurred for ClassQuiet.
func (j *evaluation) classes(ctx context.Context) error {
	cfg := j.w.cfg
	found, err := pg.All[class](ctx, j.tx, findClasses, cfg.ClassWindow.Seconds())
	if err != nil {
		return fmt.Errorf("look for classes: %w", err)
	}
	for _, c := range found {
		i := &incident{
			Kind: kindClass, Key: c.Step + "/" + c.ErrorCode, Severity: commonv1.Severity_SEVERITY_P1, Step: c.Step,
			ErrorCode: c.ErrorCode, Tenants: c.Tenants, Workspaces: c.Workspaces, Count: c.Count, LastSeenAt: c.LastSeenAt,
		}
		if c.Layer != "" {
			if i.OwnerLayer, err = names.Parse[commonv1.OwnerLayer](c.Layer); err != nil {
				aside.Note(ctx, "watchdog.class", i.Key, err)
			}
		}
		i.NextAction = "this is one cause, not one of each: do not retry them one by one"
		if row, ok := runbook.Of(i.Step); ok {
			i.NextAction += "; likely: " + row.Cause
		}
		many := len(i.Tenants) >= cfg.ClassTenants || (len(i.Tenants) >= 2 && len(i.Workspaces) >= cfg.ClassPair)
		if many {
			i.Summary = fmt.Sprintf("%q fails with %s at %d tenants, %d workspaces", i.Step, i.ErrorCode, len(i.Tenants),
				len(i.Workspaces))
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

// seenAgain keeps the open incident of a class open. Fewer workspaces are enough for that than for a new incident.
func (j *evaluation) seenAgain(ctx context.Context, i *incident, seen time.Time) error {
	was, err := openIncident(ctx, j.tx, i.Kind, i.Key)
	if err != nil || was == nil || !seen.After(was.LastSeenAt) {
		return err
	}
	i.Summary = was.Summary
	return j.goOn(ctx, was, i)
}

// machines keeps one incident open for each shared machine that cannot be reached. Its workspaces are not moved.
func (j *evaluation) machines(ctx context.Context) error {
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
					Kind: kindMachine, Key: s.NodeID, Severity: commonv1.Severity_SEVERITY_P1,
					OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
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
	// While no replica of nodeapi listens, machines are not read. The state of such a machine is as unknown as that of one
	// in unknown, and its incident stays open.
	var listens *bool
	var problem error
	err := j.closeOthers(ctx, kindMachine, func(i *incident) bool {
		if lost[i.Key] != nil || unknown[i.Key] || !j.listened {
			return true
		}
		if listens == nil {
			var listen bool
			listen, problem = pg.Value[bool](ctx, j.tx, replicaListens)
			listens = &listen
		}
		return problem != nil || !*listens
	})
	if problem != nil {
		return fmt.Errorf("read who listens: %w", problem)
	}
	return err
}

// manualFor is how far back recoveries by people are searched for.
const manualFor = time.Hour

// manual adds a record for each recovery that a person made without the watchdog: a retry or a recreation that
// succeeded after an operation that had failed or hung, and that no record has yet.
func (j *evaluation) manual(ctx context.Context) error {
	list, err := pg.All[manualRecovery](ctx, j.tx, findManual, manualFor.Seconds(), requesterPrefix)
	if err != nil {
		return fmt.Errorf("look for recoveries by people: %w", err)
	}
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
		if err := j.writes(); err != nil {
			return err
		}
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
