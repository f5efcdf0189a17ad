package project

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Kinds of subjects in readmodel.impact_due.
const (
	dueNode      = "node"
	dueWorkspace = "workspace"
	// dueTagged stands for a node that an incident names. It is stored as a node, if the node has an impact or may get
	// one.
	dueTagged = "tagged"
)

type due struct{ kind, id string }

var (
	// A workspace that is not active and has no open impact has none that could begin or end. An incident begins and ends
	// no impact; its id is added to those that there are.
	queueDue = pg.Define(pg.RoleReadmodel, "project.queue_due", `
		INSERT INTO readmodel.impact_due AS d (kind, subject_id)
		SELECT DISTINCT CASE u.kind WHEN 'tagged' THEN 'node' ELSE u.kind END AS kind, u.id
		FROM unnest($1::text[], $2::uuid[]) u (kind, id)
		WHERE u.kind = 'node'
			OR u.kind = 'workspace' AND (
				EXISTS (SELECT FROM readmodel.workspace w WHERE w.workspace_id = u.id AND w.state = 'active')
				OR EXISTS (SELECT FROM readmodel.impact i WHERE i.workspace_id = u.id AND i.ended_at IS NULL))
			OR u.kind = 'tagged' AND (
				EXISTS (SELECT FROM readmodel.impact i WHERE i.node_id = u.id AND i.ended_at IS NULL)
				OR EXISTS (SELECT FROM readmodel.impact_due q WHERE q.kind = 'node' AND q.subject_id = u.id))
		ORDER BY 1, 2
		ON CONFLICT (kind, subject_id) DO UPDATE SET ticket = EXCLUDED.ticket`)
	// queueCovered queues the nodes with an impact that an incident of equal verdicts covers, and that does not name it
	// yet.
	queueCovered = pg.Define(pg.RoleReadmodel, "project.queue_covered", `
		INSERT INTO readmodel.impact_due AS d (kind, subject_id)
		SELECT DISTINCT 'node', i.node_id FROM readmodel.impact i JOIN readmodel.verdict v ON v.node_id = i.node_id
		WHERE i.ended_at IS NULL AND i.incident_id IS DISTINCT FROM $2::uuid AND v.body->>'reason' = $1
		ORDER BY 2
		ON CONFLICT (kind, subject_id) DO UPDATE SET ticket = EXCLUDED.ticket`)
	// queueSuspected queues the nodes with a reason that touches their workspaces, or does not, with an incident.
	queueSuspected = pg.Define(pg.RoleReadmodel, "project.queue_suspected", `
		INSERT INTO readmodel.impact_due AS d (kind, subject_id)
		SELECT 'node', v.node_id FROM readmodel.verdict v WHERE v.body->>'reason' = $1 ORDER BY 2
		ON CONFLICT (kind, subject_id) DO UPDATE SET ticket = EXCLUDED.ticket`)
	// After a rebuild, and after a change of the verdict about the control plane, any node with a verdict and any
	// workspace with an open impact may be touched otherwise.
	queueAll = pg.Define(pg.RoleReadmodel, "project.queue_all", `
		INSERT INTO readmodel.impact_due AS d (kind, subject_id)
		SELECT u.kind, u.id FROM (
			SELECT 'node' AS kind, v.node_id AS id FROM readmodel.verdict v
				WHERE v.body->>'reason' IS NOT NULL AND v.node_id <> '00000000-0000-0000-0000-000000000000'
			UNION SELECT 'workspace', i.workspace_id FROM readmodel.impact i WHERE i.ended_at IS NULL) u
		ORDER BY u.kind, u.id
		ON CONFLICT (kind, subject_id) DO UPDATE SET ticket = EXCLUDED.ticket`)
)

// queued are the nodes and workspaces whose impact may change with some events.
type queued struct {
	all     bool
	some    []due
	covered []covered
	// suspected are reasons whose incident has begun, goes on or has ended, as their enum spells them.
	suspected []string
}

// covered are the nodes whose verdict has the reason of an incident.
type covered struct{ reason, incidentID string }

func (q queued) any() bool { return q.all || len(q.some)+len(q.covered)+len(q.suspected) > 0 }

// dueOf returns what may be touched otherwise after the events. The verdict about the control plane touches no
// workspace; while it holds it hides what verdicts about some nodes say.
func dueOf(records []events.Record) queued {
	var out queued
	for _, r := range records {
		switch r.Kind {
		case KindVerdict:
			if r.AggregateID == ControlPlane {
				out.all = true
			} else {
				out.some = append(out.some, due{dueNode, r.AggregateID})
			}
		case KindWorkspace, KindObservation:
			out.some = append(out.some, due{dueWorkspace, r.AggregateID})
		case KindIncident:
			m := &recoveryv1.Incident{}
			if r.Decode(m) != nil {
				continue // the event is parked
			}
			for _, id := range m.GetNodeIds() {
				out.some = append(out.some, due{dueTagged, id})
			}
			reason, err := names.Parse[commonv1.DriftReason](m.GetErrorCode())
			if err != nil || m.GetKind() != commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT {
				continue
			}
			if m.GetClosedAt() == nil {
				out.covered = append(out.covered, covered{reason.String(), r.AggregateID})
			}
			if fault.OursIfMany(reason) {
				out.suspected = append(out.suspected, reason.String())
			}
		}
	}
	return out
}

// queue notes for the notifier what the events may have changed.
func (a applier) queue(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	if !a.queues {
		return nil
	}
	q := dueOf(records)
	var kinds, subjects []string
	for _, d := range q.some {
		if id, err := uuid.Parse(d.id); err == nil {
			kinds, subjects = append(kinds, d.kind), append(subjects, id.String())
		}
	}
	if len(kinds) > 0 {
		if _, err := pg.Exec(ctx, tx, queueDue, kinds, subjects); err != nil {
			return fmt.Errorf("queue what may be touched: %w", err)
		}
	}
	for _, c := range q.covered {
		if _, err := pg.Exec(ctx, tx, queueCovered, c.reason, c.incidentID); err != nil {
			return fmt.Errorf("queue what an incident covers: %w", err)
		}
	}
	for _, reason := range q.suspected {
		if _, err := pg.Exec(ctx, tx, queueSuspected, reason); err != nil {
			return fmt.Errorf("queue what an incident suspects: %w", err)
		}
	}
	if q.all {
		return queueEverything(ctx, tx)
	}
	return nil
}

func queueEverything(ctx context.Context, tx pgx.Tx) error {
	if _, err := pg.Exec(ctx, tx, queueAll); err != nil {
		return fmt.Errorf("queue all that may be touched: %w", err)
	}
	return nil
}
