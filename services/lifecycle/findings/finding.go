package findings

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// Seen is one thing that a look holds for broken.
type Seen struct {
	Kind                                        commonv1.FindingKind
	Severity                                    commonv1.Severity
	SubjectType, SubjectID                      string
	TenantID, WorkspaceID, NodeID, AllocationID string // empty where there is none
	Summary, NextAction                         string
	Before, After                               map[string]any
	// Evidence are the changes of a row that it speaks of: what an acknowledgement of it settles.
	Evidence []int64
	// Cordon keeps new workspaces off NodeID while the finding is open.
	Cordon bool
	// Certain needs no second look: nothing that is under way can look like it.
	Certain bool
}

// key is what a finding is about: one open row each.
type key struct{ kind, subjectType, subjectID string }

func (s *Seen) key() key { return key{names.Of(s.Kind), s.SubjectType, s.SubjectID} }

// row is a finding as it is stored.
type row struct {
	Seen

	id                  string
	source              string
	cordoned            bool
	firstSeen, lastSeen time.Time
	resolved            *time.Time
	ackBy, ackReason    string
	count, version      int64
}

const findingColumns = `f.finding_id::text, f.kind, f.severity, f.subject_type, f.subject_id, f.source, coalesce(f.tenant_id::text, ''),
	coalesce(f.workspace_id::text, ''), coalesce(f.node_id::text, ''), coalesce(f.allocation_id::text, ''), f.summary, f.next_action, f.before, f.after,
	f.cordoned, f.first_seen_at, f.last_seen_at, f.resolved_at, f.count, f.version, f.evidence, f.acknowledged_by,
	f.acknowledge_reason`

func scanFinding(from pgx.Row) (row, error) {
	var r row
	var kind, severity string
	err := from.Scan(&r.id, &kind, &severity, &r.SubjectType, &r.SubjectID, &r.source, &r.TenantID, &r.WorkspaceID, &r.NodeID, &r.AllocationID,
		&r.Summary, &r.NextAction, &r.Before, &r.After, &r.cordoned, &r.firstSeen, &r.lastSeen, &r.resolved, &r.count, &r.version, &r.Evidence, &r.ackBy, &r.ackReason)
	if err != nil {
		return row{}, err //nolint:wrapcheck // the caller says what it read
	}
	if r.Kind, err = names.Parse[commonv1.FindingKind](kind); err != nil {
		return row{}, fmt.Errorf("read finding: %w", err)
	}
	if r.Severity, err = names.Parse[commonv1.Severity](severity); err != nil {
		return row{}, fmt.Errorf("read finding: %w", err)
	}
	return r, nil
}

func (r *row) event() (events.Event, error) {
	before, err := asStruct(r.Before)
	if err != nil {
		return events.Event{}, err
	}
	after, err := asStruct(r.After)
	if err != nil {
		return events.Event{}, err
	}
	p := &lifecyclev1.Finding{
		FindingId: r.id, Kind: r.Kind, Severity: r.Severity, SubjectType: r.SubjectType, SubjectId: r.SubjectID, TenantId: r.TenantID,
		WorkspaceId: r.WorkspaceID, NodeId: r.NodeID, AllocationId: r.AllocationID, Summary: r.Summary, NextAction: r.NextAction, Before: before,
		After: after, Cordoned: r.cordoned, FirstSeenAt: timestamppb.New(r.firstSeen), LastSeenAt: timestamppb.New(r.lastSeen), Count: r.count,
		Version: r.version, AcknowledgedBy: r.ackBy, AcknowledgeReason: r.ackReason,
	}
	if r.resolved != nil {
		p.ResolvedAt = timestamppb.New(*r.resolved)
	}
	return events.Event{
		Kind: "finding.changed", AggregateType: "finding", AggregateID: r.id, AggregateVersion: r.version, Payload: p,
		Correlation: events.Correlation{TenantID: r.TenantID, WorkspaceID: r.WorkspaceID, AllocationID: r.AllocationID, NodeID: r.NodeID},
	}, nil
}

// asStruct passes through JSON, so that whatever stands in a map has a spelling.
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

// cordonBy is who a cordon of a finding is by.
func cordonBy(findingID string) string { return "finding:" + findingID }

// announce appends the event of a finding. It answers the finding as it is told, and the event's position token.
func announce(ctx context.Context, tx pgx.Tx, r row) (*lifecyclev1.Finding, string, error) {
	e, err := r.event()
	if err != nil {
		return nil, "", err
	}
	pos, err := events.Append(ctx, tx, e)
	if err != nil {
		return nil, "", fmt.Errorf("report finding: %w", err)
	}
	f, _ := e.Payload.(*lifecyclev1.Finding)
	return f, pos, nil
}

