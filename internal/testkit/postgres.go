package testkit

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/pg/schema"
)

// shared is the one Postgres of this process.
var shared struct {
	once   sync.Once
	err    error
	server *pgserver.Temporary
	admin  *pgxpool.Pool
	url    string
	tmpl   string
	// copying is the clause that clones tmpl.
	copying string
}

func startShared() {
	ctx := context.Background()
	shared.url = os.Getenv(pgserver.EnvShared)
	if shared.url == "" {
		shared.server, shared.err = pgserver.StartTemporary(ctx, slog.New(slog.DiscardHandler))
		if shared.err != nil {
			return
		}
		shared.url = shared.server.AdminURL()
	}
	if shared.admin, shared.err = pg.Open(ctx, pg.Config{
		URL: shared.url, ApplicationName: "testkit", MaxConns: 4, StatementTimeout: 2 * time.Minute,
	}); shared.err != nil {
		return
	}
	if shared.tmpl, shared.err = makeTemplate(ctx, shared.admin, shared.url); shared.err != nil {
		return
	}
	shared.copying, shared.err = copying(ctx, shared.admin)
}

// copying returns the clause by which a template is copied fastest: through the log a clone takes five times the
// processor time that its files take, and each file is synced, which only a file system in memory does for nothing.
func copying(ctx context.Context, admin *pgxpool.Pool) (string, error) {
	var dir string
	if err := admin.QueryRow(ctx, "SHOW data_directory").Scan(&dir); err != nil {
		return "", fmt.Errorf("ask for the data directory: %w", err)
	}
	var fs syscall.Statfs_t
	const tmpfs = 0x01021994 // statfs(2)
	if err := syscall.Statfs(dir, &fs); err != nil || fs.Type != tmpfs {
		return "", nil //nolint:nilerr // a server elsewhere, as may be given by pgserver.EnvShared
	}
	return " STRATEGY file_copy", nil
}

func stopShared() error {
	if shared.admin != nil {
		shared.admin.Close()
	}
	if shared.server == nil {
		return nil
	}
	return shared.server.Remove(context.Background())
}

// templateLock keeps packages that run at once from making the same template twice.
const templateLock = 0x67707561_0010

// makeTemplate makes the migrated database that tests clone, unless another package already did.
func makeTemplate(ctx context.Context, admin *pgxpool.Pool, adminURL string) (string, error) {
	hash, err := migrations.Hash()
	if err != nil {
		return "", err
	}
	name := "mesh_template_" + hash + "_2" // of what is installed here beside the migrations, the second version
	conn, err := admin.Acquire(ctx)
	if err != nil {
		return "", fmt.Errorf("reach test postgres: %w", err)
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", int64(templateLock)); err != nil {
		return "", fmt.Errorf("lock template: %w", err)
	}
	defer func() { _, _ = conn.Exec(ctx, "SELECT pg_advisory_unlock($1)", int64(templateLock)) }()
	var exists bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)",
		name).Scan(&exists); err != nil {
		return "", fmt.Errorf("look for template: %w", err)
	}
	if exists {
		return name, nil
	}
	making := name + "_making"
	if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+making+" WITH (FORCE)"); err != nil {
		return "", fmt.Errorf("remove half template: %w", err)
	}
	passwords := map[string]string{pg.RoleOwner: password(pg.RoleOwner)}
	for _, role := range pg.Roles() {
		passwords[role] = password(role)
	}
	if err := schema.Provision(ctx, adminURL,
		schema.Provisioning{Database: making, WorkloadDatabase: "-", Passwords: passwords}); err != nil {
		return "", err
	}
	ownerURL, err := pg.WithUser(adminURL, pg.RoleOwner, password(pg.RoleOwner), making)
	if err != nil {
		return "", err
	}
	if _, err := schema.Migrate(ctx, ownerURL, schema.MigrateOptions{}); err != nil {
		return "", err
	}
	if err := installMovableClock(ctx, ownerURL); err != nil {
		return "", err
	}
	if err := deriveQuickly(ctx, conn, passwords); err != nil {
		return "", err
	}
	if _, err := conn.Exec(ctx, "ALTER DATABASE "+making+" RENAME TO "+name); err != nil {
		return "", fmt.Errorf("finish template: %w", err)
	}
	return name, nil
}

