package castore_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
)

const indexOfCertificates = "x509_certs_mesh_certificate_end_2"

// failures returns the failures in the accounts of the cuts, by cut.
func (a *authority) failures() map[string]string {
	a.t.Helper()
	accounts, err := retention.Accounts(a.t.Context(), a.mesh.Pool(pg.RoleReadmodel))
	if err != nil {
		a.t.Fatal(err)
	}
	out := map[string]string{}
	for _, acc := range accounts {
		out[acc.Cut] = acc.Failure
	}
	return out
}

// indexes returns the indexes of the mesh over certificates.
func (a *authority) indexes() []string {
	a.t.Helper()
	list, err := pgxRows(a.t.Context(), a.admin, `SELECT indexname FROM pg_indexes
		WHERE tablename = 'x509_certs' AND indexname LIKE 'x509\_certs\_mesh\_%' ORDER BY 1`)
	if err != nil {
		a.t.Fatal(err)
	}
	return list
}

func (a *authority) exec(sql string) {
	a.t.Helper()
	if _, err := a.admin.Exec(a.t.Context(), sql); err != nil {
		a.t.Fatal(err)
	}
}

// TestALargeTableIsIndexed checks a table that was large before its first walk: over 8 MB the server may make an index
// by several processes.
func TestALargeTableIsIndexed(t *testing.T) {
	a := open(t)
	a.copies(40_000, time.Now().Add(day))
	a.copies(10, time.Now().Add(-200*day))
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	if n := a.count("x509_certs"); n != 40_000 {
		t.Errorf("%d certificates are left", n)
	}
}

// The index of a large table is made beside the walks, however long it takes, and the accounts show its progress.
func TestALargeIndexIsMadeByItsOwnJob(t *testing.T) {
	a := open(t)
	a.copies(1, time.Now().Add(-200*day))
	a.store.SetAtOnce(0)
	if err := a.walk(a.store); err == nil ||
		!strings.Contains(a.failures()["authority_certificates"], "which the job authority-indexes") {
		t.Fatalf("a walk before the job ended with %v; accounts say %q", err, a.failures())
	}
	// A transaction that has written keeps the index from being made.
	tx, err := a.admin.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := tx.Exec(t.Context(), `INSERT INTO x509_certs (nkey, nvalue) VALUES ('open', '')`); err != nil {
		t.Fatal(err)
	}
	built := make(chan error, 1)
	go func() { built <- a.store.BuildIndexes(t.Context()) }()
	testkit.Eventually(t, testkit.Patience, func() error {
		if err := a.walk(a.store); err == nil ||
			!strings.Contains(a.failures()["authority_certificates"], "which is being made: ") {
			return fmt.Errorf("a walk meanwhile ended with %w; accounts say %q", err, a.failures())
		}
		return nil
	})
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-built; err != nil {
		t.Fatal(err)
	}
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	if n := a.count("x509_certs"); n != 0 {
		t.Errorf("%d certificates are left", n)
	}
}

// The job leaves the index of a small table to the walk, which may come at the same moment and needs it at once.
func TestASmallIndexIsLeftToTheWalk(t *testing.T) {
	a := open(t)
	if err := a.store.BuildIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := a.indexes(); len(got) != 0 {
		t.Errorf("the job made %q", got)
	}
}

// The job has no bound of time on a statement, whatever the login's own is.
func TestTheJobHasNoBounds(t *testing.T) {
	a := open(t)
	a.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET statement_timeout = 1', current_database()); END $$`)
	a.store.SetAtOnce(-1)
	a.copies(20_000, time.Now().Add(day))
	store := a.openAs(a.admin.Config().ConnString())
	store.SetAtOnce(-1)
	if err := store.BuildIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := a.indexes(); !slices.Equal(got, []string{indexOfCertificates}) {
		t.Errorf("indexes are %q", got)
	}
}

// Functions are replaced by those of a later version alone, and an index goes once the one of its later version stands.
func TestVersionsOnlyRise(t *testing.T) {
	a := open(t)
	ours := func() bool {
		t.Helper()
		var same bool
		if err := a.admin.QueryRow(t.Context(),
			`SELECT prosrc LIKE '%DELETE%' FROM pg_proc WHERE proname = 'cut_ended_tokens'`).
			Scan(&same); err != nil {
			t.Fatal(err)
		}
		return same
	}
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	const other = `CREATE OR REPLACE FUNCTION mesh_ca.cut_ended_tokens(until timestamptz, most integer) RETURNS bigint
		LANGUAGE sql SECURITY DEFINER AS 'SELECT 0::bigint'; `
	a.exec(other + `COMMENT ON SCHEMA mesh_ca IS 'version 99';
		CREATE INDEX x509_certs_mesh_certificate_end_99 ON x509_certs (nkey)`)
	later := a.openAs(a.admin.Config().ConnString())
	if err := a.walk(later); err != nil {
		t.Fatal(err)
	}
	if err := later.BuildIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := a.indexes(); ours() || len(got) != 2 {
		t.Errorf("functions or indexes %q of a later version were replaced", got)
	}
	a.exec(other + `COMMENT ON SCHEMA mesh_ca IS 'version 1'; CREATE INDEX x509_certs_mesh_end ON x509_certs (nkey)`)
	earlier := a.openAs(a.admin.Config().ConnString())
	if err := a.walk(earlier); err != nil {
		t.Fatal(err)
	}
	if err := earlier.BuildIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := a.indexes(); !ours() || !slices.Equal(got, []string{indexOfCertificates}) {
		t.Errorf("functions or indexes %q of an earlier version are left", got)
	}
}

// A database that was restored from a backup of another one has grants to that one's role, which go.
func TestRightsOfAFormerDatabaseGo(t *testing.T) {
	a := open(t)
	a.fill()
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	names, err := pgxRows(t.Context(), a.admin,
		`SELECT 'mesh_ca_retention_' || oid || '00' FROM pg_database WHERE datname = current_database()`)
	if err != nil {
		t.Fatal(err)
	}
	former := names[0]
	a.exec(`CREATE ROLE ` + former)
	t.Cleanup(func() {
		if _, err := a.admin.Exec(context.WithoutCancel(t.Context()),
			`DROP OWNED BY `+former+`; DROP ROLE `+former); err != nil {
			t.Error(err)
		}
	})
	a.exec(`GRANT SELECT, DELETE ON x509_certs, x509_certs_data, used_ott, revoked_x509_certs TO ` + former + `;
		GRANT USAGE ON SCHEMA public, mesh_ca TO ` + former + `;
		ALTER FUNCTION mesh_ca.cut_ended_tokens(timestamptz, integer) OWNER TO ` + former)
	if err := a.walk(a.openAs(a.admin.Config().ConnString())); err != nil {
		t.Fatal(err)
	}
	rights, err := pgxRows(t.Context(), a.admin, `
		SELECT 'delete from ' || t FROM unnest(ARRAY['x509_certs', 'x509_certs_data', 'used_ott', 'revoked_x509_certs']) t
		WHERE has_table_privilege('`+former+`', t, 'SELECT, DELETE')
		UNION ALL SELECT 'use mesh_ca' WHERE has_schema_privilege('`+former+`', 'mesh_ca', 'USAGE')
		UNION ALL SELECT 'owns ' || proname FROM pg_proc WHERE proowner = '`+former+`'::regrole`)
	if err != nil || len(rights) > 0 {
		t.Errorf("the role of another database may %q, %v", rights, err)
	}
}
