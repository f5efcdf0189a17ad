package notify

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/showable"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/status"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// kept is an impact that is open, or that has ended within the window in which repetitions are counted.
type kept struct {
	ImpactID    string `db:"impact_id"`
	WorkspaceID string `db:"workspace_id"`
	Layer       string `db:"layer"`
	Family      string `db:"family"`
	Reason      string `db:"reason"`
	IncidentID  string `db:"incident_id"`
	Ended       bool   `db:"ended"`

	RecheckAt *time.Time `db:"recheck_at"`
}

var readKept = pg.Define(pg.RoleReadmodel, "notify.read_kept", `
	SELECT DISTINCT ON (i.workspace_id, i.layer) i.impact_id::text AS impact_id, i.workspace_id::text AS workspace_id,
		i.layer, i.family, i.reason, coalesce(i.incident_id::text, '') AS incident_id, i.ended_at IS NOT NULL AS ended,
		i.recheck_at
	FROM readmodel.impact i WHERE i.workspace_id = ANY($1::uuid[]) AND coalesce(i.ended_at, 'infinity') > $2
	ORDER BY i.workspace_id, i.layer, i.ended_at DESC NULLS FIRST, i.impact_id DESC`)

// impact is a row to be written.
type impact struct {
	ImpactID      string    `json:"impact_id"`
	WorkspaceID   string    `json:"workspace_id"`
	TenantID      string    `json:"tenant_id"`
	AllocationID  *string   `json:"allocation_id"`
	NodeID        *string   `json:"node_id"`
	IncidentID    *string   `json:"incident_id"`
	Layer         string    `json:"layer"`
	Family        string    `json:"family"`
	Reason        string    `json:"reason"`
	Evidence      []string  `json:"evidence"`
	CorrelationID string    `json:"correlation_id"`
	BeganAt       time.Time `json:"began_at"`

	RecheckAt *time.Time `json:"recheck_at"`
}

// note is the text for one audience.
type note struct {
	ImpactID string `json:"impact_id"`
	Audience string `json:"audience"`
	Event    string `json:"event"`
	Text     string `json:"text"`
}

const (
	ofTenant    = "tenant"
	ofOperators = "operators"
	began       = "began"
	changed     = "changed"
	ended       = "ended"
)

// changes are the differences between the rows of some workspaces and their present state.
type changes struct {
	put   []impact
	end   []string // ids
	notes []note
	count map[string]int // of the rows, by event
}

// compare returns what differs between the rows of workspaces and how their layers are touched now.
func (n *Notifier) compare(ctx context.Context, tx pgx.Tx, now time.Time, found []view.Touched) (*changes, error) {
	ids := make([]string, len(found))
	for i, t := range found {
		ids[i] = t.Workspace.GetWorkspaceId()
	}
	rows, err := pg.All[kept](ctx, tx, readKept, ids, now.Add(-n.deps.Window()))
	if err != nil {
		return nil, fmt.Errorf("read impacts: %w", err)
	}
	type layer struct{ workspaceID, name string }
	known := make(map[layer]kept, len(rows))
	for _, row := range rows {
		known[layer{row.WorkspaceID, row.Layer}] = row
	}
	c := &changes{count: map[string]int{}}
	for _, t := range found {
		for _, i := range t.Touched {
			at := layer{t.Workspace.GetWorkspaceId(), names.Of(i.Layer)}
			row, has := known[at]
			delete(known, at)
			c.touch(row, has, rowOf(t, i, now), i)
		}
	}
	for _, t := range found {
		for _, name := range layers {
			row, has := known[layer{t.Workspace.GetWorkspaceId(), names.Of(name)}]
			if has && !row.Ended && !t.Keeps(name, row.Reason) {
				c.over(row, t)
			}
		}
	}
	return c, nil
}

var layers = []readmodelv1.ImpactLayer{
	readmodelv1.ImpactLayer_IMPACT_LAYER_MANAGEMENT, readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME,
	readmodelv1.ImpactLayer_IMPACT_LAYER_EDGE,
}

