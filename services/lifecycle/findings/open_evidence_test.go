package findings

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAScanReadsOpenEvidenceAlone checks that a scan does not read evidence that was settled since the last cut.
func TestAScanReadsOpenEvidenceAlone(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.byHand(`UPDATE lifecycle.workspace SET retry_used = 1 WHERE id = '` + id + `'`)
	// Evidence is added by triggers: one that stands for the changes of thousands of rows.
	b.byHand(`CREATE TEMP TABLE many (i int)`,
		`CREATE FUNCTION pg_temp.leaves() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			INSERT INTO lifecycle.row_evidence (op, row_type, row_id, after) VALUES ('update', 'run', gen_random_uuid(), '{}');
			RETURN NULL; END $$`,
		`CREATE TRIGGER leaves AFTER INSERT ON many FOR EACH ROW EXECUTE FUNCTION pg_temp.leaves()`,
		`INSERT INTO many SELECT generate_series(1, 20004)`,
		`INSERT INTO lifecycle.row_evidence_settled (evidence_id, how)
			SELECT e.evidence_id, 'acknowledged' FROM lifecycle.row_evidence e WHERE e.row_type = 'run'
			ORDER BY e.evidence_id LIMIT 20000`,
		`ANALYZE lifecycle.row_evidence, lifecycle.row_evidence_settled, lifecycle.row_evidence_open`)
	if n := b.text(`SELECT count(*)::text FROM lifecycle.row_evidence_open`); n != "5" {
		t.Fatalf("%s pieces of evidence are open, want 5", n)
	}
	all := pg.Statements()
	at := slices.IndexFunc(all, func(s *pg.Statement) bool { return s.Name() == "guard.open_evidence" })
	plan := b.plan(all[at].SQL(), int64(0), 500)
	if n := passes(plan); n > 100 {
		t.Errorf("%d rows are read for 5 that are open:\n%s", n, plan)
	}
	if seen, err := b.sweeper.guard.Scan(t.Context()); err != nil || len(seen) != 5 {
		t.Errorf("the first scan sees %d rows, %v", len(seen), err)
	}
	if seen, err := b.sweeper.guard.Scan(t.Context()); err != nil || len(seen) != 5 {
		t.Errorf("the second scan sees %d rows, %v", len(seen), err)
	}
}

// TestEvidenceThatWasNotListed: evidence that was left while the trigger that lists it was off is found, and stays a
// finding until it is acknowledged.
func TestEvidenceThatWasNotListed(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.sweep()
	b.byHand(`ALTER TABLE lifecycle.row_evidence DISABLE TRIGGER evidence_opens`,
		`UPDATE lifecycle.workspace SET retry_window_start = '2020-01-01T12:00Z' WHERE id = '`+id+`'`,
		`ALTER TABLE lifecycle.row_evidence ENABLE ALWAYS TRIGGER evidence_opens`)
	for range 3 {
		b.sweep()
	}
	f := wantOnly(t, b.open(), "row_changed_outside workspace "+id)[0]
	b.acknowledge(f)
	b.sweep()
	wantOnly(t, b.open())
}

// TestOpenEvidenceIsWrittenByTriggersAlone: neither the role of the service nor the owner hides evidence by taking it
// from the list.
func TestOpenEvidenceIsWrittenByTriggersAlone(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.byHand(`UPDATE lifecycle.workspace SET retry_used = 1 WHERE id = '` + id + `'`)
	for _, role := range []string{pg.RoleOwner, pg.RoleLifecycle, superuser} {
		for _, sql := range []string{
			`INSERT INTO lifecycle.row_evidence_open (evidence_id) VALUES (0)`,
			`UPDATE lifecycle.row_evidence_open SET evidence_id = 0`, `DELETE FROM lifecycle.row_evidence_open`,
			`TRUNCATE lifecycle.row_evidence_open`,
		} {
			if _, err := b.hand(role).Exec(t.Context(), sql); !testkit.IsPrivilege(err) {
				t.Errorf("%s may: %s: %v", role, sql, err)
			}
		}
	}
	b.sweep()
	wantOnly(t, b.open(), "row_changed_outside workspace "+id)
}

// TestAFindingListsTheFirstChangesAndTheLast: of many changes of a row by hand the first and the last ones are shown,
// over pages of evidence.
func TestAFindingListsTheFirstChangesAndTheLast(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.byHand(`DO $$ BEGIN FOR i IN 1..1001 LOOP
		UPDATE lifecycle.workspace SET retry_used = i, last_error = 'change ' || i WHERE id = '` + id + `';
		END LOOP; END $$`)
	b.sweep()
	f := wantOnly(t, b.open(), "row_changed_outside workspace "+id)[0]
	changes, _ := f.After["changes"].([]any)
	if len(changes) != 6 || changes[1].(map[string]any)["left_out"] != 996.0 || len(f.Evidence) != 1001 {
		t.Errorf("%d pieces of evidence, told as %v", len(f.Evidence), changes)
	}
	if f.Before["last_error"] != "" || f.After["last_error"] != "change 1001" || f.TenantID == "" ||
		!strings.Contains(f.Summary, "last_error, retry_used") {
		t.Errorf("got %+v", f)
	}
}
