package findings

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/guard"
)

// edit is a change of a row by hand, and the statement that takes it back.
type edit struct {
	class, table   string // how the table of docs/findings.md names it, and the table it is done to
	subject        string // the finding's
	do, undo       string // undo is empty: what was left behind is deleted and inserted as it was
	column         string // what the finding must name
	namesTheSeal   string // do, as a statement that names the seal
	restoreFromRow bool   // the row is inserted again as the evidence has it
}

// way is a way in which a person makes an edit.
type way struct {
	name          string
	roles         []string
	before, after []string // statements around the edit, with %s for the table
	named         bool     // the statement names the seal
}

var ways = []way{
	{name: "plainly", roles: []string{pg.RoleLifecycle, pg.RoleOwner, superuser}},
	{name: "naming the seal", roles: []string{pg.RoleLifecycle, pg.RoleOwner, superuser}, named: true},
	{name: "as a replica", roles: []string{superuser}, before: []string{`SET LOCAL session_replication_role = 'replica'`}},
	{
		name: "with the trigger off", roles: []string{pg.RoleOwner, superuser},
		before: []string{`ALTER TABLE lifecycle.%s DISABLE TRIGGER USER`},
		after: []string{
			`ALTER TABLE lifecycle.%s ENABLE TRIGGER USER`,
			`ALTER TABLE lifecycle.%[1]s ENABLE ALWAYS TRIGGER %[2]s`,
		},
	},
	{
		name: "as the product's session", roles: []string{pg.RoleLifecycle, pg.RoleOwner, superuser},
		before: []string{`SET LOCAL gpuaas.writer = 'product'`},
	},
}

const (
	seenWhole = "before, after, who"
	seenAfter = "after"
	notSeen   = "-"
)

// edits are one of each class, on an active workspace, its ended run and its allocation.
func edits(id, run, allocation, ghost string) []edit {
	set := func(class, table, key, value, subject, column, expr, back string) edit {
		to := ` WHERE ` + key + ` = '` + value + `'`
		do := `UPDATE lifecycle.` + table + ` SET ` + column + ` = ` + expr + to
		return edit{
			class: class, table: table, subject: subject, column: column, do: do,
			undo:         `UPDATE lifecycle.` + table + ` SET ` + column + ` = ` + back + to,
			namesTheSeal: strings.Replace(do, ` SET `, ` SET seal = NULL, `, 1),
		}
	}
	onWorkspace := func(class, column, expr, back string) edit {
		return set(class, "workspace", "id", id, "workspace "+id, column, expr, back)
	}
	onRun := func(class, column, expr, back string) edit {
		return set(class, "saga_run", "id", run, "run "+run, column, expr, back)
	}
	onAllocation := func(class, column, expr, back string) edit {
		return set(class, "allocation", "allocation_id", allocation, "allocation "+allocation, column, expr, back)
	}
	insert := ` id, tenant_id, name, state) SELECT '` + ghost +
		`', tenant_id, 'ghost', 'failed' FROM lifecycle.workspace WHERE id = '` + id + `'`
	return []edit{
		onWorkspace("what events carry, of a workspace (`last_error`)", "last_error", "'mine'", "''"),
		onRun("what events carry, of a run (`error`)", "error", "'mine'", "''"),
		onAllocation("what events carry, of an allocation (`last_error`)", "last_error", "'mine'", "''"),
		onWorkspace("`version`", "version", "version + 1", "version - 1"),
		onWorkspace("`op_seq`", "op_seq", "op_seq + 5", "op_seq - 5"),
		onWorkspace("values of `spec`", "spec", `spec || '{"mine": 1}'`, "spec - 'mine'"),
		onRun("`input`", "input", `input || '{"mine": 1}'`, "input - 'mine'"),
		onRun("leases and wakes of a run (`signal`, `next_at`)", "signal", "signal + 1", "signal - 1"),
		onAllocation("`slot`", "slot", "7", "NULL"),
		onAllocation("`gpus`", "gpus", "gpus + 1", "gpus - 1"),
		{
			class: "a device of an allocation (`gpu_hold`)", table: "gpu_hold", subject: "allocation " + allocation,
			column: "device mine",
			do: `INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id) SELECT node_id, 'mine', allocation_id
				FROM lifecycle.allocation WHERE allocation_id = '` + allocation + `'`,
			undo: `DELETE FROM lifecycle.gpu_hold WHERE device_id = 'mine'`,
		},
		{
			class: "a row inserted", table: "workspace", subject: "workspace " + ghost, column: "it was inserted",
			do: `INSERT INTO lifecycle.workspace (` + insert, undo: `DELETE FROM lifecycle.workspace WHERE id = '` + ghost + `'`,
			namesTheSeal: `INSERT INTO lifecycle.workspace (seal,` + strings.Replace(insert, "SELECT ", "SELECT 1, ", 1),
		},
		{
			class: "a row deleted", table: "saga_run", subject: "run " + run, column: "it was deleted",
			do: `DELETE FROM lifecycle.saga_run WHERE id = '` + run + `'`, restoreFromRow: true,
		},
	}
}

