package events

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// MaxWait is the longest that WaitFor waits.
const MaxWait = 2 * time.Second

var (
	// ErrBehind is returned if the consumer has not reached the event in time; a read would be stale.
	ErrBehind = errors.New("the projection has not reached this position yet")
	// ErrUnknownPosition is returned if no event has this id: the token is not one of ours.
	ErrUnknownPosition = errors.New("unknown position token")
)

var (
	// A seq is in the first row that reaches as high, or, if its event committed late, in a later row.
	readPositions = pg.DefineByRole(writers, "events.read_positions", func(schema string) string {
		return positionsOf(schema, `events.event e WHERE e.id = $1::uuid`)
	})
	readPositionsOfSeq = pg.DefineByRole(writers, "events.read_positions_of_seq", func(schema string) string {
		return positionsOf(schema, `(SELECT $1::bigint AS seq) e`)
	})

	readBlockers = pg.DefineShared(readers, "events.read_blockers", `
		SELECT DISTINCT b.usename || ' (pid ' || b.pid || ')'
		FROM pg_stat_activity a
			CROSS JOIN unnest(pg_blocking_pids(a.pid)) AS w (pid)
			JOIN pg_stat_activity b ON b.pid = w.pid
		WHERE a.usename = $1 AND b.usename <> $1
		ORDER BY 1
		LIMIT 5`)

	// In a large log the cost of measureLag would make Postgres compile its plan, which takes longer than the query
	// itself.
	planWithoutJIT = pg.DefineShared(writers, "events.plan_without_jit", `SELECT set_config('jit', 'off', true)`)

	measureLag = pg.DefineByRole(writers, "events.measure_lag", func(schema string) string {
		return `
		WITH cur AS (SELECT COALESCE((SELECT pos FROM ` + schema + `.event_cursor WHERE name = $1), 0) AS pos)
		SELECT cur.pos AS cursor, COALESCE((SELECT max(last_pos) FROM events.numbered), 0) AS horizon,
			COALESCE((SELECT sum(n.last_pos - GREATEST(n.first_pos - 1, cur.pos))
				FROM events.numbered n WHERE n.last_pos > cur.pos), 0)::bigint AS events,
			unnumbered.n AS unnumbered, COALESCE(EXTRACT(EPOCH FROM mesh.clock() - unnumbered.oldest), 0)::float8 AS oldest,
			(SELECT count(*) FROM ` + schema + `.parked_event p WHERE p.consumer = $1) AS parked
		FROM cur, (
			SELECT count(*) AS n, min(e.created_at) AS oldest
			FROM unnest(COALESCE((SELECT n.open FROM events.numbered n ORDER BY n.last_pos DESC LIMIT 1), '{[1,)}')) r
			CROSS JOIN LATERAL (
				SELECT x.created_at FROM events.event x WHERE x.seq >= lower(r) AND x.seq < COALESCE(upper(r), 9223372036854775807)
				ORDER BY x.seq LIMIT 10000) e
		) unnumbered`
	})

	measureAge = pg.DefineShared(writers, "events.measure_age", `
		SELECT COALESCE(max(EXTRACT(EPOCH FROM mesh.clock() - created_at)), 0)::float8 FROM events.event
		WHERE seq = ANY($1) AND seq BETWEEN (SELECT min(s) FROM unnest($1) s) AND (SELECT max(s) FROM unnest($1) s)`)
)

// positionsOf reads the position of an event and of a cursor. An event's row stays until its partition is dropped,
// which is after its number was cut: by then all cursors were past it, so its position is returned as 1.
func positionsOf(schema, event string) string {
	return `
		SELECT CASE
			WHEN COALESCE((SELECT n.open FROM events.numbered n ORDER BY n.last_pos DESC LIMIT 1), '{[1,)}') @> e.seq THEN 0
			ELSE COALESCE((
				SELECT n.first_pos + (SELECT sum(LEAST(upper(r), e.seq) - lower(r)) FROM unnest(n.seqs) r WHERE lower(r) <= e.seq)
				FROM events.numbered n WHERE n.highest >= e.seq AND n.seqs @> e.seq ORDER BY n.highest LIMIT 1), 1)
			END::bigint AS pos, COALESCE((SELECT pos FROM ` + schema + `.event_cursor WHERE name = $2), 0) AS cursor
		FROM ` + event
}

// UnreadSQL returns an expression for the age in seconds of the oldest event that the consumer whose cursor is in
// schema has not read, numbered or not; 0 if it has read all. A query that combines what such a consumer wrote with
// what it reads from tables directly must not draw conclusions while the consumer is behind. The expression reads a few
// rows, however far behind the consumer is.
func UnreadSQL(schema, consumer string) string {
	return `COALESCE((SELECT max(EXTRACT(EPOCH FROM mesh.clock() - unread.created_at)) FROM (
		SELECT e.created_at
			FROM unnest(COALESCE((SELECT n.open FROM events.numbered n ORDER BY n.last_pos DESC LIMIT 1), '{[1,)}')) r
			CROSS JOIN LATERAL (
				SELECT x.created_at FROM events.event x WHERE x.seq >= lower(r) AND x.seq < COALESCE(upper(r), 9223372036854775807)
				ORDER BY x.seq LIMIT 1) e
		UNION ALL
		SELECT x.created_at FROM (
				SELECT lower(n.seqs) AS seq FROM events.numbered n WHERE n.last_pos > COALESCE((
						SELECT c.pos FROM ` + schema + `.event_cursor c WHERE c.name = '` + consumer + `'), 0)
				ORDER BY n.last_pos LIMIT 1) f
			JOIN events.event x ON x.seq = f.seq
	) unread), 0)`
}