// touch adds what makes the row of a layer follow an impact. Evidence of the same reason and family, which may be new
// every minute, changes no row.
func (c *changes) touch(row kept, has bool, now impact, i status.Impact) {
	event := began
	switch {
	case has && !row.Ended && row.Family == now.Family && row.Reason == now.Reason:
		covered := now.IncidentID != nil && *now.IncidentID != row.IncidentID
		if covered || now.RecheckAt != nil && (row.RecheckAt == nil || !now.RecheckAt.Equal(*row.RecheckAt)) {
			now.ImpactID = row.ImpactID
			c.put = append(c.put, now) // people have been notified of it
		}
		return
	case has && !row.Ended:
		now.ImpactID, event = row.ImpactID, changed
	case has: // it returned soon
		now.ImpactID = row.ImpactID
	}
	c.put = append(c.put, now)
	c.addNotes(now.ImpactID, event, i.Text, now.Reason+": "+i.Detail)
}

// over adds what ends an impact.
func (c *changes) over(row kept, t view.Touched) {
	const normal = "What disturbed it is over."
	c.end = append(c.end, row.ImpactID)
	text := normal
	if state := t.Workspace.GetState(); state != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
		text = "It is " + names.Of(state) + ": what disturbed it before does not count any more."
	}
	toOperators := row.Reason + " is over; the workspace is " + names.Of(t.Workspace.GetState())
	if t.Ours(row.Reason) {
		text = "It is looked into as a fault of the platform, and nothing shows that it disturbs what runs."
		toOperators = row.Reason + " is an incident of many machines, and there is no evidence of what runs on this one"
	}
	c.addNotes(row.ImpactID, ended, text, toOperators)
}

func (c *changes) addNotes(id, event, toTenant, toOperators string) {
	c.count[event]++
	c.notes = append(c.notes, note{id, ofTenant, event, toTenant}, note{id, ofOperators, event, toOperators})
}

// rowOf returns the row of an impact that begins. Its id follows from when it began, so that the same evidence makes
// the same row.
func rowOf(t view.Touched, i status.Impact, now time.Time) impact {
	w := t.Workspace
	out := impact{
		WorkspaceID: w.GetWorkspaceId(), TenantID: w.GetTenantId(), AllocationID: given(t.AllocationID),
		NodeID: given(w.GetNodeId()), IncidentID: given(t.IncidentID), Layer: names.Of(i.Layer),
		Family: names.Of(i.Family), Reason: i.Reason, Evidence: []string{i.Reason + ": " + i.Detail}, BeganAt: i.Since,
	}
	if i.Judged != 0 && t.Verdict != nil {
		out.CorrelationID, out.BeganAt = t.Verdict.GetCorrelationId(), t.Verdict.GetDetectedAt().AsTime()
		for _, e := range t.Verdict.GetEvidence() {
			if e.GetReason() != i.Judged {
				continue
			}
			out.Evidence = append(out.Evidence, fmt.Sprintf("%s of %s observed at %s: %s", names.Of(e.GetPart()),
				names.Of(e.GetSource()), e.GetObservedAt().AsTime().Format(time.RFC3339),
				showable.Tail(showable.Clean([]byte(e.GetDetail())), detailKept)))
		}
		if t.Verdict.GetReason() != i.Judged {
			out.RecheckAt = overAt(t.Verdict.GetEvidence(), i.Judged, now)
		}
	}
	// What an agent reports may be of a time before the workspace came up, or of a clock that is ahead.
	if up := w.GetStateAt().AsTime(); out.BeganAt.Before(up) {
		out.BeganAt = up
	}
	if out.BeganAt.Unix() <= 0 || out.BeganAt.After(now) {
		out.BeganAt = now
	}
	out.BeganAt = out.BeganAt.Truncate(time.Microsecond)
	out.ImpactID = project.PeriodID(out.WorkspaceID+"/"+out.Layer, out.BeganAt)
	return out
}

// overAt returns when the last of the evidence of a reason is over; nil if some of it has no end, or if all of it is
// over.
func overAt(evidence []*recoveryv1.Evidence, reason commonv1.DriftReason, now time.Time) *time.Time {
	var last time.Time
	for _, e := range evidence {
		switch at := e.GetFreshUntil(); {
		case e.GetReason() != reason:
		case at == nil:
			return nil
		case at.AsTime().After(last):
			last = at.AsTime()
		}
	}
	if !last.After(now) {
		return nil
	}
	last = last.Truncate(time.Microsecond)
	return &last
}

