package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

// ConsumerDeps holds the dependencies of a consumer. Pool logs in as the service; the rest but Logger may be nil.
type ConsumerDeps struct {
	Pool *pgxpool.Pool
	// Numbered wakes the consumer; Wake is the sequencer's, which WaitFor urges.
	Numbered, Wake *Signal
	Logger         *slog.Logger
	// Committed is called after a commit with the events that took effect in it, in order, by the loop itself. It is a
	// hint: it is not called for a commit whose answer was lost, or for one of another replica.
	Committed func(records []Record)
	// Together applies events of a batch in their order, to the same effect as Apply one by one. If it is nil, or has
	// failed for a batch, they are applied one by one.
	Together func(ctx context.Context, tx pgx.Tx, records []Record) error
	// Parked is called after an event was parked, for the incident and the metric.
	Parked func(r Record, err error)
	// Replayed is called in the transaction in which a parked event is applied again, after Apply.
	Replayed func(ctx context.Context, tx pgx.Tx, r Record) error
}

// ConsumerConfig names and bounds a consumer; zero fields but Name and Schema mean the defaults.
type ConsumerConfig struct {
	// Name is the key of the cursor; replicas of a service share it and take turns.
	Name string
	// Schema is the service's own: nodeapi, lifecycle, recovery or readmodel.
	Schema string
	// Kinds are the events to apply; none means all.
	Kinds []string
	// Batch is how many events one transaction applies; 200.
	Batch int
	// Poll is how long an unwoken consumer sleeps; 1 s.
	Poll time.Duration
	// Gather is the least time between the beginnings of two batches, so that the events which come one after another
	// share a transaction: after a pause of that length an event is applied at once. A batch that WaitFor waits for in
	// this process, or that follows a full one, begins at once. 200 ms.
	Gather time.Duration
	// InOrder means that an event must not be applied after later ones: what Apply makes of it depends on the order. A
	// parked event is not applied again then.
	InOrder bool
	// AsyncCommit does not wait for the disk at commits. A crash may then undo the latest effects together with the
	// cursor, and they are applied again: right for projections, wrong if a reply has promised the rows of Apply to a
	// client.
	AsyncCommit bool
	// Patience is how long the consumer tries an event that alone exceeds the statement timeout, before it parks the
	// event; 10 min.
	Patience time.Duration
}

var (
	takeCursor = pg.DefineByRole(writers, "events.take_cursor", func(schema string) string {
		return `SELECT c.pos,
				EXISTS (SELECT FROM ` + schema + `.parked_event p WHERE p.consumer = c.name AND p.asked_at IS NOT NULL) AS asked
			FROM ` + schema + `.event_cursor c WHERE c.name = $1 FOR UPDATE OF c SKIP LOCKED`
	})
	makeCursor = pg.DefineByRole(writers, "events.make_cursor", func(schema string) string {
		return `INSERT INTO ` + schema + `.event_cursor (name) SELECT $1
			WHERE NOT EXISTS (SELECT FROM ` + schema + `.event_cursor WHERE name = $1) ON CONFLICT (name) DO NOTHING`
	})
	moveCursor = pg.DefineByRole(writers, "events.move_cursor", func(schema string) string {
		return `UPDATE ` + schema + `.event_cursor SET pos = $2, updated_at = mesh.clock() WHERE name = $1`
	})
)

// cursor is a consumer's place in the log.
type cursor struct {
	Pos   int64 `db:"pos"`
	Asked bool  `db:"asked"` // parked events are to be applied again
}

// Consumer applies events in order; each takes effect in the database exactly once.
type Consumer struct {
	deps     ConsumerDeps
	cfg      ConsumerConfig
	advanced Signal
	awaited  Signal // WaitFor waits for a batch

	slow struct { // the event that timed out last; of Run alone
		pos   int64
		since time.Time
	}
}

