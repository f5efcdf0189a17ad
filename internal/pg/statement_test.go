package pg_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

type keyed struct {
	Key string `db:"key"`
}

type policyRow struct {
	keyed

	Upper  string `db:"upper" expr:"upper(@.value)"`
	Unread int    `db:"-"`
}

type policyFilter struct {
	key    bool
	newest bool
}

func (f policyFilter) sql() string {
	sql := `SELECT ` + pg.Columns[policyRow]("p") + ` FROM mesh.policy p`
	if f.key {
		sql += ` WHERE p.key = $1`
	}
	if f.newest {
		sql += ` ORDER BY p.updated_at DESC`
	}
	return sql
}

var (
	policyRows = pg.DefineDynamic(pg.RoleLifecycle, "pgtest.policy", policyFilter.sql, policyFilter{},
		policyFilter{key: true, newest: true})
	policyKeys = pg.Define(pg.RoleLifecycle, "pgtest.policy_keys", `SELECT p.key FROM mesh.policy p ORDER BY p.key`)
	cursors    = pg.DefineByRole([]string{pg.RoleLifecycle, pg.RoleRecovery}, "pgtest.cursors", func(role string) string {
		return `SELECT count(*) FROM ` + role + `.event_cursor`
	})
	putPolicy = pg.Define(pg.RoleOwner, "pgtest.put_policy",
		`INSERT INTO mesh.policy (key, value, updated_by, reason) VALUES ($1, $2, 'test', 'test')`)
)

func TestStatementsReadStructs(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	for _, kv := range [][2]string{{"a", "one"}, {"b", "two"}} {
		if tag, err := pg.Exec(ctx, d.OwnerPool(), putPolicy, kv[0], kv[1]); err != nil || tag.RowsAffected() != 1 {
			t.Fatal(tag, err)
		}
	}
	db := d.Pool(pg.RoleLifecycle)
	all, err := pg.All[policyRow](ctx, db, policyRows.For(policyFilter{newest: true}))
	if err != nil || len(all) != 2 {
		t.Fatal(all, err)
	}
	one, err := pg.One[policyRow](ctx, db, policyRows.For(policyFilter{key: true}), "a")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(policyRow{keyed: keyed{Key: "a"}, Upper: "ONE"}, one,
		cmp.AllowUnexported(policyRow{}, keyed{})); diff != "" {
		t.Error(diff)
	}
	if _, err := pg.One[policyRow](ctx, db, policyRows.For(policyFilter{key: true}), "none"); !pg.IsNoRows(err) {
		t.Errorf("of no row: %v", err)
	}
	keys, err := pg.Values[string](ctx, db, policyKeys)
	if diff := cmp.Diff([]string{"a", "b"}, keys); diff != "" || err != nil {
		t.Error(diff, err)
	}
	if n, err := pg.Value[int](ctx, db, cursors.For(pg.RoleLifecycle)); err != nil || n != 0 {
		t.Error(n, err)
	}
	if _, err := pg.Value[int](ctx, db, cursors.For(pg.RoleRecovery)); !testkit.IsPrivilege(err) {
		t.Errorf("lifecycle read recovery's cursors: %v", err)
	}
}

func TestStatementsAreListed(t *testing.T) {
	t.Parallel()
	found := map[string]int{}
	for _, s := range pg.Statements() {
		if strings.HasPrefix(s.Name(), "pgtest.") {
			found[s.Name()]++
			if s.Unprepared() == "" && !strings.HasPrefix(s.SQL(), "/* "+s.Name()+" */ ") {
				t.Errorf("%s is sent as %s", s.Name(), s.SQL())
			}
		}
	}
	if diff := cmp.Diff(map[string]int{
		"pgtest.policy": 2, "pgtest.policy_keys": 1, "pgtest.cursors": 2,
		"pgtest.put_policy": 1, "pgtest.queued": 1,
	}, found); diff != "" {
		t.Error(diff)
	}
}

func TestMistakesInDefinitionsStopTheProgram(t *testing.T) {
	t.Parallel()
	type untagged struct{ Key string }
	for name, define := range map[string]func(){
		"a name without a package": func() { pg.Define(pg.RoleLifecycle, "alone", "SELECT 1") },
		"a name of capitals":       func() { pg.Define(pg.RoleLifecycle, "pgtest.Upper", "SELECT 1") },
		"a name twice":             func() { pg.Define(pg.RoleLifecycle, "pgtest.policy_keys", "SELECT 1") },
		"no role":                  func() { pg.DefineShared(nil, "pgtest.no_role", "SELECT 1") },
		"no sample": func() {
			pg.DefineDynamic(pg.RoleLifecycle, "pgtest.no_sample", policyFilter.sql)
		},
		"no reason": func() {
			pg.DefineUnprepared(pg.RoleLifecycle, "pgtest.no_reason", "", policyFilter.sql)
		},
		"a role it was not defined for": func() { cursors.For(pg.RoleReadmodel) },
		"a field without a column":      func() { pg.Columns[untagged]("x") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			define()
		})
	}
}