// TestTheTableOfEdits does each kind of edit in each way as each role, and compares the guard's result with the table
// of docs/findings.md.
func TestTheTableOfEdits(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	b.sweep()
	run := b.text(`SELECT run_id::text FROM lifecycle.workspace WHERE id = $1`, id)
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	// A row that lives: the guard passes over those whose life has ended unless they were written lately.
	head := []string{"edit"}
	for _, w := range ways {
		head = append(head, w.name)
	}
	table := []string{tableLine(head), "|" + strings.Repeat("---|", len(head))}
	for _, e := range edits(id, run, allocation, ids.New()) {
		line := []string{e.class}
		for _, w := range ways {
			var saw []string
			for _, role := range w.roles {
				saw = append(saw, b.outcome(e, w, role))
			}
			if slices.IndexFunc(saw, func(s string) bool { return s != saw[0] }) >= 0 {
				t.Errorf("%s, %s: as %v the guard sees %q", e.class, w.name, w.roles, saw)
			}
			line = append(line, saw[0])
		}
		table = append(table, tableLine(line))
	}
	doc, err := os.ReadFile("../../../docs/findings.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "<!-- edits -->\n")
	listed, _, _ := strings.Cut(rest, "<!-- end of edits -->")
	if made := strings.Join(table, "\n") + "\n"; made != listed {
		t.Errorf("docs/findings.md tells another table (-told +made):\n%s\n%s", cmp.Diff(listed, made), made)
	}
}

func tableLine(cells []string) string { return "| " + strings.Join(cells, " | ") + " |" }

// outcome makes an edit, returns how the guard detects it, and takes it back until nothing is found.
func (b *bed) outcome(e edit, w way, role string) string {
	b.t.Helper()
	around := func(statements []string) []string {
		var out []string
		for _, s := range statements {
			trigger := "seal_row"
			if e.table == "gpu_hold" {
				trigger = "hold_changed"
			}
			if strings.Contains(s, "%[2]s") {
				s = fmt.Sprintf(s, e.table, trigger)
			} else if strings.Contains(s, "%s") {
				s = fmt.Sprintf(s, e.table)
			}
			out = append(out, s)
		}
		return out
	}
	do := e.do
	if w.named && e.namesTheSeal != "" {
		do = e.namesTheSeal
	}
	var kept string
	if e.restoreFromRow {
		kept = b.text(`SELECT quote_literal(to_jsonb(x)) FROM lifecycle.saga_run x WHERE x.id = $1`,
			strings.TrimPrefix(e.subject, "run "))
	}
	run := func(statement string) {
		b.t.Helper()
		all := append(append(around(w.before), statement), around(w.after)...)
		if _, err := b.hand(role).Exec(b.t.Context(), "BEGIN;"+strings.Join(all, ";")+";COMMIT"); err != nil {
			b.t.Fatalf("%s, %s, as %s: %v", e.class, w.name, role, err)
		}
	}
	run(do)
	out := notSeen
	if f, ok := b.rowFindings()["row_changed_outside "+e.subject]; ok {
		switch {
		case strings.Contains(f.Summary, e.column) && strings.Contains(f.Summary, "with psql") && len(f.Before) > 0:
			out = seenWhole
		case strings.Contains(f.Summary, "its seal does not fit") && f.After["seal"] == guard.SealBroken:
			out = seenAfter
		default:
			b.t.Errorf("%s, %s, as %s: the finding says %q, before %v", e.class, w.name, role, f.Summary, f.Before)
		}
	}
	undo := e.undo
	if e.restoreFromRow {
		undo = `INSERT INTO lifecycle.saga_run SELECT (jsonb_populate_record(NULL::lifecycle.saga_run, ` + kept + `)).*`
	}
	run(undo)
	if left := b.rowFindings(); len(left) != 0 {
		b.t.Fatalf("%s, %s, as %s: what was put back is found still: %v", e.class, w.name, role, left)
	}
	return out
}

// rowFindings runs the drift guard alone, and returns the open findings.
func (b *bed) rowFindings() map[string]finding.Row {
	b.t.Helper()
	var total Swept
	if err := b.sweeper.check(b.t.Context(), detector{"rows", b.sweeper.guard.Scan}, []string{"rows"},
		&total); err != nil {
		b.t.Fatal(err)
	}
	return b.open()
}
