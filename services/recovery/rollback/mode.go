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
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

// mostEvidence bounds the evidence that the row keeps, which is the newest of each kind and subject. What was counted
// in this mode is in recovery.rollback_seen.
const mostEvidence = 32

// evidenceEvery is how often evidence of the same numbers is counted.
const evidenceEvery = time.Minute

// Evidence is one sign that the database's history is not that of a node's or the launch log's records: a number or a
// certificate that the database does not have, or a launch log that is older than the database.
type Evidence struct {
	Kind       recoveryv1.RollbackEvidenceKind
	Subject    string // a node, or the subject that the launch log was read for
	Detail     string
	Remembered int64 // the number in the node's or the log's record
	Known      int64 // the highest number that the database has
	Era        int64 // the era of the number that the lost history gave
}

// seen is evidence as it is stored in the row.
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

// counted is how often evidence of one kind and subject was reported in the mode.
type counted struct {
	Kind    string    `db:"kind"`
	Subject string    `db:"subject"`
	FirstAt time.Time `db:"first_at"`
	Count   int64     `db:"count"`
}

// Mode is the row.
type Mode struct {
	Active       bool       `db:"active" expr:"@.state = 'active'"`
	Declared     bool       `db:"declared"`
	Since        *time.Time `db:"since"`
	Era          int64      `db:"era"`
	ReportedBy   string     `db:"reported_by"`
	Reason       string     `db:"reason"`
	IncidentID   string     `db:"incident_id"`
	AcceptedAt   *time.Time `db:"accepted_at"`
	AcceptedBy   string     `db:"accepted_by"`
	AcceptReason string     `db:"accept_reason"`
	Version      int64      `db:"version"`

	evidence []seen `db:"-"` // newest first
	total    int64  `db:"-"`
	seenEra  int64  `db:"-"`
}

// modeRow is the row as it is read.
type modeRow struct {
	Mode
	Evidence      []byte `db:"evidence"`
	EvidenceTotal int64  `db:"evidence_total"`
	SeenEra       int64  `db:"seen_era"`
}

var (
	readMode = pg.Define(pg.RoleRecovery, "rollback.read_mode",
		`SELECT `+pg.Columns[modeRow]("r")+` FROM recovery.rollback r`)
	lockMode = pg.Define(pg.RoleRecovery, "rollback.lock_mode",
		`SELECT `+pg.Columns[modeRow]("r")+` FROM recovery.rollback r FOR UPDATE`)
	isActive = pg.Define(pg.RoleRecovery, "rollback.is_active", `SELECT mesh.rolled_back()`)
	saveMode = pg.Define(pg.RoleRecovery, "rollback.save_mode", `
		UPDATE recovery.rollback SET state = $1, declared = $2, since = $3, era = $4,
			reported_by = $5, reason = $6, evidence = $7::jsonb, evidence_total = $8, incident_id = $9, accepted_at = $10,
			accepted_by = $11, accept_reason = $12, version = $13, seen_era = $14 WHERE version = $13 - 1`)

	// countEvidence leaves out, and does not return, what was counted with the same numbers within the last $9 seconds.
	countEvidence = pg.Define(pg.RoleRecovery, "rollback.count_evidence", `
		INSERT INTO recovery.rollback_seen AS e (kind, subject, since, first_at, count, last_at, remembered, known)
		SELECT x.kind, x.subject, $1::timestamptz, x.first_at, x.count, $2::timestamptz, x.remembered, x.known
		FROM unnest($3::text[], $4::text[], $5::timestamptz[], $6::bigint[], $7::bigint[], $8::bigint[])
			AS x (kind, subject, first_at, count, remembered, known)
		WHERE NOT EXISTS (SELECT 1 FROM recovery.rollback_seen s
			WHERE s.kind = x.kind AND s.subject = x.subject AND s.since = $1
			AND s.last_at > $2::timestamptz - make_interval(secs => $9) AND s.remembered = x.remembered AND s.known = x.known)
		ON CONFLICT (kind, subject) DO UPDATE SET since = EXCLUDED.since,
			first_at = CASE WHEN e.since = EXCLUDED.since THEN e.first_at ELSE EXCLUDED.first_at END,
			count = CASE WHEN e.since = EXCLUDED.since THEN e.count + 1 ELSE EXCLUDED.count END,
			last_at = EXCLUDED.last_at, remembered = EXCLUDED.remembered, known = EXCLUDED.known
		RETURNING `+pg.Columns[counted]("e"))
	forgetEvidence = pg.Define(pg.RoleRecovery, "rollback.forget_evidence", `DELETE FROM recovery.rollback_seen`)
)

func read(ctx context.Context, q pg.Querier, s *pg.Statement) (*Mode, error) {
	r, err := pg.One[modeRow](ctx, q, s)
	if err != nil {
		return nil, fmt.Errorf("read rollback mode: %w", err)
	}
	m := &r.Mode
	if err := json.Unmarshal(r.Evidence, &m.evidence); err != nil {
		return nil, fmt.Errorf("read evidence of rollback mode: %w", err)
	}
	m.total, m.seenEra = r.EvidenceTotal, r.SeenEra
	return m, nil
}