// detailKept is how much of what a source observed the evidence of an impact has at most.
const detailKept = 500

func given(id string) *string {
	if id == "" {
		return nil
	}
	return &id
}

var (
	putImpacts = pg.Define(pg.RoleReadmodel, "notify.put_impacts", `
		INSERT INTO readmodel.impact AS i (impact_id, workspace_id, tenant_id, allocation_id, node_id, incident_id, layer,
			family, reason, evidence, correlation_id, began_at, recheck_at)
		SELECT r.impact_id, r.workspace_id, r.tenant_id, r.allocation_id, r.node_id, r.incident_id, r.layer, r.family,
			r.reason, r.evidence, r.correlation_id, r.began_at, r.recheck_at
		FROM jsonb_to_recordset($1::jsonb) AS r (impact_id uuid, workspace_id uuid, tenant_id uuid, allocation_id uuid,
			node_id uuid, incident_id uuid, layer text, family text, reason text, evidence text[], correlation_id text,
			began_at timestamptz, recheck_at timestamptz)
		ORDER BY r.impact_id
		ON CONFLICT (impact_id) DO UPDATE SET allocation_id = EXCLUDED.allocation_id, node_id = EXCLUDED.node_id,
			incident_id = coalesce(EXCLUDED.incident_id, i.incident_id), family = EXCLUDED.family, reason = EXCLUDED.reason,
			evidence = EXCLUDED.evidence, correlation_id = EXCLUDED.correlation_id, recheck_at = EXCLUDED.recheck_at,
			ended_at = NULL,
			count = i.count + (i.ended_at IS NOT NULL)::integer, version = i.version + 1`)
	endImpacts = pg.Define(pg.RoleReadmodel, "notify.end_impacts", `
		UPDATE readmodel.impact i SET ended_at = $2, version = i.version + 1
		WHERE i.impact_id = ANY($1::uuid[]) AND i.ended_at IS NULL`)
	// What says the same as before is not said again.
	putNotes = pg.Define(pg.RoleReadmodel, "notify.put_notes", `
		INSERT INTO readmodel.notification AS n (impact_id, audience, event, text, created_at)
		SELECT r.impact_id, r.audience, r.event, r.text, $2
		FROM jsonb_to_recordset($1::jsonb) AS r (impact_id uuid, audience text, event text, text text)
		WHERE EXISTS (SELECT FROM readmodel.impact i WHERE i.impact_id = r.impact_id)
		ORDER BY r.impact_id, r.audience
		ON CONFLICT (impact_id, audience) DO UPDATE
		SET event = EXCLUDED.event, text = EXCLUDED.text, created_at = EXCLUDED.created_at, first_shown_at = NULL
		WHERE n.text <> EXCLUDED.text OR (n.event = 'ended') <> (EXCLUDED.event = 'ended')`)
)

// write writes the changes, in a constant number of statements.
func (c *changes) write(ctx context.Context, tx pgx.Tx, now time.Time, r *Result) error {
	if len(c.put) > 0 {
		raw, err := json.Marshal(c.put)
		if err == nil {
			_, err = pg.Exec(ctx, tx, putImpacts, raw)
		}
		if err != nil {
			return fmt.Errorf("write impacts: %w", err)
		}
	}
	if len(c.end) > 0 {
		slices.Sort(c.end)
		if _, err := pg.Exec(ctx, tx, endImpacts, c.end, now); err != nil {
			return fmt.Errorf("end impacts: %w", err)
		}
	}
	if len(c.notes) > 0 {
		raw, err := json.Marshal(c.notes)
		if err == nil {
			_, err = pg.Exec(ctx, tx, putNotes, raw, now)
		}
		if err != nil {
			return fmt.Errorf("write notifications: %w", err)
		}
	}
	r.Began += c.count[began]
	r.Changed += c.count[changed]
	r.Ended += c.count[ended]
	return nil
}
