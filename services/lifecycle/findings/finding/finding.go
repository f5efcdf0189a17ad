package finding

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Severities of findings.
const (
	P0 = commonv1.Severity_SEVERITY_P0
	P1 = commonv1.Severity_SEVERITY_P1
	P2 = commonv1.Severity_SEVERITY_P2
)

// Emptied is the name in After by which a finding about a claim tells that the node has nothing of the workspace.
const Emptied = "emptied"

// Seen is one contradiction that a detector found.
type Seen struct {
	Kind                                        commonv1.FindingKind
	Severity                                    commonv1.Severity
	SubjectType, SubjectID                      string
	TenantID, WorkspaceID, NodeID, AllocationID string // empty where there is none
	Summary, NextAction                         string
	Before, After                               map[string]any
	// Evidence are the ids of the changes of a row that the finding names; an acknowledgement settles them.
	Evidence []int64
	// Cordon keeps new workspaces off NodeID while the finding is open.
	Cordon bool
	// Certain needs no second scan: no work under way can look like it.
	Certain bool
}

// Key identifies what a finding is about: there is at most one open finding for each key.
type Key struct {
	Kind        string `db:"kind"`
	SubjectType string `db:"subject_type"`
	SubjectID   string `db:"subject_id"`
}

// Key returns the key of the finding that would be made.
func (s *Seen) Key() Key {
	return Key{Kind: names.Of(s.Kind), SubjectType: s.SubjectType, SubjectID: s.SubjectID}
}

// Row is a finding as it is stored.
type Row struct {
	Seen

	ID                  string
	Source              string
	Cordoned            bool
	firstSeen, lastSeen time.Time
	Resolved            *time.Time
	ackBy, ackReason    string
	Count, Version      int64
}

// Stored is a row of finding as it is read.
type Stored struct {
	ID           string         `db:"finding_id" expr:"@.finding_id::text"`
	Kind         string         `db:"kind"`
	Severity     string         `db:"severity"`
	SubjectType  string         `db:"subject_type"`
	SubjectID    string         `db:"subject_id"`
	Source       string         `db:"source"`
	TenantID     string         `db:"tenant_id" expr:"coalesce(@.tenant_id::text, '')"`
	WorkspaceID  string         `db:"workspace_id" expr:"coalesce(@.workspace_id::text, '')"`
	NodeID       string         `db:"node_id" expr:"coalesce(@.node_id::text, '')"`
	AllocationID string         `db:"allocation_id" expr:"coalesce(@.allocation_id::text, '')"`
	Summary      string         `db:"summary"`
	NextAction   string         `db:"next_action"`
	Before       map[string]any `db:"before"`
	After        map[string]any `db:"after"`
	Cordoned     bool           `db:"cordoned"`
	FirstSeen    time.Time      `db:"first_seen_at"`
	LastSeen     time.Time      `db:"last_seen_at"`
	Resolved     *time.Time     `db:"resolved_at"`
	Count        int64          `db:"count"`
	Version      int64          `db:"version"`
	Evidence     []int64        `db:"evidence"`
	AckBy        string         `db:"acknowledged_by"`
	AckReason    string         `db:"acknowledge_reason"`
}

// Columns are the columns of Stored, in a statement that names the table f.
var Columns = pg.Columns[Stored]("f")

// Finding parses the stored row. A kind or severity of another build is an error.
func (d *Stored) Finding() (Row, error) {
	r := Row{
		Seen: Seen{
			SubjectType: d.SubjectType, SubjectID: d.SubjectID, TenantID: d.TenantID, WorkspaceID: d.WorkspaceID,
			NodeID: d.NodeID, AllocationID: d.AllocationID, Summary: d.Summary, NextAction: d.NextAction, Before: d.Before,
			After: d.After, Evidence: d.Evidence,
		},
		ID: d.ID, Source: d.Source, Cordoned: d.Cordoned, firstSeen: d.FirstSeen, lastSeen: d.LastSeen, Resolved: d.Resolved,
		ackBy: d.AckBy, ackReason: d.AckReason, Count: d.Count, Version: d.Version,
	}
	var err error
	if r.Kind, err = names.Parse[commonv1.FindingKind](d.Kind); err != nil {
		return Row{}, fmt.Errorf("read finding: %w", err)
	}
	if r.Severity, err = names.Parse[commonv1.Severity](d.Severity); err != nil {
		return Row{}, fmt.Errorf("read finding: %w", err)
	}
	return r, nil
}