// Read returns the present mode.
func Read(ctx context.Context, q pg.Querier) (*Mode, error) {
	return read(ctx, q, readMode)
}

// lock locks the row and returns the mode.
func lock(ctx context.Context, tx pgx.Tx) (*Mode, error) {
	return read(ctx, tx, lockMode)
}

// Active reports whether the mode is active, as every service reads it.
func Active(ctx context.Context, q pg.Querier) (bool, error) {
	active, err := pg.Value[bool](ctx, q, isActive)
	if err != nil {
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
	tag, err := pg.Exec(ctx, tx, saveMode, state, m.Declared, m.Since, m.Era, m.ReportedBy, m.Reason, string(encoded),
		m.total, m.IncidentID, m.AcceptedAt, m.AcceptedBy, m.AcceptReason, m.Version, m.seenEra)
	if err != nil {
		return fmt.Errorf("write rollback mode: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fmt.Errorf("write rollback mode: version %d is not the one before", m.Version)
	}
	return nil
}

// add adds evidence to the row, and reports whether it changed anything. Evidence of a kind and subject that this mode
// has counted already, whether the row still keeps it or not, is counted in its own count and not in the total. With
// the same numbers it is counted once in evidenceEvery.
func (m *Mode) add(ctx context.Context, tx pgx.Tx, list []Evidence, now time.Time) (bool, error) {
	var kinds, subjects []string
	var firsts []time.Time
	var counts, remembered, known []int64
	rowsOf := m.rowsOf(list, now)
	for _, s := range rowsOf {
		kinds, subjects, firsts = append(kinds, s.Kind), append(subjects, s.Subject), append(firsts, s.First)
		counts, remembered, known = append(counts, s.Count), append(remembered, s.Remembered), append(known, s.Known)
	}
	rows, err := pg.All[counted](ctx, tx, countEvidence, m.Since, now, kinds, subjects, firsts, counts, remembered, known,
		evidenceEvery.Seconds())
	if err != nil {
		return false, fmt.Errorf("count evidence of rollback mode: %w", err)
	}
	of := make(map[about]counted, len(rows))
	for _, c := range rows {
		of[about{c.Kind, c.Subject}] = c
	}
	for _, s := range rowsOf {
		c, changed := of[s.about()]
		if !changed {
			continue
		}
		s.First, s.Count = c.FirstAt, c.Count
		if s.Count == 1 {
			m.total++
		}
		m.evidence = slices.Insert(slices.DeleteFunc(m.evidence, s.same), 0, s)
	}
	m.trim()
	return len(rows) > 0, nil
}

// rowsOf returns evidence as the row keeps it, the last of each kind and subject.
func (m *Mode) rowsOf(list []Evidence, now time.Time) []seen {
	out := make([]seen, 0, len(list))
	for _, e := range list {
		s := seen{
			Kind: names.Of(e.Kind), Subject: e.Subject, Detail: e.Detail, Remembered: e.Remembered, Known: e.Known, Era: e.Era,
			First: now, Last: now, Count: 1,
		}
		if i := slices.IndexFunc(m.evidence, s.same); i >= 0 {
			// A replica of the build before counts in the row alone.
			s.First, s.Count = m.evidence[i].First, m.evidence[i].Count+1
		}
		out = append(slices.DeleteFunc(out, s.same), s)
	}
	return out
}

// about is what evidence is counted by.
type about struct{ kind, subject string }

func (s seen) about() about { return about{s.Kind, s.Subject} }

func (s seen) same(other seen) bool { return s.about() == other.about() }

// trim drops the oldest evidence of which the row has too much. The last of a kind stays, since the summary names the
// kinds.
func (m *Mode) trim() {
	for i := len(m.evidence) - 1; i >= 0 && len(m.evidence) > mostEvidence; i-- {
		kind := m.evidence[i].Kind
		if slices.ContainsFunc(m.evidence[:i], func(s seen) bool { return s.Kind == kind }) {
			m.evidence = slices.Delete(m.evidence, i, i+1)
		}
	}
}

// Proto returns the mode as responses carry it.
func (m *Mode) Proto() *recoveryv1.RollbackMode {
	out := &recoveryv1.RollbackMode{
		Active: m.Active, Declared: m.Declared, Since: incident.Stamp(m.Since), Era: m.Era, EvidenceTotal: m.total,
		IncidentId: m.IncidentID,
		ReportedBy: m.ReportedBy, Reason: m.Reason, AcceptedAt: incident.Stamp(m.AcceptedAt), AcceptedBy: m.AcceptedBy,
		AcceptReason: m.AcceptReason,
		Version:      m.Version,
	}
	for _, s := range m.evidence {
		// A kind that this build does not know is shown as unspecified, with its other fields.
		kind := aside.Value[recoveryv1.RollbackEvidenceKind]("rollback", s.Subject, s.Kind)
		out.Evidence = append(out.Evidence, &recoveryv1.RollbackEvidence{
			Kind: kind, Subject: s.Subject, Detail: s.Detail, Remembered: s.Remembered, Known: s.Known, Era: s.Era,
			FirstSeenAt: timestamppb.New(s.First), LastSeenAt: timestamppb.New(s.Last), Count: s.Count,
		})
	}
	return out
}
