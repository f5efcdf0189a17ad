package reconnect

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// The statements below are run as the administrator of the server: no role of a service reads all of it.
var (
	newestEvent = pg.Define(pg.RoleOwner, "reconnect.newest_event", `
	SELECT COALESCE(max(e.seq), 0) FROM events.event e`)
	countEvents = pg.Define(pg.RoleOwner, "reconnect.count_events", `
	SELECT e.kind AS name, count(*) AS n FROM events.event e WHERE e.seq > $1 GROUP BY 1 ORDER BY 1`)
	countVerdicts = pg.Define(pg.RoleOwner, "reconnect.count_verdicts", `
	SELECT 'verdicts' AS name, count(*) AS n FROM recovery.verdict v
		WHERE v.node_id <> '00000000-0000-0000-0000-000000000000'
	UNION ALL SELECT 'periods', count(*) FROM recovery.verdict_period p
		WHERE p.node_id <> '00000000-0000-0000-0000-000000000000'`)
	createStatements = pg.DefineUnprepared(pg.RoleOwner, "reconnect.create_statements", "the bench makes the extension",
		func(struct{}) string { return `CREATE EXTENSION IF NOT EXISTS pg_stat_statements` })
	resetStatements = pg.DefineUnprepared(pg.RoleOwner, "reconnect.reset_statements", "the bench makes the extension",
		func(struct{}) string { return `SELECT pg_stat_statements_reset()` })
	// readStatements adds up by name, which is the comment before the text of each statement of the product.
	readStatements = pg.DefineUnprepared(pg.RoleOwner, "reconnect.read_statements", "the bench makes the extension",
		func(struct{}) string {
			return `
	SELECT COALESCE(substring(s.query FROM '^/\* ([a-z0-9_.]+) \*/'),
		left(regexp_replace(s.query, '\s+', ' ', 'g'), 40)) AS name,
		sum(s.calls)::bigint AS calls, sum(s.rows)::bigint AS rows, sum(s.total_exec_time)::float8 AS took,
		sum(s.wal_bytes)::bigint AS wal
	FROM pg_stat_statements s WHERE s.toplevel GROUP BY 1 ORDER BY 4 DESC LIMIT 12`
		})
)

// written is the number of rows of a kind.
type written struct {
	Name string `db:"name"`
	N    int64  `db:"n"`
}

// statement is the cost of a statement, all its calls together.
type statement struct {
	Name  string  `db:"name"`
	Calls int64   `db:"calls"`
	Rows  int64   `db:"rows"`
	Took  float64 `db:"took"` // milliseconds
	WAL   int64   `db:"wal"`
}

// eventLog reads what the outages have left in the database, and what the returns cost it.
type eventLog struct {
	conn   *pgx.Conn
	from   int64 // the newest event before the first outage
	counts bool  // the server counts what statements cost
	last   []statement
}

func (w *world) openLog(ctx context.Context) (*eventLog, error) {
	server := w.cluster.Stores.Postgres
	conn, err := pgx.Connect(ctx, server.AdminURLOf(pg.DatabaseMesh))
	if err != nil {
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	l := &eventLog{conn: conn, counts: server.CountsStatements()}
	if l.from, err = pg.Value[int64](ctx, conn, newestEvent); err == nil && l.counts {
		_, err = pg.Exec(ctx, conn, createStatements.For(struct{}{}))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the database: %w", err), conn.Close(ctx))
	}
	return l, nil
}

func (l *eventLog) close(ctx context.Context) { _ = l.conn.Close(context.WithoutCancel(ctx)) } // nothing is kept

// begin resets the counters of statements.
func (l *eventLog) begin(ctx context.Context) error {
	if !l.counts {
		return nil
	}
	if _, err := pg.Exec(ctx, l.conn, resetStatements.For(struct{}{})); err != nil {
		return fmt.Errorf("reset the counters of statements: %w", err)
	}
	return nil
}

// end reads the counters of statements.
func (l *eventLog) end(ctx context.Context) error {
	if !l.counts {
		return nil
	}
	var err error
	if l.last, err = pg.All[statement](ctx, l.conn, readStatements.For(struct{}{})); err != nil {
		return fmt.Errorf("read the counters of statements: %w", err)
	}
	return nil
}

// describe puts the events of each return, the rows of verdicts on nodes, and the statements that took longest in the
// last return into details.
func (l *eventLog) describe(ctx context.Context, details map[string]any, agents, rounds int) error {
	events, err := pg.All[written](ctx, l.conn, countEvents, l.from)
	if err != nil {
		return fmt.Errorf("count events: %w", err)
	}
	verdicts, err := pg.All[written](ctx, l.conn, countVerdicts)
	if err != nil {
		return fmt.Errorf("count verdicts: %w", err)
	}
	var all int64
	var kinds []string
	returns := float64(agents * rounds)
	for _, e := range events {
		all += e.N
		if share := round(float64(e.N) / returns); share > 0 {
			kinds = append(kinds, fmt.Sprintf("%s %.2f", e.Name, share))
		}
	}
	details["events_each_return"] = round(float64(all) / returns)
	details["events_each_return_by_kind"] = strings.Join(kinds, ", ")
	for _, v := range verdicts {
		details["rows_of_"+v.Name+"_on_nodes"] = v.N
	}
	for i, s := range l.last {
		details[fmt.Sprintf("statement %02d %s", i+1, s.Name)] = fmt.Sprintf(
			"%d calls, %d rows, %.2f ms and %d bytes of WAL for each agent", s.Calls, s.Rows, s.Took/float64(agents),
			s.WAL/int64(agents))
	}
	return nil
}