// installMovableClock replaces mesh.clock() by one with an offset. It is no migration: a real mesh has no movable
// clock.
func installMovableClock(ctx context.Context, ownerURL string) error {
	conn, err := pgx.Connect(ctx, ownerURL)
	if err != nil {
		return fmt.Errorf("connect as owner: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, `
		CREATE TABLE mesh.clock_offset (singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton), by interval NOT NULL,
			stopped timestamptz);
		INSERT INTO mesh.clock_offset (by) VALUES ('0');
		GRANT SELECT ON mesh.clock_offset TO nodeapi, lifecycle, recovery, readmodel, sequencer, mesh_retention;
		CREATE OR REPLACE FUNCTION mesh.clock() RETURNS timestamptz LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
		BEGIN
			RETURN (SELECT COALESCE(o.stopped, pg_catalog.clock_timestamp()) + o.by FROM mesh.clock_offset o);
		END $$;`)
	if err != nil {
		return fmt.Errorf("install movable clock: %w", err)
	}
	return nil
}

// Database is a migrated database of one test's own.
type Database struct {
	t    testing.TB
	name string

	mu        sync.Mutex
	pools     map[string]*pgxpool.Pool
	workloads bool
}

// DB makes a database for t from the template and drops it when t ends.
func DB(tb testing.TB) *Database {
	tb.Helper()
	shared.once.Do(startShared)
	if shared.err != nil {
		tb.Fatalf("test postgres: %v", shared.err)
	}
	id := ids.New()
	d := &Database{t: tb, name: "test_" + id[24:] + "_" + id[:8], pools: map[string]*pgxpool.Pool{}}
	ctx := Context(tb)
	tb.Cleanup(d.drop)
	d.admin(ctx, "CREATE DATABASE \""+d.name+"\" TEMPLATE "+shared.tmpl+shared.copying+" OWNER "+pg.RoleOwner)
	d.admin(ctx, "REVOKE ALL ON DATABASE \""+d.name+"\" FROM PUBLIC")
	d.admin(ctx, "GRANT CONNECT ON DATABASE \""+d.name+"\" TO nodeapi, lifecycle, recovery, readmodel, sequencer")
	return d
}

func (d *Database) admin(ctx context.Context, sql string) {
	d.t.Helper()
	if _, err := shared.admin.Exec(ctx, sql); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
}

func (d *Database) drop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.pools {
		p.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	names := []string{d.name}
	if d.workloads {
		names = append(names, d.name+"_w")
	}
	for _, name := range names {
		if _, err := shared.admin.Exec(ctx, "DROP DATABASE IF EXISTS \""+name+"\" WITH (FORCE)"); err != nil {
			d.t.Errorf("drop test database: %v", err)
		}
	}
}

// Name returns the database's name.
func (d *Database) Name() string { return d.name }

// URL returns the connection string of a role: one of pg.ServiceRoles() or pg.RoleOwner.
func (d *Database) URL(role string) string {
	d.t.Helper()
	return d.url(role, d.name)
}

func (d *Database) url(role, database string) string {
	d.t.Helper()
	u, err := pg.WithUser(shared.url, role, password(role), database)
	if err != nil {
		d.t.Fatal(err)
	}
	return u
}

// AdminURL returns the superuser's connection string to this database.
func (d *Database) AdminURL() string {
	d.t.Helper()
	cfg, err := pgx.ParseConfig(shared.url)
	if err != nil {
		d.t.Fatal(err)
	}
	u, err := pg.WithUser(shared.url, cfg.User, cfg.Password, d.name)
	if err != nil {
		d.t.Fatal(err)
	}
	return u
}

// Pool returns a pool that logs in as role; the same one at each call. It is closed when the test ends.
func (d *Database) Pool(role string) *pgxpool.Pool {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if p, ok := d.pools[role]; ok {
		return p
	}
	p, err := pg.Open(context.Background(), pg.Config{URL: d.URL(role), ApplicationName: "test " + role, MaxConns: 16})
	if err != nil {
		d.t.Fatal(err)
	}
	d.pools[role] = p
	return p
}

// OwnerPool returns a pool of gpuaas_owner, for changes that no service may make.
func (d *Database) OwnerPool() *pgxpool.Pool {
	d.t.Helper()
	return d.Pool(pg.RoleOwner)
}

// WorkloadURL returns workload_admin's connection string to a workload database of this test's own, made at the first
// call.
func (d *Database) WorkloadURL() string {
	d.t.Helper()
	name := d.name + "_w"
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.workloads {
		d.workloads = true
		ctx := Context(d.t)
		d.admin(ctx, "CREATE DATABASE \""+name+"\" OWNER "+pg.RoleWorkloadAdmin+" TEMPLATE template0"+shared.copying)
		d.admin(ctx, "REVOKE ALL ON DATABASE \""+name+"\" FROM PUBLIC")
	}
	return d.url(pg.RoleWorkloadAdmin, name)
}

// Exec runs a statement that a test makes up, as a role, on d.
func Exec(d *Database, role, sql string, args ...any) {
	d.t.Helper()
	if _, err := d.Pool(role).Exec(Context(d.t), sql, args...); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
}

// SetClockOffset sets how far the mesh clock of d is ahead of the real one (behind, if negative).
func SetClockOffset(d *Database, by time.Duration) {
	d.t.Helper()
	if _, err := d.OwnerPool().Exec(Context(d.t), "UPDATE mesh.clock_offset SET by = make_interval(secs => $1)",
		by.Seconds()); err != nil {
		d.t.Fatalf("set clock offset: %v", err)
	}
}

// StopClock stops the mesh clock of d: from then on only SetClockOffset moves it.
func StopClock(d *Database) {
	d.t.Helper()
	if _, err := d.OwnerPool().Exec(Context(d.t), "UPDATE mesh.clock_offset SET stopped = clock_timestamp()"); err != nil {
		d.t.Fatalf("stop clock: %v", err)
	}
}

// StartClock lets the stopped mesh clock of d go on, from the real time on.
func StartClock(d *Database) {
	d.t.Helper()
	if _, err := d.OwnerPool().Exec(Context(d.t), "UPDATE mesh.clock_offset SET stopped = NULL"); err != nil {
		d.t.Fatalf("start clock: %v", err)
	}
}

// SetRollback sets or ends rollback mode in d, as recovery does.
func SetRollback(d *Database, active bool) {
	d.t.Helper()
	_, err := d.OwnerPool().Exec(Context(d.t),
		`UPDATE recovery.rollback SET state = CASE WHEN $1 THEN 'active' ELSE 'none' END,
		since = CASE WHEN $1 THEN mesh.clock() END, version = version + 1`, active)
	if err != nil {
		d.t.Fatalf("set rollback mode: %v", err)
	}
}
