package guard

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// evidence is the record of one write that the product did not make.
type evidence struct {
	ID          int64     `db:"evidence_id"`
	At          time.Time `db:"at"`
	Op          string    `db:"op"`
	RowType     string    `db:"row_type"`
	RowID       string    `db:"row_id" expr:"@.row_id::text"`
	Before      []byte    `db:"before"`
	After       []byte    `db:"after"`
	User        string    `db:"db_user"`
	Application string    `db:"application_name"`
	Client      string    `db:"client"`
	Backend     int32     `db:"backend"`
	XID         string    `db:"xid" expr:"@.xid::text"`
}

// evidencePage is how many images of rows are read, and in memory, at a time.
const evidencePage = 500

// pageOfEvidence is the end of a statement that reads a page of evidence, which begins after $1. The index of what is
// settled is asked for each piece.
const pageOfEvidence = ` AND e.evidence_id > $1
	AND NOT EXISTS (SELECT 1 FROM lifecycle.row_evidence_settled s WHERE s.evidence_id = e.evidence_id)
	ORDER BY e.evidence_id LIMIT $2`

// openEvidence reads what the triggers list as not settled.
var openEvidence = pg.Define(pg.RoleLifecycle, "guard.open_evidence", `
	SELECT `+pg.Columns[evidence]("e")+` FROM lifecycle.row_evidence_open o
	JOIN lifecycle.row_evidence e ON e.evidence_id = o.evidence_id
	WHERE o.evidence_id > $1`+pageOfEvidence)

// unsettledEvidence compares all evidence with all that is settled: it finds what was left while the trigger that lists
// it did not fire.
var unsettledEvidence = pg.Define(pg.RoleLifecycle, "guard.unsettled_evidence", `
	SELECT `+pg.Columns[evidence]("e")+` FROM lifecycle.row_evidence e WHERE true`+pageOfEvidence)

var evidenceOfRow = pg.Define(pg.RoleLifecycle, "guard.evidence_of_row", `
	SELECT `+pg.Columns[evidence]("e")+` FROM lifecycle.row_evidence e
	WHERE e.row_type = $3 AND e.row_id = $4`+pageOfEvidence)

// readTraces reads evidence by a statement, in pages, and returns it by row, in the order in which the rows were first
// touched.
func readTraces(ctx context.Context, q pg.Querier, statement *pg.Statement, args ...any) ([]*trace, error) {
	var out []*trace
	byRow := map[rowKey]*trace{}
	for after, more := int64(0), true; more; {
		page, err := pg.All[evidence](ctx, q, statement, append([]any{after, evidencePage}, args...)...)
		if err != nil {
			return nil, fmt.Errorf("read evidence: %w", err)
		}
		for _, e := range page {
			row := rowKey{e.RowType, e.RowID}
			tr := byRow[row]
			if tr == nil {
				tr = &trace{rowType: row.rowType, id: row.id, fields: map[string]change{}}
				byRow[row] = tr
				out = append(out, tr)
			}
			if err := tr.add(e); err != nil {
				return nil, err
			}
			after = e.ID
		}
		more = len(page) == evidencePage
	}
	return out, nil
}

var unlistedEvidence = pg.Define(pg.RoleLifecycle, "guard.unlisted_evidence", `
	SELECT EXISTS (SELECT 1 FROM lifecycle.row_evidence e
		WHERE NOT EXISTS (SELECT 1 FROM lifecycle.row_evidence_settled s WHERE s.evidence_id = e.evidence_id)
			AND NOT EXISTS (SELECT 1 FROM lifecycle.row_evidence_open o WHERE o.evidence_id = e.evidence_id))`)

// unsettled reads the evidence that is not settled. It compares all evidence with all that is settled if all is set,
// and as long as there is some that is not listed: triggers alone list evidence.
func (g *round) unsettled(ctx context.Context, all bool) ([]*trace, error) {
	if !all && !g.unlisted {
		return readTraces(ctx, g.db, openEvidence)
	}
	unlisted, err := pg.Value[bool](ctx, g.db, unlistedEvidence)
	if err != nil {
		return nil, fmt.Errorf("look for evidence that is not listed: %w", err)
	}
	traces, err := readTraces(ctx, g.db, unsettledEvidence)
	if err == nil {
		g.unlisted = unlisted
	}
	return traces, err
}

// decode parses an image; numbers stay as they are written, because epochs and fences may be large.
func decode(raw []byte) (map[string]any, error) {
	if raw == nil {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var out map[string]any
	if err := d.Decode(&out); err != nil {
		return nil, fmt.Errorf("read image of row: %w", err)
	}
	return out, nil
}

// same compares two values of images. Times are the same if they denote the same instant, in whichever zone a session
// wrote them.
func same(a, b any) bool {
	if reflect.DeepEqual(a, b) {
		return true
	}
	x, isText := a.(string)
	y, isTextToo := b.(string)
	if !isText || !isTextToo {
		return false
	}
	t, err := time.Parse(time.RFC3339Nano, x)
	if err != nil {
		return false
	}
	u, err := time.Parse(time.RFC3339Nano, y)
	return err == nil && t.Equal(u)
}
