package schema

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
)

// migrateLock is the advisory lock of Migrate, in the migrated database.
const migrateLock = 0x67707561_0002

// MigrateOptions changes what Migrate does; the zero value brings everything up to date.
type MigrateOptions struct {
	// Files replaces the embedded migrations, for tests of a migration.
	Files fs.FS
	// Logger receives one line per applied migration; nil is silent.
	Logger *slog.Logger
}

// Applied describes what Migrate did.
type Applied struct {
	// Versions are the numbers of the files applied now, in order.
	Versions []int64
	// River counts the background-work migrations applied now, over all schemas.
	River int
	// Took is the wall time of the whole call.
	Took time.Duration
}

// riverSchemas returns the services that run background work.
func riverSchemas() []string { return []string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel} }

// Migrate brings the database of ownerURL up to date. The login is gpuaas_owner or a role that may take it; everything
// made belongs to gpuaas_owner. Each file runs in a transaction of its own; several callers take turns.
func Migrate(ctx context.Context, ownerURL string, opts MigrateOptions) (Applied, error) {
	began := time.Now()
	pool, err := ownerPool(ctx, ownerURL)
	if err != nil {
		return Applied{}, fmt.Errorf("migrate database: %w", err)
	}
	defer pool.Close()
	lock, err := pool.Acquire(ctx)
	if err != nil {
		return Applied{}, fmt.Errorf("migrate database: %w", err)
	}
	// The lock belongs to the session: it is released with the pool at the latest.
	defer lock.Release()
	if err := takeTurn(ctx, lock); err != nil {
		return Applied{}, fmt.Errorf("migrate database: take turn: %w", err)
	}
	if _, err := lock.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS mesh"); err != nil {
		return Applied{}, fmt.Errorf("migrate database: make schema mesh: %w", err)
	}
	db := stdlib.OpenDBFromPool(pool)
	defer func() { _ = db.Close() }()
	provider, err := newProvider(db, opts)
	if err != nil {
		return Applied{}, fmt.Errorf("migrate database: %w", err)
	}
	var done Applied
	results, err := provider.Up(ctx)
	for _, r := range results {
		done.Versions = append(done.Versions, r.Source.Version)
		if opts.Logger != nil {
			opts.Logger.InfoContext(ctx, "migration applied", slog.Int64("version", r.Source.Version),
				slog.String("file", r.Source.Path),
				slog.Duration("took", r.Duration))
		}
	}
	if err != nil {
		return done, fmt.Errorf("migrate database: %w", err)
	}
	for _, schema := range riverSchemas() {
		n, err := migrateRiver(ctx, pool, schema)
		if err != nil {
			return done, fmt.Errorf("migrate database: background work of %s: %w", schema, err)
		}
		done.River += n
	}
	if _, err := lock.Exec(ctx, "SELECT pg_advisory_unlock($1)", int64(migrateLock)); err != nil {
		return done, fmt.Errorf("migrate database: %w", err)
	}
	done.Took = time.Since(began)
	return done, nil
}

// takeTurn waits for the lock of migrations. It polls: a statement that waits for a lock holds a snapshot, and an index
// that the present holder of the lock builds concurrently waits for the end of all snapshots.
func takeTurn(ctx context.Context, conn *pgxpool.Conn) error {
	const pause = 100 * time.Millisecond
	ctx, cancel := context.WithTimeoutCause(ctx, turnTimeout,
		fmt.Errorf("another migration of this database has run for %s", turnTimeout))
	defer cancel()
	for {
		var taken bool
		if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", int64(migrateLock)).Scan(&taken); err != nil ||
			taken {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
	}
}

// turnTimeout is how long a migration waits for another one: an index of a large table takes minutes.
const turnTimeout = 15 * time.Minute

func migrateRiver(ctx context.Context, pool *pgxpool.Pool, schema string) (int, error) {
	m, err := rivermigrate.New(riverpgxv5.New(pool),
		&rivermigrate.Config{Schema: schema, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return 0, err
	}
	res, err := m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	if err != nil {
		return 0, err
	}
	return len(res.Versions), nil
}

// ownerPool opens connections that act as gpuaas_owner.
func ownerPool(ctx context.Context, ownerURL string) (*pgxpool.Pool, error) {
	pc, err := pgxpool.ParseConfig(ownerURL)
	if err != nil {
		return nil, fmt.Errorf("parse database url: %w", err)
	}
	pc.MaxConns = 4
	pc.ConnConfig.RuntimeParams["application_name"] = "gpuaas migrate"
	// A migration waits for a lock only so long: every service would queue behind it.
	pc.ConnConfig.RuntimeParams["lock_timeout"] = "30000"
	pc.ConnConfig.RuntimeParams["client_min_messages"] = "warning"
	pc.ConnConfig.RuntimeParams[pg.WriterSetting] = pg.WriterProduct
	pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET ROLE "+quote(pg.RoleOwner))
		return err
	}
	return pgxpool.NewWithConfig(ctx, pc)
}

func newProvider(db *sql.DB, opts MigrateOptions) (*goose.Provider, error) {
	files := opts.Files
	if files == nil {
		files = migrations.FS
	}
	return goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(migrations.Table),
		goose.WithDisableGlobalRegistry(true),
		// Numbers are reserved per service, so a lower one may well come later.
		goose.WithAllowOutofOrder(true),
		goose.WithLogger(goose.NopLogger()),
	)
}

// MigrationStatus is one file and whether the database has it.
type MigrationStatus struct {
	Version   int64
	File      string
	Applied   bool
	AppliedAt time.Time
}

// Status lists the migrations of this binary in order. It changes nothing.
func Status(ctx context.Context, ownerURL string) ([]MigrationStatus, error) {
	pool, err := ownerPool(ctx, ownerURL)
	if err != nil {
		return nil, fmt.Errorf("read migration status: %w", err)
	}
	defer pool.Close()
	applied := map[int64]time.Time{}
	var exists bool
	if err := pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", migrations.Table).Scan(&exists); err != nil {
		return nil, fmt.Errorf("read migration status: %w", err)
	}
	if exists {
		rows, err := pool.Query(ctx, "SELECT version_id, max(tstamp)::timestamptz FROM "+migrations.Table+
			" WHERE is_applied GROUP BY version_id")
		if err != nil {
			return nil, fmt.Errorf("read migration status: %w", err)
		}
		var version int64
		var at time.Time
		if _, err := pgx.ForEachRow(rows, []any{&version, &at},
			func() error { applied[version] = at; return nil }); err != nil {
			return nil, fmt.Errorf("read migration status: %w", err)
		}
	}
	files, err := migrations.List()
	if err != nil {
		return nil, fmt.Errorf("read migration status: %w", err)
	}
	var status []MigrationStatus
	for _, f := range files {
		at, ok := applied[f.Version]
		status = append(status, MigrationStatus{Version: f.Version, File: f.Name, Applied: ok, AppliedAt: at})
	}
	return status, nil
}
