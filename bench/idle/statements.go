package idle

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/dev"
)

// The statements below are run as the administrator of the server, who alone sees the cost of the statements of all
// roles.
var (
	createStatements = pg.DefineUnprepared(pg.RoleOwner, "idle.create_statements", "the bench makes the extension",
		func(struct{}) string { return `CREATE EXTENSION IF NOT EXISTS pg_stat_statements` })
	resetStatements = pg.DefineUnprepared(pg.RoleOwner, "idle.reset_statements", "the bench makes the extension",
		func(struct{}) string { return `SELECT pg_stat_statements_reset()` })
	// readStatements adds up by name, which is the comment before the text of each statement of the product. A statement
	// without one keeps its first words.
	readStatements = pg.DefineUnprepared(pg.RoleOwner, "idle.read_statements", "the bench makes the extension",
		func(struct{}) string {
			return `
	SELECT COALESCE(substring(s.query FROM '^/\* ([a-z0-9_.]+) \*/'),
		left(regexp_replace(s.query, '\s+', ' ', 'g'), 40)) AS name,
		sum(s.calls)::bigint AS calls, sum(s.wal_bytes)::bigint AS wal
	FROM pg_stat_statements s WHERE s.toplevel GROUP BY 1 ORDER BY 2 DESC, 3 DESC, 1`
		})
	// countSessions counts the connections by the application that opened them.
	countSessions = pg.Define(pg.RoleOwner, "idle.count_sessions", `
	SELECT a.application_name AS name, count(*)::bigint AS calls, 0::bigint AS wal
	FROM pg_stat_activity a WHERE a.datid IS NOT NULL AND a.pid <> pg_backend_pid() GROUP BY 1 ORDER BY 1`)
)

// cost is the cost of a statement, all its calls together.
type cost struct {
	Name  string `db:"name"`
	Calls int64  `db:"calls"`
	WAL   int64  `db:"wal"`
}

// statements reads the cost of each statement of a mesh. Without a connection it reads none.
type statements struct {
	conn     *pgx.Conn
	url      string // of the administrator
	inspects bool   // the server can report the records of the write-ahead log
}

// openStatements connects to the server of a mesh. The connection stays open while the mesh is measured, and counts as
// no connection of the mesh.
func openStatements(ctx context.Context, mesh *dev.Mesh) (statements, error) {
	url := mesh.StatementsURL()
	if url == "" {
		return statements{}, nil
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return statements{}, fmt.Errorf("connect to the database: %w", err)
	}
	if _, err := pg.Exec(ctx, conn, createStatements.For(struct{}{})); err != nil {
		_ = conn.Close(ctx)
		return statements{}, fmt.Errorf("make the extension of statements: %w", err)
	}
	out := statements{conn: conn, url: url}
	if out.inspects, err = pg.Value[bool](ctx, conn, hasInspect); err == nil && out.inspects {
		_, err = pg.Exec(ctx, conn, createInspect.For(struct{}{}))
	}
	if err != nil {
		_ = conn.Close(ctx)
		return statements{}, fmt.Errorf("make the extension that reads the write-ahead log: %w", err)
	}
	return out, nil
}

func (s statements) close(ctx context.Context) {
	if s.conn != nil {
		_ = s.conn.Close(context.WithoutCancel(ctx))
	}
}

// begin resets the counters.
func (s statements) begin(ctx context.Context) error {
	if s.conn == nil {
		return nil
	}
	if _, err := pg.Exec(ctx, s.conn, resetStatements.For(struct{}{})); err != nil {
		return fmt.Errorf("reset the counters of statements: %w", err)
	}
	return nil
}

// countedStatements holds the cost of each statement, and the connections by application; nil if the server does not
// report them.
type countedStatements struct{ costs, sessions []cost }

func (s statements) end(ctx context.Context) (countedStatements, error) {
	if s.conn == nil {
		return countedStatements{}, nil
	}
	list, err := pg.All[cost](ctx, s.conn, readStatements.For(struct{}{}))
	if err != nil {
		return countedStatements{}, fmt.Errorf("read the counters of statements: %w", err)
	}
	sessions, err := pg.All[cost](ctx, s.conn, countSessions)
	if err != nil {
		return countedStatements{}, fmt.Errorf("read the sessions: %w", err)
	}
	return countedStatements{costs: list, sessions: sessions}, nil
}

// describeStatements adds calls and bytes of the write-ahead log a minute by statement to the details of a result, of
// those that come about once in two minutes or more. Calls are no transactions where several go in one.
func describeStatements(details map[string]any, counted countedStatements, length time.Duration) {
	for i, c := range counted.costs {
		calls, wal := float64(c.Calls)/length.Minutes(), float64(c.WAL)/length.Minutes()
		if calls >= .5 {
			details[fmt.Sprintf("statement %02d %s", i+1,
				c.Name)] = fmt.Sprintf("%.1f calls a minute, %.0f bytes of WAL a minute", calls, math.Round(wal))
		}
	}
	for _, c := range counted.sessions {
		details["sessions of "+c.Name] = c.Calls
	}
}
