package view

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// Audiences of notifications, as readmodel.notification spells them.
const (
	AudienceTenant    = "tenant"
	AudienceOperators = "operators"
)

// AudienceOf returns the audience that a scope belongs to.
func AudienceOf(scope list.Scope) string {
	if scope.Everything() {
		return AudienceOperators
	}
	return AudienceTenant
}

// NotificationFilter narrows a list of notifications. Zero fields do not.
type NotificationFilter struct {
	WorkspaceID string
	Open        bool   // without those that have ended
	IncidentID  string // for people of the operator
}

const (
	lasting    list.Condition = "x.ended_at IS NULL"
	ofIncident list.Condition = "x.incident_id = ?::uuid"
)

// notificationRow is an impact with the text for one audience.
type notificationRow struct {
	list.Place
	notificationColumns
}

type notificationColumns struct {
	WorkspaceID   string     `db:"workspace_id" expr:"x.workspace_id::text"`
	TenantID      string     `db:"tenant_id" expr:"x.tenant_id::text"`
	AllocationID  string     `db:"allocation_id" expr:"coalesce(x.allocation_id::text, '')"`
	NodeID        string     `db:"node_id" expr:"coalesce(x.node_id::text, '')"`
	IncidentID    string     `db:"incident_id" expr:"coalesce(x.incident_id::text, '')"`
	Layer         string     `db:"layer"`
	Family        string     `db:"family"`
	Reason        string     `db:"reason"`
	Evidence      []string   `db:"evidence"`
	CorrelationID string     `db:"correlation_id"`
	BeganAt       time.Time  `db:"began_at"`
	EndedAt       *time.Time `db:"ended_at"`
	Count         int32      `db:"count"`
	Version       int64      `db:"version"`
	Event         string     `db:"event" expr:"n.event"`
	Text          string     `db:"text" expr:"n.text"`
	CreatedAt     time.Time  `db:"created_at" expr:"n.created_at"`
	Channel       string     `db:"channel" expr:"n.channel"`
	FirstShownAt  *time.Time `db:"first_shown_at" expr:"n.first_shown_at"`
	// VerdictStale is since when the verdict about the node is stale by itself; nil: it is not.
	VerdictStale *time.Time `db:"verdict_stale" expr:"(v.body->>'stale_since')::timestamptz"`
}

var notificationLayout = list.Layout{
	Name: "notifications", Columns: pg.Columns[notificationColumns]("x"), ID: "x.impact_id",
	From: "readmodel.impact x JOIN readmodel.notification n ON n.impact_id = x.impact_id AND n.audience = $1" +
		" LEFT JOIN readmodel.verdict v ON v.node_id = x.node_id",
	Lead: 2, Tenant: "x.tenant_id", Conditions: []list.Condition{ofWorkspace, lasting, ofIncident},
}

var listNotifications = pg.DefineDynamic(pg.RoleReadmodel, "view.list_notifications", notificationLayout.Compose,
	notificationLayout.Samples()...)

// Notifications returns one page, newest first, with the texts for the people of the scope. It refuses to narrow it to
// an incident for a scope that is bound to a tenant, because an incident is of several tenants.
func (s *Snapshot) Notifications(
	ctx context.Context, f NotificationFilter, page list.Page,
) ([]*readmodelv1.Notification, string, error) {
	if f.IncidentID != "" && !s.scope.Everything() {
		return nil, "", list.OperatorsOnly()
	}
	l := list.Request{
		Layout: &notificationLayout, Statement: listNotifications, Args: []any{AudienceOf(s.scope), s.scope.Arg()},
	}
	l.When(f.WorkspaceID != "", ofWorkspace, list.OptionalID(f.WorkspaceID))
	l.When(f.Open, lasting)
	l.When(f.IncidentID != "", ofIncident, list.OptionalID(f.IncidentID))
	s.with = &pg.Batch{}
	stale := s.verdictsStaleSince()
	items, next, err := run(ctx, s, l, page, func(row notificationRow) (*readmodelv1.Notification, error) {
		n := readNotification(row)
		since := status.EarlierStale(*stale, row.VerdictStale)
		if !since.IsZero() && n.GetEndedAt() == nil && fromVerdict(row.Reason) {
			n.VerdictStaleSince = stamp(since)
			n.Text += " " + status.StaleText(since)
		}
		return n, nil
	})
	return namePage(ctx, s, func(n *readmodelv1.Notification) lookup.Nameless {
		return lookup.Nameless{
			WorkspaceID: n.GetWorkspaceId(), NodeID: n.GetNodeId(), Workspace: &n.Workspace, Node: &n.NodeName,
		}
	}, items, next, err)
}

// readNotification returns the message of a row. A value that this build does not know is shown as unspecified.
func readNotification(row notificationRow) *readmodelv1.Notification {
	const reader = "notification"
	out := &readmodelv1.Notification{
		ImpactId: row.ID, WorkspaceId: row.WorkspaceID, TenantId: row.TenantID, AllocationId: row.AllocationID,
		Layer:     aside.Value[readmodelv1.ImpactLayer](reader, row.ID, row.Layer),
		UserState: aside.Value[commonv1.UserState](reader, row.ID, row.Family),
		Event:     aside.Value[readmodelv1.ImpactEvent](reader, row.ID, row.Event),
		Text:      row.Text, BeganAt: timestamppb.New(row.BeganAt),
		Count: row.Count, CreatedAt: timestamppb.New(row.CreatedAt), Channel: row.Channel, Version: row.Version,
		NodeId: row.NodeID, OperatorReason: row.Reason, IncidentId: row.IncidentID, Evidence: row.Evidence,
		CorrelationId: row.CorrelationID,
	}
	if row.EndedAt != nil {
		out.EndedAt = timestamppb.New(*row.EndedAt)
	}
	if row.FirstShownAt != nil {
		out.FirstShownAt = timestamppb.New(*row.FirstShownAt)
	}
	return out
}

// fromVerdict reports whether an impact with a reason follows from the verdict about a node.
func fromVerdict(reason string) bool {
	_, err := names.Parse[commonv1.DriftReason](reason)
	return err == nil
}

var workspacesTouched = pg.Define(pg.RoleReadmodel, "view.workspaces_touched", `
	SELECT count(DISTINCT x.workspace_id)::integer FROM readmodel.impact x WHERE x.incident_id = $1::uuid`)

// WorkspacesTouched returns how many workspaces were touched while an incident covered their nodes.
func (s *Snapshot) WorkspacesTouched(ctx context.Context, incidentID string) (int32, error) {
	n, err := pg.Value[int32](ctx, s.tx, workspacesTouched, incidentID)
	if err != nil {
		return 0, fmt.Errorf("count workspaces of incident: %w", err)
	}
	return n, nil
}
