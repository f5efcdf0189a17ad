package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/devstack/scratch"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
)

// Database is a Postgres of a bench's own, migrated, and durable like any other.
type Database struct {
	server    *pgserver.Server
	dir       *scratch.Dir // nil: the directory stays
	passwords map[string]string
}

// StartDatabase makes a cluster in a fresh temporary directory and migrates it. Close ends it.
func StartDatabase(ctx context.Context, logger *slog.Logger) (*Database, error) {
	// The settings of a mesh, but without a checkpoint in the middle of a measurement.
	return startDatabase(ctx, logger, map[string]string{"checkpoint_timeout": "30min", "max_wal_size": "8GB"})
}

// StartDatabaseWithoutPages makes a cluster whose write-ahead log has no whole pages, for a bench that compares logs.
func StartDatabaseWithoutPages(ctx context.Context, logger *slog.Logger) (*Database, error) {
	return startDatabase(ctx, logger, map[string]string{
		"checkpoint_timeout": "30min", "max_wal_size": "8GB", "full_page_writes": "off",
	})
}

// StartDatabaseToLoad makes a cluster for a bench that loads gigabytes. Rows that a transaction loads into a table that
// it has emptied are not logged, and the log stays small.
func StartDatabaseToLoad(ctx context.Context, logger *slog.Logger) (*Database, error) {
	return startDatabase(ctx, logger, toLoad())
}

// toLoad returns the settings of a server into which gigabytes are loaded.
func toLoad() map[string]string {
	return map[string]string{
		"checkpoint_timeout": "30min", "max_wal_size": "2GB",
		"wal_level": "minimal", "max_wal_senders": "0", "maintenance_work_mem": "256MB",
	}
}

// OpenDatabaseToLoad does the same as StartDatabaseToLoad in a directory that stays when the database is closed.
func OpenDatabaseToLoad(ctx context.Context, logger *slog.Logger, dir string) (*Database, error) {
	return (&Database{passwords: map[string]string{}}).start(ctx, logger, dir, toLoad())
}

func startDatabase(ctx context.Context, logger *slog.Logger, settings map[string]string) (*Database, error) {
	dir, err := scratch.Make("bench")
	if err != nil {
		return nil, err
	}
	return (&Database{dir: dir, passwords: map[string]string{}}).start(ctx, logger, dir.Path(), settings)
}

// start brings the server up and prepares it; it ends a server that it cannot prepare.
func (d *Database) start(
	ctx context.Context, logger *slog.Logger, dir string, settings map[string]string,
) (*Database, error) {
	if err := d.prepare(ctx, logger, dir, settings); err != nil {
		return nil, errors.Join(err, d.Close()) //nolint:contextcheck // what was started is ended though the caller gave up
	}
	return d, nil
}

func (d *Database) prepare(ctx context.Context, logger *slog.Logger, dir string, settings map[string]string) error {
	var err error
	d.server, err = pgserver.Start(ctx, pgserver.Config{
		Dir: filepath.Join(dir, "pg"), Logger: logger, Settings: settings,
	})
	if err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		d.passwords[role] = rand.Text()
	}
	if err := schema.Provision(ctx, d.server.AdminURL(), schema.Provisioning{Passwords: d.passwords}); err != nil {
		return fmt.Errorf("provision: %w", err)
	}
	if _, err := schema.Migrate(ctx, d.URL(pg.RoleOwner), schema.MigrateOptions{}); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

// URL returns the connection string of a role.
func (d *Database) URL(role string) string {
	return d.server.URL(pg.DatabaseMesh, role, d.passwords[role])
}

// WorkloadsURL returns the connection string of a role to the database of workloads.
func (d *Database) WorkloadsURL(role string) string { return d.WorkloadsURLOf(role, d.passwords[role]) }

// WorkloadsURLOf returns the connection string of a role that was made since, with its password.
func (d *Database) WorkloadsURLOf(role, password string) string {
	return d.server.URL(pg.DatabaseWorkloads, role, password)
}

// AdminURL returns the connection string of the superuser, for other databases on the same server.
func (d *Database) AdminURL() string { return d.server.AdminURL() }

// PID returns the process id of the postmaster.
func (d *Database) PID() int { return d.server.PID() }

// MeshURL returns the connection string of the server's administrator to this database, for loading rows that no
// service may write.
func (d *Database) MeshURL() string { return d.server.AdminURLOf(pg.DatabaseMesh) }

// Close stops the server and removes its directory, if it was made for this database alone.
func (d *Database) Close() error {
	//nolint:forbidigo // the bench's context may have ended
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var err error
	if d.server != nil {
		err = d.server.Stop(ctx)
	}
	if d.dir == nil {
		return err
	}
	return errors.Join(err, d.dir.Remove())
}