// NewConsumer checks its dependencies; it does not touch the database.
func NewConsumer(deps ConsumerDeps, cfg ConsumerConfig) (*Consumer, error) {
	if deps.Pool == nil || deps.Logger == nil || cfg.Name == "" || cfg.Schema == "" {
		return nil, errors.New("consumer needs a pool, a logger, a name and a schema")
	}
	if !slices.Contains(writers, cfg.Schema) {
		return nil, fmt.Errorf("consumer %s: no cursors in schema %q, only in %q", cfg.Name, cfg.Schema, writers)
	}
	if cfg.Batch <= 0 {
		cfg.Batch = 200
	}
	if cfg.Poll <= 0 {
		cfg.Poll = time.Second
	}
	if cfg.Gather <= 0 {
		cfg.Gather = 200 * time.Millisecond
	}
	if cfg.Patience <= 0 {
		cfg.Patience = 10 * time.Minute
	}
	return &Consumer{deps: deps, cfg: cfg}, nil
}

// Name returns the name of the consumer's cursor.
func (c *Consumer) Name() string { return c.cfg.Name }

// Run applies events until ctx ends. While the database cannot be reached, Run waits for it.
func (c *Consumer) Run(ctx context.Context, apply Apply) error {
	var failing backoff
	known := int64(-1)
	for {
		wake, began := c.deps.Numbered.C(), time.Now()
		res, err := c.runOnce(ctx, apply, known, c.sharedHorizon)
		if err == nil && res.asked {
			res.replayed, err = c.replayAsked(ctx, apply)
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		switch {
		case err != nil:
			if !sleep(ctx, failing.next(ctx, c.deps.Logger, "applying events", err), nil) {
				return nil
			}
			continue
		case res.busy, res.asked:
			known = -1
		default:
			known = res.pos
		}
		failing.reset()
		if res.more || res.replayed {
			continue
		}
		rest := c.deps.Numbered.untilTogether(c.cfg.Poll)
		if res.busy {
			rest = c.cfg.Poll // the replica that holds the cursor may die
		}
		if !sleep(ctx, rest, wake) || !c.gather(ctx, began) {
			return nil
		}
		select {
		case <-wake:
			known = -1 // there is something new: the end of the log need not be read first
		default:
		}
	}
}

// gather sleeps until a batch may follow the one that began at began, and reports whether ctx is still alive.
func (c *Consumer) gather(ctx context.Context, began time.Time) bool {
	awaited := c.awaited.C()
	pause := c.cfg.Gather - time.Since(began)
	return pause <= 0 || sleep(ctx, pause, awaited)
}

// Drain applies events until the end of the log, for tests and tools. It waits for other replicas of the consumer.
func (c *Consumer) Drain(ctx context.Context, apply Apply) error {
	known := int64(-1)
	for {
		res, err := c.runOnce(ctx, apply, known, c.horizon)
		if err != nil {
			return err
		}
		switch {
		case res.busy:
			if !sleep(ctx, 5*time.Millisecond, nil) {
				return ctx.Err()
			}
		case !res.more:
			return nil
		default:
			known = res.pos
		}
	}
}

// horizon reads the end of the log.
func (c *Consumer) horizon(ctx context.Context) (int64, error) { return Horizon(ctx, c.deps.Pool) }

// sharedHorizon returns horizon, or the position that another consumer of the process has read a moment ago.
func (c *Consumer) sharedHorizon(ctx context.Context) (int64, error) {
	return c.deps.Numbered.horizon(ctx, c.horizon)
}

// round is the result of one transaction of a consumer.
type round struct {
	pos   int64 // the cursor after it
	more  bool  // the log has more events
	busy  bool  // another replica has the cursor
	asked bool  // parked events are to be applied again
	// replayed: some of these have been tried, and others may be left
	replayed bool
	applied  []Record // took effect
	parked   []parkedRecord
}

type parkedRecord struct {
	record Record
	err    error
}

// runOnce applies one batch. known is a lower bound of the cursor's position, -1 if unknown: if the log has nothing
// beyond it, the round ends without a transaction. horizon returns the end of the log.
func (c *Consumer) runOnce(ctx context.Context, apply Apply, known int64,
	horizon func(context.Context) (int64, error),
) (round, error) {
	if known >= 0 {
		horizon, err := horizon(ctx)
		if err != nil || horizon <= known {
			return round{pos: known}, err
		}
	}
	// Nearly every batch succeeds as a whole; only a batch that failed is applied again, with one savepoint per event.
	res, err := c.applyBatch(ctx, apply, false)
	if err != nil && (Poisonous(ctx, err) || timedOut(ctx, err)) {
		res, err = c.applyBatch(ctx, apply, true)
	}
	if err != nil {
		return round{}, err
	}
	for _, p := range res.parked {
		c.deps.Logger.ErrorContext(ctx, "event parked", slog.String("consumer", c.cfg.Name), slog.Int64("pos", p.record.Pos),
			slog.String("event_id", p.record.ID), slog.String("kind", p.record.Kind), slog.Any("error", p.err))
		if c.deps.Parked != nil {
			c.deps.Parked(p.record, p.err)
		}
	}
	if len(res.applied) > 0 && c.deps.Committed != nil {
		c.deps.Committed(res.applied)
	}
	if !res.busy {
		c.advanced.Notify()
	}
	return res, nil
}

func (c *Consumer) applyBatch(ctx context.Context, apply Apply, careful bool) (round, error) {
	var res round
	err := pg.InTx(ctx, c.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		res = round{}
		at, ok, err := c.lockCursor(ctx, tx)
		if err != nil {
			return err
		}
		if !ok {
			res.busy = true
			return nil
		}
		records, next, err := Read(ctx, tx, at.Pos, c.cfg.Kinds, c.cfg.Batch)
		if err != nil {
			return err
		}
		res.pos, res.more, res.asked = next, len(records) == c.cfg.Batch, at.Asked
		if next == at.Pos {
			return nil
		}
		// If a crash undoes a cursor's move over events of other kinds, nothing is lost.
		if c.cfg.AsyncCommit || len(records) == 0 {
			if _, err := pg.Exec(ctx, tx, commitAsync); err != nil {
				return fmt.Errorf("set asynchronous commit: %w", err)
			}
		}
		if !careful && c.deps.Together != nil && len(records) > 0 {
			if err := tryTogether(ctx, tx, c.deps.Together, records); err != nil {
				return err
			}
			res.applied, records = records, nil
		}
		for _, r := range records {
			if !careful {
				if err := try(ctx, tx, apply, r); err != nil {
					return err
				}
				res.applied = append(res.applied, r)
				continue
			}
			poison, err := c.applyCarefully(ctx, tx, apply, r)
			switch {
			case err != nil:
				return err
			case poison != nil:
				res.parked = append(res.parked, parkedRecord{record: r, err: poison})
			default:
				res.applied = append(res.applied, r)
			}
		}
		_, err = pg.Exec(ctx, tx, moveCursor.For(c.cfg.Schema), c.cfg.Name, next)
		if err != nil {
			return fmt.Errorf("move cursor: %w", err)
		}
		return nil
	})
	if err != nil {
		return round{}, fmt.Errorf("consume events as %s: %w", c.cfg.Name, err)
	}
	return res, nil
}

// lockCursor takes the cursor for this transaction, unless another replica has it.
func (c *Consumer) lockCursor(ctx context.Context, tx pgx.Tx) (cursor, bool, error) {
	at, err := pg.One[cursor](ctx, tx, takeCursor.For(c.cfg.Schema), c.cfg.Name)
	if err == nil {
		return at, true, nil
	}
	if !pg.IsNoRows(err) {
		return cursor{}, false, fmt.Errorf("take cursor: %w", err)
	}
	// Not there yet, or taken. Only what is not there is inserted, since an insertion waits for the transaction of the
	// replica that has the cursor, or is just inserting it.
	tag, err := pg.Exec(ctx, tx, makeCursor.For(c.cfg.Schema), c.cfg.Name)
	if err != nil {
		return cursor{}, false, fmt.Errorf("make cursor: %w", err)
	}
	return cursor{}, tag.RowsAffected() == 1, nil
}
