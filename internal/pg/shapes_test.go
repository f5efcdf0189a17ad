package pg_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// wrong are writes that no row of a saga may have, each with the rule that it breaks. Each changes one row that is
// well.
var wrong = map[string][]string{
	"saga_run_kind_check": {`UPDATE lifecycle.saga_run SET kind = 'creat'`},
	"saga_run_state_check": {`UPDATE lifecycle.saga_run
		SET state = 'runing'`, `UPDATE lifecycle.saga_run SET state = ''`},
	"saga_run_phase_check":      {`UPDATE lifecycle.saga_run SET phase = 'redo'`},
	"saga_run_step_check":       {`UPDATE lifecycle.saga_run SET step = -1`},
	"saga_run_step_names_check": {`UPDATE lifecycle.saga_run SET step_names = '{}'`},
	"saga_run_owner_check":      {`UPDATE lifecycle.saga_run SET owner = '', lease_until = now()`},
	"live_says_why":             {`UPDATE lifecycle.saga_run SET why_waiting = ''`},
	"stuck_says_why":            {`UPDATE lifecycle.saga_run SET state = 'stuck'`},
	"lease_is_whole": {`UPDATE lifecycle.saga_run
		SET owner = 'me'`, `UPDATE lifecycle.saga_run SET lease_until = now()`},
	"ended_is_dated": {`UPDATE lifecycle.saga_run
		SET state = 'failed'`, `UPDATE lifecycle.saga_run SET finished_at = now()`},
	"workspace_name_check":          {`UPDATE lifecycle.workspace SET name = ''`},
	"workspace_desired_state_check": {`UPDATE lifecycle.workspace SET desired_state = 'gone'`},
	"workspace_state_check":         {`UPDATE lifecycle.workspace SET state = 'activ'`},
	"saga_step_dir_check":           {`UPDATE lifecycle.saga_step SET dir = 'redo'`},
	"saga_step_last_output_check":   {`UPDATE lifecycle.saga_step SET last_output = repeat('x', 2049)`},
	"saga_step_state_check":         {`UPDATE lifecycle.saga_step SET state = 'done'`},
}

// TestRowsOfSagasHaveOneConstraintATable: every rule stands and is named when it is broken, and no statement pays for
// more than one constraint.
func TestRowsOfSagasHaveOneConstraintATable(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	owner := d.OwnerPool()
	const id = "01a20000-0000-7000-8000-000000000001"
	for _, sql := range []string{
		`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 'a')`,
		`INSERT INTO lifecycle.workspace (id, tenant_id, name, state) VALUES ($1, $1, 'a', 'active')`,
		`INSERT INTO lifecycle.saga_run (id, workspace_id, tenant_id, kind, definition, def_version, step_names, epoch, state,
			why_waiting)
			VALUES ($1, $1, $1, 'create', 'd', 1, '{a}', 1, 'pending', 'waiting for a worker')`,
		`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, state,
			idem_key, stall_after)
			VALUES ($1, 0, 'a', 'do', 1, $1, $1, 1, 1, 'running', 'k', '1 min')`,
	} {
		if _, err := owner.Exec(t.Context(), sql, id); err != nil {
			t.Fatal(err)
		}
	}
	refuses := func(when string) {
		t.Helper()
		for rule, writes := range wrong {
			for _, sql := range writes {
				_, err := owner.Exec(t.Context(), sql)
				refusal := &pgconn.PgError{}
				if !errors.As(err, &refusal) || refusal.Code != "23514" || refusal.ConstraintName != rule ||
					refusal.TableName == "" {
					t.Errorf("%s, %s: %v, want a violation of %s", when, sql, err, rule)
				}
			}
		}
	}
	refuses("migrated")
	count := func() map[string]int {
		t.Helper()
		rows, err := owner.Query(t.Context(),
			`SELECT c.conrelid::regclass::text, count(*)::int, bool_and(c.convalidated) FROM pg_constraint c
			WHERE c.contype = 'c'
				AND c.conrelid IN ('lifecycle.saga_run'::regclass, 'lifecycle.workspace'::regclass, 'lifecycle.saga_step'::regclass)
				GROUP BY 1`)
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]int{}
		var table string
		var n int
		var valid bool
		if _, err := pgx.ForEachRow(rows, []any{&table, &n, &valid}, func() error {
			out[table] = n
			if !valid {
				t.Errorf("a constraint of %s is not validated", table)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return out
	}
	for table, n := range count() {
		if n != 1 {
			t.Errorf("%s has %d constraints that every statement pays for", table, n)
		}
	}
	// A database of an earlier build comes to the same, also if the migration was interrupted before.
	file, err := fs.ReadFile(migrations.FS, "00100_shapes_of_saga_rows.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(file), "-- +goose Down")
	for _, sql := range []string{down, up, up} {
		if _, err := owner.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
		refuses("migrated again")
	}
	if n := count()["lifecycle.saga_run"]; n != 1 {
		t.Errorf("saga_run has %d constraints", n)
	}
	var refusal *pgconn.PgError
	_, err = owner.Exec(t.Context(),
		`INSERT INTO lifecycle.workspace (id, tenant_id, name, state) VALUES (gen_random_uuid(), $1, '', 'active')`, id)
	if !errors.As(err, &refusal) || refusal.ConstraintName != "workspace_name_check" {
		t.Errorf("an inserted row is not held to the rules: %v", err)
	}
}
