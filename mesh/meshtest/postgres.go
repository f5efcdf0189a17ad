package meshtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
)

// Postgres makes dir the directory of a stopped Postgres whose roles and schema are made: a mesh that starts there
// finds the schema that it would have made itself, and gives the roles its own passwords.
func Postgres(tb testing.TB, dir string) {
	tb.Helper()
	from, err := prepared()
	if err != nil {
		tb.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o711); err != nil { // the server's user must traverse it
		tb.Fatal(err)
	}
	out, err := exec.CommandContext(tb.Context(), "cp", "-a", from+"/data", from+"/superuser.password",
		dir+"/").CombinedOutput()
	if err != nil {
		tb.Fatalf("copy the prepared Postgres: %v: %s", err, out)
	}
}

const preparedPattern = "gpuaas-prepared-*"

// prepared makes the directory that tests of this process copy.
var prepared = sync.OnceValues(func() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute) //nolint:forbidigo // no test's own
	defer cancel()
	sweep(preparedPattern)
	dir, err := os.MkdirTemp("", preparedPattern)
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o711); err != nil { // the server's user must traverse it
		return "", err
	}
	server, err := pgserver.Start(ctx, pgserver.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return "", fmt.Errorf("prepare Postgres: %w", err)
	}
	if err := errors.Join(migrated(ctx, server), server.Stop(context.WithoutCancel(ctx))); err != nil {
		return "", fmt.Errorf("prepare Postgres: %w", err)
	}
	return dir, nil
})

// migrated makes roles and schema.
func migrated(ctx context.Context, server *pgserver.Server) error {
	passwords := map[string]string{}
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		passwords[role] = rand.Text()
	}
	err := schema.Provision(ctx, server.AdminURL(), schema.Provisioning{Passwords: passwords, Exclusive: true})
	if err != nil {
		return err
	}
	owner := server.URL(pg.DatabaseMesh, pg.RoleOwner, passwords[pg.RoleOwner])
	_, err = schema.Migrate(ctx, owner, schema.MigrateOptions{Logger: slog.New(slog.DiscardHandler)})
	return err
}
