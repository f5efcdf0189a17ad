package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/internal/pg"
)

// Channel is the Postgres channel on which sequencers tell other processes that there are new numbers.
const Channel = "mesh_events"

// sequencerLock is the advisory lock under which numbers are given.
const sequencerLock = 0x67707561_0003

// SequencerDeps is what a sequencer works with. Pool logs in as the role sequencer; the rest but Logger may be nil.
type SequencerDeps struct {
	Pool *pgxpool.Pool
	// Wake is notified by this process after a commit that appended events.
	Wake *Signal
	// Numbered is notified after numbers were given.
	Numbered *Signal
	Logger   *slog.Logger
	// Observe is called after every round that did something or failed, for metrics.
	Observe func(SequencerResult, error)
}

// SequencerConfig bounds a sequencer; zero fields mean the defaults.
type SequencerConfig struct {
	// Batch is how many rows one transaction numbers; 1000.
	Batch int
	// Poll is how long an unwoken sequencer sleeps: other processes' rows are theirs to number, but they may have
	// died; 1 s.
	Poll time.Duration
	// MinInterval is the least time between two rounds, so that a storm of commits shares few of ours; 2 ms.
	MinInterval time.Duration
	// NotifyInterval is the least time between two NOTIFYs; 10 ms.
	NotifyInterval time.Duration
}

func (c SequencerConfig) withDefaults() SequencerConfig {
	if c.Batch <= 0 {
		c.Batch = 1000
	}
	if c.Poll <= 0 {
		c.Poll = time.Second
	}
	if c.MinInterval <= 0 {
		c.MinInterval = 2 * time.Millisecond
	}
	if c.NotifyInterval <= 0 {
		c.NotifyInterval = 10 * time.Millisecond
	}
	return c
}

// SequencerResult is what one round did.
type SequencerResult struct {
	// Numbered rows, the last of them at Last.
	Numbered int
	Last     int64
	Took     time.Duration
}

// Sequencer gives committed events their place. Every replica of every service runs one.
type Sequencer struct {
	deps SequencerDeps
	cfg  SequencerConfig

	mu    sync.Mutex
	floor floor
}

// NewSequencer checks its dependencies; it does not touch the database.
func NewSequencer(deps SequencerDeps, cfg SequencerConfig) (*Sequencer, error) {
	if deps.Pool == nil || deps.Logger == nil {
		return nil, errors.New("sequencer needs a pool and a logger")
	}
	return &Sequencer{deps: deps, cfg: cfg.withDefaults()}, nil
}

// Run numbers until ctx ends. A database that is away is waited for.
func (s *Sequencer) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	var numbered Signal
	first := numbered.C()
	g.Go(func() error { return s.notifyLoop(ctx, &numbered, first) })
	g.Go(func() error { return s.numberLoop(ctx, &numbered) })
	return g.Wait()
}

