package findings

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// firstSweep runs the sweep of a lifecycle that has just started: it reads all live rows.
func (b *bed) firstSweep() []finding.Seen {
	b.t.Helper()
	deps := b.sweeper.deps
	deps.Metrics = prometheus.NewRegistry()
	fresh, err := New(deps, Config{})
	if err != nil {
		b.t.Fatal(err)
	}
	seen, err := fresh.guard.Scan(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return seen
}

func (b *bed) evidence() string {
	b.t.Helper()
	return b.text(`SELECT coalesce(jsonb_agg(e)::text, '') FROM lifecycle.row_evidence e`)
}

// Adding a column writes no row: rows that were sealed before fit, and the next operation writes them like any other. A
// write by hand to the new column while the trigger is off is detected.
func TestAColumnThatIsAddedBreaksNoSeal(t *testing.T) {
	b := newBed(t, Config{})
	id, other := b.live("one"), b.live("two")
	b.numbered()
	owner := b.db.OwnerPool()
	for _, sql := range []string{
		`ALTER TABLE lifecycle.workspace ADD COLUMN added_number bigint NOT NULL DEFAULT 7`,
		`ALTER TABLE lifecycle.workspace ADD COLUMN added_at timestamptz DEFAULT '2026-01-01T00:00Z',
			ADD COLUMN added_text text`,
		`ALTER TABLE lifecycle.saga_run ADD COLUMN added_list text[] NOT NULL DEFAULT '{a,b}'`,
		`ALTER TABLE lifecycle.allocation ADD COLUMN added_json jsonb NOT NULL DEFAULT '{"a": 1}'`,
	} {
		if _, err := owner.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if seen := b.firstSweep(); len(seen) != 0 {
		t.Errorf("rows that were sealed before do not fit: %v", seen)
	}
	if err := b.operate(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, active)
	if left := b.evidence(); left != "" {
		t.Errorf("an operation on rows of the former shape leaves %s", left)
	}
	// A rewritten table keeps nothing of the values with which its columns were added but their defaults.
	if _, err := b.hand(superuser).Exec(t.Context(), `VACUUM FULL lifecycle.workspace`); err != nil {
		t.Fatal(err)
	}
	if seen := b.firstSweep(); len(seen) != 0 {
		t.Errorf("rows that were sealed before do not fit after VACUUM FULL: %v", seen)
	}
	b.byHand(`ALTER TABLE lifecycle.workspace DISABLE TRIGGER seal_row`,
		`UPDATE lifecycle.workspace SET added_number = 8 WHERE id = '`+other+`'`,
		`ALTER TABLE lifecycle.workspace ENABLE ALWAYS TRIGGER seal_row`)
	if seen := b.firstSweep(); len(seen) != 1 || seen[0].SubjectID != other {
		t.Errorf("the new column of a row of the former shape was changed: %v", seen)
	}
}

// Dropping a column changes every seal: the migration that drops it declares that, and takes no lock for it that others
// wait for.
func TestAColumnThatGoes(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	owner := b.db.OwnerPool()
	if _, err := owner.Exec(t.Context(), `ALTER TABLE lifecycle.allocation DROP COLUMN last_error`); err != nil {
		t.Fatal(err)
	}
	if seen := b.firstSweep(); len(seen) != 1 {
		t.Errorf("a column has gone: %v", seen)
	}
	if _, err := owner.Exec(t.Context(), `CALL lifecycle.seal_again()`); err != nil {
		t.Fatal(err)
	}
	if seen, left := b.firstSweep(), b.evidence(); len(seen) != 0 || left != "" {
		t.Errorf("after its rows were sealed again: %v, %s", seen, left)
	}
	b.as(pg.RoleOwner, `UPDATE lifecycle.allocation SET gpus = 5 WHERE workspace_id = $1`, id)
	if seen := b.firstSweep(); len(seen) != 1 {
		t.Errorf("a change by hand after that: %v", seen)
	}
}

// A database of an earlier build migrates in place: its seals, its evidence and what the agents reported stay.
func TestSealsOfAnEarlierBuildFit(t *testing.T) {
	b := newBed(t, Config{})
	id, other := b.live("one"), b.live("two")
	b.numbered()
	file, err := fs.ReadFile(migrations.FS, "00099_one_drift_guard.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(file), "-- +goose Down")
	owner := b.db.OwnerPool()
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := owner.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec(down)
	// The writes of that build name the seal; those by hand do not.
	exec(`UPDATE lifecycle.workspace SET seal = NULL, op_seq = op_seq + 1 WHERE id = $1`, id)
	exec(`INSERT INTO lifecycle.workspace (seal, id, tenant_id, name, state)
		SELECT 1, gen_random_uuid(), tenant_id, 'old', 'failed'
		FROM lifecycle.workspace WHERE id = $1`, id)
	exec(`UPDATE lifecycle.workspace SET last_error = 'mine' WHERE id = $1`, other)
	exec(`INSERT INTO lifecycle.event_cursor (name, pos) VALUES ('row-witness', 3) ON CONFLICT (name) DO UPDATE
		SET pos = 3`)
	exec(up)
	if seen := b.firstSweep(); len(seen) != 1 || seen[0].SubjectID != other || len(seen[0].Evidence) != 1 {
		t.Errorf("after the migration: %v", seen)
	}
	if pos := b.text(`SELECT coalesce(max(pos), -1)::text FROM lifecycle.event_cursor WHERE name = $1`,
		detect.ReportsConsumer); pos != "3" {
		t.Errorf("the reports are read from %s", pos)
	}
	if err := b.operate(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, active)
	if seen := b.firstSweep(); len(seen) != 1 || len(seen[0].Evidence) != 1 {
		t.Errorf("an operation of this build leaves %v", seen)
	}
}
