package finding

import (
	"context"
	"encoding/json"
	"fmt"
	"math/bits"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// Compare orders keys.
func Compare(a, b Key) int {
	return slices.Compare([]string{a.Kind, a.SubjectType, a.SubjectID}, []string{b.Kind, b.SubjectType, b.SubjectID})
}

// KeyColumns are the columns of keys, as arguments of a statement.
type KeyColumns struct{ Kinds, Types, Subjects []string }

// ColumnsOf returns the columns of keys.
func ColumnsOf(keys []Key) KeyColumns {
	var c KeyColumns
	for _, k := range keys {
		c.Kinds, c.Types = append(c.Kinds, k.Kind), append(c.Types, k.SubjectType)
		c.Subjects = append(c.Subjects, k.SubjectID)
	}
	return c
}

var openAmong = pg.Define(pg.RoleLifecycle, "finding.open_among",
	`SELECT `+Columns+` FROM unnest($1::text[], $2::text[], $3::text[]) AS x (kind, subject_type, subject_id)
		JOIN lifecycle.finding f ON f.kind = x.kind AND f.subject_type = x.subject_type AND f.subject_id = x.subject_id
		WHERE f.resolved_at IS NULL ORDER BY f.finding_id`)

// Standing are the findings that are open of some keys.
type Standing struct {
	stored []Stored
	rows   map[Key]Row
	keys   map[Key]bool // those that have an open finding, also one with a value that this build does not know
}

// QueueStanding adds the statement that reads the open findings of keys to a batch. The caller has taken the turn.
func QueueStanding(b *pg.Batch, keys []Key) *Standing {
	s := &Standing{}
	c := ColumnsOf(keys)
	b.Queue(openAmong, c.Kinds, c.Types, c.Subjects).Query(func(rows pgx.Rows) error {
		var err error
		s.stored, err = pgx.CollectRows(rows, pgx.RowToStructByName[Stored])
		return err
	})
	return s
}

// Parse parses what the batch has read. Findings with a value that this build does not know are set aside.
func (s *Standing) Parse(ctx context.Context) error {
	s.rows, s.keys = map[Key]Row{}, map[Key]bool{}
	for _, d := range s.stored {
		s.keys[Key{Kind: d.Kind, SubjectType: d.SubjectType, SubjectID: d.SubjectID}] = true
	}
	rows, err := Parse(ctx, s.stored)
	for _, r := range rows {
		s.rows[r.Key()] = r
	}
	return err
}

// Unseen returns the open findings of a source whose keys are not seen, by their ids.
func (s *Standing) Unseen(source string, seen func(Key) bool) []string {
	var out []string
	for k, r := range s.rows {
		if r.Source == source && !seen(k) {
			out = append(out, r.ID)
		}
	}
	slices.Sort(out)
	return out
}

// Sight is a contradiction with how many scans of its source have seen it without a gap.
type Sight struct {
	Seen

	Scans int64
}

// Opened are the findings that Open made, and whether it appended events.
type Opened struct {
	New   []Seen
	Wrote bool
}

// Open inserts the findings of sights that have none, and updates those that the source has. It appends an event of a
// finding that is new, of one whose evidence changed, and otherwise after the 2nd, 4th, 8th scan and so on: a finding
// that stays for days costs few events, and its row is not written in between. A finding of another source stays as it
// is: that source hands it over once it no longer sees it. So does one with a value that this build does not know.
func (s *Standing) Open(ctx context.Context, tx pgx.Tx, source string, sights []Sight) (Opened, error) {
	var out Opened
	var evs []events.Event
	var batch pg.Batch
	written := 0
	var nodes []string
	for _, sight := range sights {
		if sight.Cordon && sight.NodeID != "" && !s.keys[sight.Key()] {
			nodes = append(nodes, sight.NodeID)
		}
	}
	if err := gate.LockForCordons(ctx, tx, nodes...); err != nil {
		return out, err
	}
	for _, sight := range sights {
		have, parsed := s.rows[sight.Key()]
		switch {
		case !s.keys[sight.Key()]:
			id := ids.New()
			cordoned, err := cordonFor(ctx, tx, id, sight.Seen)
			if err != nil {
				return out, err
			}
			queueInsert(&batch, id, source, cordoned, sight).Query(func(rows pgx.Rows) error {
				made, err := collect(rows)
				if err != nil {
					return fmt.Errorf("insert finding: %w", err)
				}
				evs, err = appendEvents(evs, made, audit.Event(ctx, decided("finding.open", made)))
				return err
			})
			out.New = append(out.New, sight.Seen)
			written++
		case parsed && have.Source == source:
			raise, err := eventDue(have, sight)
			if err != nil {
				return out, err
			}
			if !raise && slices.Equal(have.Evidence, sight.Evidence) {
				continue
			}
			queueUpdate(&batch, have.ID, raise, sight).Query(func(rows pgx.Rows) error {
				now, err := collect(rows)
				if err != nil {
					return fmt.Errorf("update finding: %w", err)
				}
				if raise {
					evs, err = appendEvents(evs, now)
				}
				return err
			})
			written++
		}
	}
	if written == 0 {
		return out, nil
	}
	if err := batch.Send(ctx, tx); err != nil {
		return out, fmt.Errorf("write findings: %w", err)
	}
	if len(evs) == 0 {
		return out, nil
	}
	out.Wrote = true
	if _, err := events.Append(ctx, tx, evs...); err != nil {
		return out, fmt.Errorf("report findings: %w", err)
	}
	return out, nil
}

// OpenOne opens the finding of one sight.
func OpenOne(ctx context.Context, tx pgx.Tx, source string, s Seen) error {
	var batch pg.Batch
	standing := QueueStanding(&batch, []Key{s.Key()})
	if err := batch.Send(ctx, tx); err != nil {
		return fmt.Errorf("read finding: %w", err)
	}
	if err := standing.Parse(ctx); err != nil {
		return err
	}
	_, err := standing.Open(ctx, tx, source, []Sight{{Seen: s, Scans: 1}})
	return err
}

// cordonFor cordons the node of a new finding if the finding asks for it, and reports whether the node is cordoned.
func cordonFor(ctx context.Context, tx pgx.Tx, id string, s Seen) (bool, error) {
	if !s.Cordon || s.NodeID == "" {
		return false, nil
	}
	by, err := gate.CordonUnlessIs(ctx, tx, s.NodeID, s.Summary, CordonBy(id))
	return by != "", err
}

var insertFinding = pg.Define(pg.RoleLifecycle, "finding.insert_finding", `
		INSERT INTO lifecycle.finding AS f (finding_id, kind, severity, subject_type, subject_id, source, tenant_id,
			workspace_id, node_id, allocation_id, summary, next_action, before, after, cordoned, evidence, count)
		VALUES ($1, $2, $3, $4, $5, $6, nullif($7, '')::uuid, nullif($8, '')::uuid, nullif($9, '')::uuid,
			nullif($10, '')::uuid, $11, $12, $13, $14, $15, $16, $17)
		RETURNING `+Columns)

func queueInsert(b *pg.Batch, id, source string, cordoned bool, s Sight) *pgx.QueuedQuery {
	return b.Queue(insertFinding, id, names.Of(s.Kind), names.Of(s.Severity), s.SubjectType, s.SubjectID, source,
		s.TenantID, s.WorkspaceID, s.NodeID, s.AllocationID, s.Summary, s.NextAction, orEmpty(s.Before), orEmpty(s.After),
		cordoned, append([]int64{}, s.Evidence...), s.Scans)
}

var updateFinding = pg.Define(pg.RoleLifecycle, "finding.update_finding", `
		UPDATE lifecycle.finding f
			SET severity = $2, summary = $3, next_action = $4, before = $5, after = $6, version = f.version + $7,
			evidence = $8, count = greatest(f.count, $9), last_seen_at = mesh.clock()
		WHERE f.finding_id = $1 RETURNING `+Columns)

func queueUpdate(b *pg.Batch, id string, raise bool, s Sight) *pgx.QueuedQuery {
	raised := int64(0)
	if raise {
		raised = 1
	}
	return b.Queue(updateFinding, id, names.Of(s.Severity), s.Summary, s.NextAction, orEmpty(s.Before), orEmpty(s.After),
		raised, append([]int64{}, s.Evidence...), s.Scans)
}

// collect reads the finding that a statement of a batch returned.
func collect(rows pgx.Rows) (Row, error) {
	d, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Stored])
	if err != nil {
		return Row{}, err
	}
	return d.Finding()
}

// appendEvents adds others and the event of a finding to evs.
func appendEvents(evs []events.Event, r Row, others ...events.Event) ([]events.Event, error) {
	e, err := r.event()
	if err != nil {
		return nil, err
	}
	return append(append(evs, others...), e), nil
}

func orEmpty(m map[string]any) map[string]any {
	if m == nil {
		return map[string]any{}
	}
	return m
}

// eventDue reports whether an event is due of a finding that is seen again.
func eventDue(have Row, s Sight) (bool, error) {
	same, err := sameEvidence(have.Seen, s.Seen)
	return !same || bits.Len64(uint64(s.Scans)) > bits.Len64(uint64(have.Count)), err // they count up from 1
}

// sameEvidence compares the parts of two findings that an event shows, as JSON.
func sameEvidence(have, s Seen) (bool, error) {
	if have.Severity != s.Severity || have.Summary != s.Summary || have.NextAction != s.NextAction {
		return false, nil
	}
	a, err := spell(have)
	if err != nil {
		return false, err
	}
	b, err := spell(s)
	return a == b, err
}

// spell returns what a finding shows of before and after, as JSON.
func spell(s Seen) (string, error) {
	raw, err := json.Marshal([]any{orEmpty(s.Before), orEmpty(s.After)})
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
