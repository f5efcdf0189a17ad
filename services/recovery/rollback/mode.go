package rollback

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// mostEvidence bounds what the row keeps of the evidence: the newest of each kind and subject.
const mostEvidence = 32

// Evidence is one thing that shows that the database is older than what others remember.
type Evidence struct {
	Kind       recoveryv1.RollbackEvidenceKind
	Subject    string // a node, or what the launch log was read for
	Detail     string
	Remembered int64 // the number that was shown
	Known      int64 // the highest that the database has
	Era        int64 // of the number that was given by a history that is lost
}

// seen is evidence as the row keeps it.
type seen struct {
	Kind       string    `json:"kind"`
	Subject    string    `json:"subject"`
	Detail     string    `json:"detail"`
	Remembered int64     `json:"remembered"`
	Known      int64     `json:"known"`
	Era        int64     `json:"era"`
	First      time.Time `json:"first"`
	Last       time.Time `json:"last"`
	Count      int64     `json:"count"`
}

// Mode is the row.
type Mode struct {
	Active       bool
	Declared     bool
	Since        *time.Time
	Era          int64
	ReportedBy   string
	Reason       string
	IncidentID   string
	AcceptedAt   *time.Time
	AcceptedBy   string
	AcceptReason string
	Version      int64

	evidence []seen // newest first
	total    int64
	seenEra  int64
}

const columns = `state = 'active', declared, since, era, reported_by, reason, evidence, evidence_total, incident_id,
	accepted_at, accepted_by, accept_reason,
	version, seen_era`

func scan(row pgx.Row) (*Mode, error) {
	m := &Mode{}
	var evidence []byte
	err := row.Scan(&m.Active, &m.Declared, &m.Since, &m.Era, &m.ReportedBy, &m.Reason, &evidence, &m.total, &m.IncidentID,
		&m.AcceptedAt,
		&m.AcceptedBy, &m.AcceptReason, &m.Version, &m.seenEra)
	if err != nil {
		return nil, fmt.Errorf("read rollback mode: %w", err)
	}
	if err := json.Unmarshal(evidence, &m.evidence); err != nil {
		return nil, fmt.Errorf("read evidence of rollback mode: %w", err)
	}
	return m, nil
}

// Read returns the mode as it is.
func Read(ctx context.Context, q pg.Querier) (*Mode, error) {
	return scan(q.QueryRow(ctx, `SELECT `+columns+` FROM recovery.rollback`))
}

// lock is Read under the row's lock.
func lock(ctx context.Context, tx pgx.Tx) (*Mode, error) {
	return scan(tx.QueryRow(ctx, `SELECT `+columns+` FROM recovery.rollback FOR UPDATE`))
}

// Active reports whether the mode is active, as every service reads it.
func Active(ctx context.Context, q pg.Querier) (bool, error) {
	var active bool
	if err := q.QueryRow(ctx, `SELECT mesh.rolled_back()`).Scan(&active); err != nil {
		return false, fmt.Errorf("read whether the database was rolled back: %w", err)
	}
	return active, nil
}

// save writes the row.
func (m *Mode) save(ctx context.Context, tx pgx.Tx) error {
	m.Version++
	evidence := m.evidence
	if evidence == nil {
		evidence = []seen{}
	}
	encoded, err := json.Marshal(evidence)
	if err != nil {
		return fmt.Errorf("encode evidence of rollback mode: %w", err)
	}
	state := "none"
	if m.Active {
		state = "active"
	}
	tag, err := tx.Exec(ctx, `UPDATE recovery.rollback SET state = $1, declared = $2, since = $3, era = $4,
		reported_by = $5, reason = $6, evidence = $7::jsonb, evidence_total = $8, incident_id = $9, accepted_at = $10,
		accepted_by = $11, accept_reason = $12, version = $13, seen_era = $14 WHERE version = $13 - 1`,
		state, m.Declared, m.Since, m.Era, m.ReportedBy, m.Reason, string(encoded), m.total, m.IncidentID, m.AcceptedAt,
		m.AcceptedBy, m.AcceptReason, m.Version, m.seenEra)
	if err != nil {
		return fmt.Errorf("write rollback mode: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fmt.Errorf("write rollback mode: version %d is not the one before", m.Version)
	}
	return nil
}

// add takes evidence into the row. It reports whether it was new.
func (m *Mode) add(e Evidence, now time.Time) bool {
	kind := names.Of(e.Kind)
	i := slices.IndexFunc(m.evidence, func(s seen) bool { return s.Kind == kind && s.Subject == e.Subject })
	next := seen{
		Kind: kind, Subject: e.Subject, Detail: e.Detail, Remembered: e.Remembered, Known: e.Known, Era: e.Era, First: now,
		Last: now, Count: 1,
	}
	if i >= 0 {
		next.First, next.Count = m.evidence[i].First, m.evidence[i].Count+1
		m.evidence = slices.Delete(m.evidence, i, i+1)
	} else {
		m.total++
	}
	m.evidence = slices.Insert(m.evidence, 0, next)
	m.evidence = m.evidence[:min(len(m.evidence), mostEvidence)]
	return i < 0
}

// Proto returns the mode as answers show it.
func (m *Mode) Proto() *recoveryv1.RollbackMode {
	out := &recoveryv1.RollbackMode{
		Active: m.Active, Declared: m.Declared, Since: stamp(m.Since), Era: m.Era, EvidenceTotal: m.total,
		IncidentId: m.IncidentID,
		ReportedBy: m.ReportedBy, Reason: m.Reason, AcceptedAt: stamp(m.AcceptedAt), AcceptedBy: m.AcceptedBy,
		AcceptReason: m.AcceptReason,
		Version:      m.Version,
	}
	for _, s := range m.evidence {
		// A kind that this build does not know is shown as unspecified, with what was said of it.
		kind, _ := names.Parse[recoveryv1.RollbackEvidenceKind](s.Kind) //nolint:errcheck // see above
		out.Evidence = append(out.Evidence, &recoveryv1.RollbackEvidence{
			Kind: kind, Subject: s.Subject, Detail: s.Detail, Remembered: s.Remembered, Known: s.Known, Era: s.Era,
			FirstSeenAt: timestamppb.New(s.First), LastSeenAt: timestamppb.New(s.Last), Count: s.Count,
		})
	}
	return out
}

func stamp(at *time.Time) *timestamppb.Timestamp {
	if at == nil {
		return nil
	}
	return timestamppb.New(*at)
}