// WaitFor returns once the event is numbered and this consumer's cursor, on whichever replica, has passed it. It waits
// at most MaxWait, less if ctx ends sooner. The token is an event's id, as Append returned it; empty waits for nothing.
func (c *Consumer) WaitFor(ctx context.Context, token string) error {
	if token == "" {
		return nil
	}
	if !ids.Valid(token) {
		return ErrUnknownPosition
	}
	return c.waitFor(ctx, readPositions.For(c.cfg.Schema), token)
}

// WaitForSeq is WaitFor for an event that is known by its seq.
func (c *Consumer) WaitForSeq(ctx context.Context, seq int64) error {
	return c.waitFor(ctx, readPositionsOfSeq.For(c.cfg.Schema), seq)
}

func (c *Consumer) waitFor(ctx context.Context, read *pg.Statement, event any) error {
	ctx, cancel := context.WithTimeout(ctx, MaxWait)
	defer cancel()
	// Signals of this process come at once; another replica's progress is visible only in the table.
	const tick = 10 * time.Millisecond
	for {
		numbered, advanced := c.deps.Numbered.C(), c.advanced.C()
		at, err := c.positions(ctx, read, event)
		switch {
		case err == nil && at.Pos > 0 && at.Cursor >= at.Pos:
			return nil
		case errors.Is(err, ErrUnknownPosition):
			return err
		case ctx.Err() == nil && err != nil:
			return fmt.Errorf("wait for position: %w", err)
		}
		switch {
		case err == nil && at.Pos == 0:
			c.deps.Wake.Urge()
			advanced = numbered
		case err == nil:
			c.awaited.Notify()
		}
		timer := time.NewTimer(tick)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w: %w", ErrBehind, ctx.Err())
		case <-advanced:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// positions are an event's position (0 if it is not numbered yet, 1 if its number was cut) and the cursor's (0 if there
// is none yet).
type positions struct {
	Pos    int64 `db:"pos"`
	Cursor int64 `db:"cursor"`
}

func (c *Consumer) positions(ctx context.Context, read *pg.Statement, event any) (positions, error) {
	at, err := pg.One[positions](ctx, c.deps.Pool, read, event, c.cfg.Name)
	if pg.IsNoRows(err) {
		err = ErrUnknownPosition
	}
	return at, err
}

// Lag is how far a consumer is behind.
type Lag struct {
	// Cursor and Horizon are positions; Events is the number of events between them, which wait to be applied (other kinds
	// included).
	Cursor, Horizon, Events int64
	// Unnumbered is the number of events that wait for a sequencer, counting 10,000 at most of each range of the log that
	// is not numbered; Oldest is the age of the oldest event that is not applied.
	Unnumbered int64
	Oldest     time.Duration
	// Parked is the number of events that were passed over.
	Parked int64
}

// lagRow is what measureLag reads of a Lag.
type lagRow struct {
	Cursor     int64   `db:"cursor"`
	Horizon    int64   `db:"horizon"`
	Events     int64   `db:"events"`
	Unnumbered int64   `db:"unnumbered"`
	Oldest     float64 `db:"oldest"` // of those without a number, in seconds
	Parked     int64   `db:"parked"`
}

// Blockers returns the sessions that a sequencer waits for, as `role (pid n)`, other sequencers left out. Any role may
// call it: Postgres shows the process and role of each session to all roles, and the query of a session to its owner
// alone.
func Blockers(ctx context.Context, q pg.Querier) ([]string, error) {
	out, err := pg.Values[string](ctx, q, readBlockers, pg.RoleSequencer)
	if err != nil {
		return nil, fmt.Errorf("read what numbering waits for: %w", err)
	}
	return out, nil
}

// Lag returns how far the consumer is behind, for readiness, metrics and status.
func (c *Consumer) Lag(ctx context.Context) (Lag, error) {
	var row lagRow
	var batch pg.Batch
	batch.Queue(planWithoutJIT)
	batch.Queue(measureLag.For(c.cfg.Schema), c.cfg.Name).Query(func(rows pgx.Rows) error {
		var err error
		row, err = pgx.CollectOneRow(rows, pgx.RowToStructByName[lagRow])
		return err
	})
	if err := batch.Send(ctx, c.deps.Pool); err != nil {
		return Lag{}, fmt.Errorf("measure lag of %s: %w", c.cfg.Name, err)
	}
	oldest := row.Oldest
	l := Lag{
		Cursor: row.Cursor, Horizon: row.Horizon, Events: row.Events, Unnumbered: row.Unnumbered, Parked: row.Parked,
		Oldest: time.Duration(oldest * float64(time.Second)),
	}
	if l.Events == 0 {
		return l, nil
	}
	first, err := numbersAfter(ctx, c.deps.Pool, l.Cursor, 1)
	if err == nil {
		oldest, err = pg.Value[float64](ctx, c.deps.Pool, measureAge, first.seqs)
	}
	if err != nil {
		return Lag{}, fmt.Errorf("measure lag of %s: %w", c.cfg.Name, err)
	}
	l.Oldest = max(l.Oldest, time.Duration(oldest*float64(time.Second)))
	return l, nil
}