// One runs a statement that returns one finding. Without a row the error is pgx.ErrNoRows. One with a value that this
// build does not know is an error, which package aside reports.
func One(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Row, error) {
	d, err := pg.One[Stored](ctx, q, s, args...)
	if err != nil {
		return Row{}, err
	}
	r, err := d.Finding()
	aside.Note(ctx, "finding", d.ID, err)
	return r, err
}

// Unread reports whether an error of One is about a value that this build does not know. Such a finding is left to a
// replica whose build knows the value.
func Unread(err error) bool {
	var unknown *names.UnknownError
	return errors.As(err, &unknown)
}

// All runs a statement that returns findings.
func All(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) ([]Row, error) {
	list, err := pg.All[Stored](ctx, q, s, args...)
	if err != nil {
		return nil, err
	}
	return Parse(ctx, list)
}

// Parse parses stored rows. Those with a value that this build does not know are set aside.
func Parse(ctx context.Context, list []Stored) ([]Row, error) {
	return aside.Rows(ctx, "finding", list, func(d Stored) string { return d.ID },
		func(d Stored) (Row, error) { return d.Finding() })
}

func (r *Row) event() (events.Event, error) {
	before, err := asStruct(r.Before)
	if err != nil {
		return events.Event{}, err
	}
	after, err := asStruct(r.After)
	if err != nil {
		return events.Event{}, err
	}
	p := &lifecyclev1.Finding{
		FindingId: r.ID, Kind: r.Kind, Severity: r.Severity, SubjectType: r.SubjectType, SubjectId: r.SubjectID,
		TenantId: r.TenantID, WorkspaceId: r.WorkspaceID, NodeId: r.NodeID, AllocationId: r.AllocationID, Summary: r.Summary,
		NextAction: r.NextAction, Before: before, After: after, Cordoned: r.Cordoned,
		FirstSeenAt: timestamppb.New(r.firstSeen), LastSeenAt: timestamppb.New(r.lastSeen), Count: r.Count,
		Version: r.Version, AcknowledgedBy: r.ackBy,
		AcknowledgeReason: r.ackReason,
	}
	p.Emptied, _ = r.After[Emptied].(bool)
	if r.Resolved != nil {
		p.ResolvedAt = timestamppb.New(*r.Resolved)
	}
	return events.Event{
		Kind: "finding.changed", AggregateType: "finding", AggregateID: r.ID, AggregateVersion: r.Version, Payload: p,
		Correlation: events.Correlation{
			TenantID: r.TenantID, WorkspaceID: r.WorkspaceID, AllocationID: r.AllocationID,
			NodeID: r.NodeID,
		},
	}, nil
}

// asStruct converts a map by way of JSON, so that every value in it can be converted.
func asStruct(m map[string]any) (*structpb.Struct, error) {
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("spell evidence: %w", err)
	}
	s := &structpb.Struct{}
	if len(m) == 0 {
		return s, nil
	}
	if err := s.UnmarshalJSON(raw); err != nil {
		return nil, fmt.Errorf("spell evidence: %w", err)
	}
	return s, nil
}

// CordonBy returns the name by which a finding cordons a node.
func CordonBy(findingID string) string { return "finding:" + findingID }

// TakeTurn locks the findings, so that one transaction at a time writes them.
var TakeTurn = pg.Define(pg.RoleLifecycle, "finding.take_turn",
	`SELECT pg_advisory_xact_lock(hashtextextended('lifecycle.findings', 0))`)
