package testkit

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
)

// TestALoginDerivesOnce: a login under the race detector derives its password in one iteration, and a wrong password
// is refused.
func TestALoginDerivesOnce(t *testing.T) {
	IO(t)
	ctx := Context(t)
	d := DB(t)
	admin, err := pgx.Connect(ctx, d.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(ctx)
	// A role of its own: tests of other packages set the passwords of the product's roles.
	role := "quick_" + strings.ReplaceAll(ids.New(), "-", "")
	if _, err := admin.Exec(ctx, "CREATE ROLE "+role+" LOGIN"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := admin.Exec(context.WithoutCancel(ctx), "DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	}()
	if err := deriveQuickly(ctx, admin, map[string]string{role: "secret"}); err != nil {
		t.Fatal(err)
	}
	var iterations string
	if err := admin.QueryRow(ctx, `SELECT split_part(rolpassword, ':', 1) FROM pg_authid WHERE rolname = $1`, role).
		Scan(&iterations); err != nil {
		t.Fatal(err)
	}
	if iterations != "SCRAM-SHA-256$1" {
		t.Errorf("a login derives as %s", iterations)
	}
	cfg, err := pgx.ParseConfig(d.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.User, cfg.Database = role, "postgres"
	for password, right := range map[string]bool{"secret": true, "secretx": false} {
		cfg.Password = password
		conn, err := pgx.ConnectConfig(ctx, cfg)
		if (err == nil) != right {
			t.Errorf("a login with %q: %v", password, err)
		}
		if err == nil {
			_ = conn.Close(ctx)
		}
	}
}