func (s *Sequencer) numberLoop(ctx context.Context, numbered *Signal) error {
	var failing backoff
	for {
		wake := s.deps.Wake.C()
		began := time.Now()
		res, err := s.runOnce(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		if s.deps.Observe != nil && (err != nil || res.Numbered > 0) {
			s.deps.Observe(res, err)
		}
		if res.Numbered > 0 {
			s.deps.Numbered.Notify()
			numbered.Notify()
		}
		pause := s.cfg.MinInterval - time.Since(began)
		switch {
		case err != nil:
			pause, wake = failing.next(ctx, s.deps.Logger, "numbering events", err), nil
		case res.Numbered == s.cfg.Batch:
			failing.reset()
			wake = nil // more is waiting
		default:
			failing.reset()
			if !sleep(ctx, s.cfg.Poll, wake) {
				return nil
			}
			pause, wake = s.cfg.MinInterval-time.Since(began), nil
		}
		if pause > 0 && !sleep(ctx, pause, wake) {
			return nil
		}
	}
}

// runOnce numbers one batch in one transaction.
//
// The lock is taken by a statement of its own: the next one then reads a snapshot taken under it and sees what the
// previous holder gave. The lock ends with the transaction, after its rows have become visible, so numbers appear in
// order and a reader that has seen n will never find anything below n afterwards.
func (s *Sequencer) runOnce(ctx context.Context) (SequencerResult, error) {
	began := time.Now()
	var res SequencerResult
	var waiting bool
	// Asked without the lock: an idle mesh polls and finds nothing. The order makes it a look at the end of an index; as
	// a bare EXISTS it scans the whole table once statistics from a busy hour say that open rows are everywhere.
	s.mu.Lock()
	defer s.mu.Unlock()
	from := s.floor.at(began)
	if err := s.deps.Pool.QueryRow(ctx, "SELECT (SELECT seq FROM events.event WHERE pos IS NULL AND seq > $1 ORDER BY seq LIMIT 1) IS NOT NULL", from).
		Scan(&waiting); err != nil {
		return res, fmt.Errorf("look for new events: %w", err)
	}
	if !waiting {
		return res, nil
	}
	var mine, oldest uint64
	var highest int64
	err := pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		// Whatever the statistics say of open rows, the way to them is their index.
		var locked, set string
		err := tx.QueryRow(ctx, `SELECT pg_advisory_xact_lock($1)::text, set_config('enable_seqscan', 'off', true), pg_current_xact_id()::text::bigint`,
			int64(sequencerLock)).Scan(&locked, &set, &mine)
		if err != nil {
			return fmt.Errorf("take sequencer lock: %w", err)
		}
		return tx.QueryRow(ctx, `
			WITH base AS (
				SELECT GREATEST(COALESCE((SELECT max(pos) FROM events.event), 0) + 1, (SELECT era << 40 FROM mesh.era)) AS pos
			), todo AS MATERIALIZED (
				SELECT t.seq, row_number() OVER (ORDER BY t.seq) - 1 AS n
				FROM (SELECT seq FROM events.event WHERE pos IS NULL AND seq > $2 ORDER BY seq LIMIT $1) t
			), done AS (
				UPDATE events.event e SET pos = base.pos + todo.n FROM todo, base WHERE e.seq = todo.seq AND e.pos IS NULL
				RETURNING e.pos
			)
			SELECT count(*), COALESCE(max(pos), 0), COALESCE((SELECT max(seq) FROM todo), 0), pg_snapshot_xmin(pg_current_snapshot())::text::bigint
			FROM done`, s.cfg.Batch, from).Scan(&res.Numbered, &res.Last, &highest, &oldest)
	})
	if err != nil {
		return SequencerResult{}, fmt.Errorf("number events: %w", err)
	}
	s.floor.saw(mine, oldest, highest, res.Numbered == s.cfg.Batch)
	res.Took = time.Since(began)
	return res, nil
}

// Drain numbers until nothing is left, for tests and for tools that have no loop.
func (s *Sequencer) Drain(ctx context.Context) error {
	for {
		res, err := s.runOnce(ctx)
		if err != nil {
			return err
		}
		if res.Numbered == 0 {
			return nil
		}
		s.deps.Numbered.Notify()
	}
}

// notifyLoop tells other processes, at most once per interval and never forgetting the last: the channel that it waits
// on next is taken before it notifies.
func (s *Sequencer) notifyLoop(ctx context.Context, numbered *Signal, next <-chan struct{}) error {
	for {
		if !sleep(ctx, 0, next) {
			return nil
		}
		next = numbered.C()
		// One statement, so one transaction; it has nothing to lose in a crash.
		_, err := s.deps.Pool.Exec(ctx, "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, '')", Channel)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		if err != nil {
			// Everybody polls as well.
			s.deps.Logger.DebugContext(ctx, "notifying of new events failed", slog.Any("error", err))
		}
		if !sleep(ctx, s.cfg.NotifyInterval, nil) {
			return nil
		}
	}
}

// sleep waits for d or for wake, whichever comes first; d of zero waits for wake alone. It reports whether ctx lives.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	var after <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		after = timer.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-wake:
	case <-after:
	}
	return true
}

// backoff spaces the attempts of a failing loop and keeps its log short: the first failure, then every tenth.
type backoff struct{ failures int }

func (b *backoff) reset() { b.failures = 0 }

func (b *backoff) next(ctx context.Context, log *slog.Logger, doing string, err error) time.Duration {
	b.failures++
	if b.failures%10 == 1 {
		log.WarnContext(ctx, "event loop failed", slog.String("doing", doing), slog.Any("error", err), slog.Int("failures", b.failures))
	}
	return min(20*time.Millisecond<<min(b.failures-1, 6), time.Second)
}