// open writes a finding down for the first time, or sees an open one again. It answers whether it is new.
func open(ctx context.Context, tx pgx.Tx, source string, s Seen) (bool, error) {
	k := s.key()
	have, err := scanFinding(tx.QueryRow(ctx, `SELECT `+findingColumns+` FROM lifecycle.finding f
		WHERE f.kind = $1 AND f.subject_type = $2 AND f.subject_id = $3 AND f.resolved_at IS NULL`, k.kind, k.subjectType, k.subjectID))
	switch {
	case err == nil && have.source != source:
		return false, nil // another look sees it already
	case err == nil:
		return false, again(ctx, tx, have, s)
	case !errors.Is(err, pgx.ErrNoRows):
		return false, fmt.Errorf("read finding: %w", err)
	}
	id := ids.New()
	cordoned := false
	if s.Cordon && s.NodeID != "" {
		by, err := gate.CordonUnlessIs(ctx, tx, s.NodeID, s.Summary, cordonBy(id))
		if err != nil {
			return false, err //nolint:wrapcheck // it says what it did
		}
		cordoned = by != ""
	}
	made, err := scanFinding(tx.QueryRow(ctx, `
		INSERT INTO lifecycle.finding AS f (finding_id, kind, severity, subject_type, subject_id, source, tenant_id, workspace_id, node_id, allocation_id,
			summary, next_action, before, after, cordoned, evidence)
		VALUES ($1, $2, $3, $4, $5, $6, nullif($7, '')::uuid, nullif($8, '')::uuid, nullif($9, '')::uuid, nullif($10, '')::uuid, $11, $12, $13, $14, $15, $16)
		RETURNING `+findingColumns, id, k.kind, names.Of(s.Severity), s.SubjectType, s.SubjectID, source, s.TenantID, s.WorkspaceID, s.NodeID,
		s.AllocationID, s.Summary, s.NextAction, orEmpty(s.Before), orEmpty(s.After), cordoned, append([]int64{}, s.Evidence...)))
	if err != nil {
		return false, fmt.Errorf("insert finding: %w", err)
	}
	if err := decided(ctx, tx, "finding.open", made); err != nil {
		return false, err
	}
	_, _, err = announce(ctx, tx, made)
	return true, err
}

func orEmpty(m map[string]any) map[string]any {
	if m == nil {
		return map[string]any{}
	}
	return m
}

// again counts another sight. It is told when what is seen changed, and else at the 2nd, 4th, 8th sight and so on: a finding that stays for days costs
// few events.
func again(ctx context.Context, tx pgx.Tx, have row, s Seen) error {
	same, err := sameEvidence(have.Seen, s)
	if err != nil {
		return err
	}
	tell := !same || bits.OnesCount64(uint64(have.count+1)) == 1 //nolint:gosec // it counts up from 1
	raised := int64(0)
	if tell {
		raised = 1
	}
	now, err := scanFinding(tx.QueryRow(ctx, `
		UPDATE lifecycle.finding f SET severity = $2, summary = $3, next_action = $4, before = $5, after = $6, count = f.count + 1,
			last_seen_at = mesh.clock(), version = f.version + $7, evidence = $8
		WHERE f.finding_id = $1 RETURNING `+findingColumns,
		have.id, names.Of(s.Severity), s.Summary, s.NextAction, orEmpty(s.Before), orEmpty(s.After), raised, append([]int64{}, s.Evidence...)))
	if err != nil {
		return fmt.Errorf("see finding again: %w", err)
	}
	if !tell {
		return nil
	}
	_, _, err = announce(ctx, tx, now)
	return err
}

// sameEvidence compares what is told, spelled as it is stored.
func sameEvidence(have, s Seen) (bool, error) {
	spell := func(x Seen) (string, error) {
		raw, err := json.Marshal([]any{x.Severity, x.Summary, x.NextAction, orEmpty(x.Before), orEmpty(x.After)})
		if err != nil {
			return "", fmt.Errorf("spell evidence: %w", err)
		}
		var v any
		if err := json.Unmarshal(raw, &v); err != nil {
			return "", fmt.Errorf("spell evidence: %w", err)
		}
		raw, err = json.Marshal(v)
		return string(raw), err
	}
	a, err := spell(have)
	if err != nil {
		return false, err
	}
	b, err := spell(s)
	return a == b, err
}

// resolve closes a finding that its look no longer sees, and ends its cordon unless another finding wants it.
func resolve(ctx context.Context, tx pgx.Tx, r row) (*lifecyclev1.Finding, string, error) {
	now, err := scanFinding(tx.QueryRow(ctx, `
		UPDATE lifecycle.finding f SET resolved_at = mesh.clock(), version = f.version + 1
		WHERE f.finding_id = $1 AND f.resolved_at IS NULL RETURNING `+findingColumns, r.id))
	if err != nil {
		return nil, "", fmt.Errorf("resolve finding: %w", err)
	}
	if err := decided(ctx, tx, "finding.resolve", now); err != nil {
		return nil, "", err
	}
	if now.cordoned && now.NodeID != "" {
		if err := gate.EndCordonOf(ctx, tx, now.NodeID, cordonBy(now.id)); err != nil {
			return nil, "", err //nolint:wrapcheck // it says what it did
		}
	}
	return announce(ctx, tx, now)
}
