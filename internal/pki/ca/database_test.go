package ca_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// A production authority keeps the certificates that it signed, and the tokens that were used, in Postgres over a
// restart.
func TestDatabaseRemembersWhatWasSigned(t *testing.T) {
	testkit.IO(t)
	database := testkit.DB(t)
	cfg := ca.Config{Dir: t.TempDir(), TrustDomain: td, DatabaseURL: database.AdminURL()}
	csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second authority is the first one's replica after a restart
		authority, err := ca.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sign(t, authority, csr, time.Hour); err != nil {
			t.Error(err)
		}
		if err := authority.Close(); err != nil {
			t.Error(err)
		}
	}
	conn, err := pgx.Connect(t.Context(), database.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := conn.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	for _, table := range []string{"used_ott", "x509_certs"} {
		var rows int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&rows); err != nil {
			t.Fatal(err)
		}
		if rows != 2 {
			t.Errorf("%s holds %d rows", table, rows)
		}
	}
}
