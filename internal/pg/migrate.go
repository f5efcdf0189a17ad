package pg

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/gpuaas/mesh/internal/pg/migrations"
)

// migrateLock is the advisory lock of Migrate, in the migrated database.
const migrateLock = 0x67707561_0002

// versionTable stands in the schema mesh so that the public one stays empty.
const versionTable = "mesh.goose_db_version"

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
func riverSchemas() []string { return []string{RoleLifecycle, RoleRecovery, RoleReadmodel} }

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
	pc.ConnConfig.RuntimeParams[WriterSetting] = WriterProduct
	pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET ROLE "+quote(RoleOwner))
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
		goose.WithTableName(versionTable),
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
	if err := pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", versionTable).Scan(&exists); err != nil {
		return nil, fmt.Errorf("read migration status: %w", err)
	}
	if exists {
		rows, err := pool.Query(ctx, "SELECT version_id, max(tstamp)::timestamptz FROM "+versionTable+
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
	files, err := fileVersions(migrations.FS)
	if err != nil {
		return nil, fmt.Errorf("read migration status: %w", err)
	}
	var status []MigrationStatus
	for _, f := range files {
		at, ok := applied[f.Version]
		status = append(status, MigrationStatus{Version: f.Version, File: f.File, Applied: ok, AppliedAt: at})
	}
	return status, nil
}

func fileVersions(files fs.FS) ([]MigrationStatus, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var list []MigrationStatus
	for _, name := range names {
		v, err := goose.NumericComponent(name)
		if err != nil {
			return nil, fmt.Errorf("migration file %s: %w", name, err)
		}
		list = append(list, MigrationStatus{Version: v, File: name})
	}
	return list, nil
}

// ErrNotMigrated is returned if the database lacks migrations that this binary needs.
var ErrNotMigrated = errors.New("the database lacks migrations of this version: run `gpuaas migrate`")

// CheckMigrated returns ErrNotMigrated, with the missing files, until the database has every migration of this binary.
// Any service role may call it; it is meant for readiness checks. A database that is ahead is fine.
func CheckMigrated(ctx context.Context, q Querier) error {
	rows, err := q.Query(ctx, "SELECT DISTINCT version_id FROM "+versionTable+" WHERE is_applied")
	if err != nil {
		return fmt.Errorf("read migrations: %w", err)
	}
	have, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return fmt.Errorf("read migrations: %w", err)
	}
	files, err := fileVersions(migrations.FS)
	if err != nil {
		return err
	}
	var missing []string
	for _, f := range files {
		if !slices.Contains(have, f.Version) {
			missing = append(missing, f.File)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: %s", ErrNotMigrated, strings.Join(missing, ", "))
	}
	return nil
}

// MigrationHash changes whenever a migration file does. Test databases are keyed by it.
func MigrationHash() (string, error) {
	h := sha256.New()
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return "", fmt.Errorf("list migrations: %w", err)
	}
	slices.Sort(names)
	for _, name := range names {
		b, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			return "", fmt.Errorf("read migration: %w", err)
		}
		_, _ = fmt.Fprintf(h, "%s %d\n", name, len(b)) // a hash never fails
		_, _ = h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
}
