package idle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
)

var (
	vacuumAll = pg.DefineUnprepared(pg.RoleOwner, "idle.vacuum_all", "a vacuum cannot be planned",
		func(struct{}) string { return `VACUUM (ANALYZE)` })
	// Statistics that were made anew leave their former rows, which autovacuum would take next. They are counted when the
	// session that made them ends.
	vacuumAgain = pg.DefineUnprepared(pg.RoleOwner, "idle.vacuum_again", "a vacuum cannot be planned",
		func(struct{}) string { return `VACUUM` })
	// Autovacuum visits each of them, also those that a mesh does not use.
	listDatabases = pg.Define(pg.RoleOwner, "idle.list_databases",
		`SELECT d.datname::text FROM pg_database d WHERE d.datallowconn`)
	isConnected = pg.Define(pg.RoleOwner, "idle.is_connected",
		`SELECT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = ANY ($1::bigint[]))`)
)

// vacuumTables vacuums and analyzes all tables, so that the work that autovacuum does once, in the first minutes of a
// server all of whose tables are new, is not counted. It also puts off the work that autovacuum does for as long as the
// mesh updates its rows: a short stretch counts less of that than a mesh at rest has. Without an administrator's
// connection it vacuums the mesh's own tables alone.
func vacuumTables(ctx context.Context, admin, owner string) error {
	if admin == "" {
		return vacuum(ctx, owner, "", vacuumAll.For(struct{}{}))
	}
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	databases, err := pg.Values[string](ctx, conn, listDatabases)
	if err != nil {
		_ = conn.Close(ctx)
		return fmt.Errorf("list the databases: %w", err)
	}
	if err := gone(ctx, owner, conn); err != nil {
		return err
	}
	for _, how := range []*pg.Statement{vacuumAll.For(struct{}{}), vacuumAgain.For(struct{}{})} {
		for _, name := range databases {
			if err := vacuum(ctx, admin, name, how); err != nil {
				return err
			}
		}
	}
	return nil
}

// connect connects to a database, that of the address if none is named.
func connect(ctx context.Context, url, database string) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("read the address of the database: %w", err)
	}
	cfg.Database = cmp.Or(database, cfg.Database)
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to database %s: %w", cfg.Database, err)
	}
	return conn, nil
}

// vacuum vacuums a database, that of the address if none is named, over a connection that has ended when it returns.
func vacuum(ctx context.Context, url, database string, how *pg.Statement) error {
	conn, err := connect(ctx, url, database)
	if err != nil {
		return err
	}
	if _, err := pg.Exec(ctx, conn, how); err != nil {
		_ = conn.Close(ctx)
		return fmt.Errorf("vacuum database %s: %w", conn.Config().Database, err)
	}
	return gone(ctx, url, conn)
}

// gone closes connections and waits until the server has ended their sessions, and so has counted their work.
func gone(ctx context.Context, url string, conns ...*pgx.Conn) error {
	var pids []int64
	for _, conn := range conns {
		pids = append(pids, int64(conn.PgConn().PID()))
		if err := conn.Close(ctx); err != nil {
			return fmt.Errorf("close a connection: %w", err)
		}
	}
	other, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer other.Close(context.WithoutCancel(ctx)) // nothing is kept
	for range 200 {
		connected, err := pg.Value[bool](ctx, other, isConnected, pids)
		if err != nil {
			return fmt.Errorf("read the sessions: %w", err)
		}
		if !connected {
			return nil
		}
		if !app.Sleep(ctx, 50*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	return errors.New("a session goes on after its connection was closed")
}

var countAutovacuums = pg.Define(pg.RoleOwner, "idle.count_autovacuums", `
	SELECT COALESCE(sum(t.autovacuum_count), 0)::bigint AS vacuums,
		COALESCE(sum(t.autoanalyze_count), 0)::bigint AS analyzes FROM pg_stat_all_tables t`)

// vacuums is how many tables the server has vacuumed and analyzed by itself.
type vacuums struct {
	Vacuums  int64 `db:"vacuums"`
	Analyzes int64 `db:"analyzes"`
}

// countVacuums adds up all databases; without an administrator's connection it counts in the mesh's own. Its sessions
// have ended when it returns.
func countVacuums(ctx context.Context, admin, owner string) (vacuums, error) {
	url := cmp.Or(admin, owner)
	var total vacuums
	var conns []*pgx.Conn
	count := func(database string) error {
		conn, err := connect(ctx, url, database)
		if err != nil {
			return err
		}
		conns = append(conns, conn)
		one, err := pg.One[vacuums](ctx, conn, countAutovacuums)
		if err != nil {
			return fmt.Errorf("count the vacuums of database %s: %w", conn.Config().Database, err)
		}
		total.Vacuums, total.Analyzes = total.Vacuums+one.Vacuums, total.Analyzes+one.Analyzes
		return nil
	}
	err := count("")
	if err == nil && admin != "" {
		mine := conns[0].Config().Database
		var list []string
		list, err = pg.Values[string](ctx, conns[0], listDatabases)
		for _, name := range list {
			if name != mine && err == nil {
				err = count(name)
			}
		}
	}
	return total, errors.Join(err, gone(ctx, url, conns...))
}
