package pg_test

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestFunctionsThatWritesCallArePlannedOnce checks that no write reads and plans a function anew: a function in SQL
// that cannot be inlined is planned by each statement that calls it, and the functions of an index's expression or
// predicate are called for each row.
func TestFunctionsThatWritesCallArePlannedOnce(t *testing.T) {
	testkit.IO(t)
	rows, err := testkit.DB(t).OwnerPool().Query(t.Context(), `SELECT DISTINCT p.oid::regprocedure::text FROM pg_proc p
		JOIN pg_language l ON l.oid = p.prolang AND l.lanname = 'sql'
		LEFT JOIN pg_depend d ON d.refclassid = 'pg_proc'::regclass AND d.refobjid = p.oid
		LEFT JOIN pg_index i ON d.classid = 'pg_class'::regclass AND i.indexrelid = d.objid
		WHERE p.pronamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
			AND p.proname NOT LIKE 'river_%' -- River's own is inlined
			AND (i.indexrelid IS NOT NULL OR p.oid = 'mesh.rolled_back()'::regprocedure)`)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if len(found) > 0 {
		t.Errorf("functions in SQL that writes call: %v", found)
	}
}

// TestSecretKeysAreReadAsBefore checks that the function of the indexes on sets of keys returns what it returned when
// they were built.
func TestSecretKeysAreReadAsBefore(t *testing.T) {
	testkit.IO(t)
	first, err := fs.ReadFile(migrations.FS, "00079_lifecycle_secret_keys.sql")
	if err != nil {
		t.Fatal(err)
	}
	_, former, found := strings.Cut(string(first), "CREATE FUNCTION lifecycle.secret_keys(")
	former, _, ended := strings.Cut(former, "-- +goose StatementEnd")
	if !found || !ended {
		t.Fatal("the migration does not define the function")
	}
	owner := testkit.DB(t).OwnerPool()
	if _, err := owner.Exec(t.Context(), "CREATE FUNCTION lifecycle.former_secret_keys("+former); err != nil {
		t.Fatal(err)
	}
	const key = `AQECAwQFBgcIabcd`
	var compared, differ, empty int
	if err := owner.QueryRow(t.Context(),
		`SELECT count(*), count(*) FILTER (WHERE lifecycle.secret_keys(s.spec::jsonb, d.digest)
				IS DISTINCT FROM lifecycle.former_secret_keys(s.spec::jsonb, d.digest)),
			count(*) FILTER (WHERE lifecycle.secret_keys(s.spec::jsonb, d.digest) = '')
		FROM unnest($1::text[]) AS s (spec) CROSS JOIN unnest($2::text[]) AS d (digest)`,
		[]*string{
			nil, ref(`null`), ref(`{}`), ref(`[]`), ref(`{"workloads": null}`), ref(`{"workloads": []}`),
			ref(`{"workloads": {"env": {"A": "b"}}}`), ref(`{"workloads": [{"name": "w"}]}`),
			ref(`{"workloads": [{"env": {}, "sealed_env": {}}]}`),
			ref(`{"workloads": [{"env": {"A": ""}}]}`),
			ref(`{"workloads": [{"sealed_env": {"A": "` + key + `", "B": "AQgHBgUEAwIBabcd"}}, {"sealed_env": {"C": "` + key +
				`"}}]}`),
			ref(`{"workloads": [{"sealed_env": {"A": "short", "B": "` + key + `"}, "env": {"C": "d"}}]}`),
			ref(`{"workloads": [{"sealed_env": {"A": 1}}]}`),
		},
		[]*string{
			nil, ref(""), ref("hmac-sha256.0102.ff"), ref("hmac-sha256."), ref(strings.Repeat("0f", 32)),
			ref("sha256." + strings.Repeat("0f", 32)),
		},
	).Scan(&compared, &differ, &empty); err != nil {
		t.Fatal(err)
	}
	if compared != 13*6 || differ != 0 || empty == 0 || empty == compared {
		t.Errorf("%d of %d differ from before, %d are empty", differ, compared, empty)
	}
}

func ref(s string) *string { return &s }
