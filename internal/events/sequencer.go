package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
)

// Channel is the Postgres channel on which sequencers tell other processes that there are new numbers.
const Channel = "mesh_events"

// The advisory locks of numbering: the session that numbers holds sequencerLock, which events.number() in the database
// ensures, and at most one session waits for it.
const (
	sequencerLock = 0x67707561_0003
	nextLock      = 0x67707561_0004
)

// SequencerDeps holds the dependencies of a sequencer. Pool logs in as the role sequencer; the rest but Logger may be
// nil.
type SequencerDeps struct {
	Pool *pgxpool.Pool
	// Wake is notified by this process after a commit that appended events.
	Wake *Signal
	// Numbered is notified after numbers were given.
	Numbered *Signal
	Logger   *slog.Logger
	// Observe is called after every round that numbered something or failed, for metrics.
	Observe func(SequencerResult, error)
}

// SequencerConfig bounds a sequencer; zero fields mean the defaults.
type SequencerConfig struct {
	// Batch is how many rows one transaction numbers; 1000.
	Batch int
	// Poll is how long an unwoken sequencer sleeps: other processes number their own rows, but they may have died; 1 s,
	// and Signal.Period of it if Numbered listens.
	Poll time.Duration
	// MinInterval is the least time between two rounds that are waited for, by WaitFor; 10 ms.
	MinInterval time.Duration
	// Linger is the least time between two other rounds, so that many commits in a short time are numbered in few rounds:
	// after a pause of that length a commit is numbered at once; 40 ms, and never less than MinInterval.
	Linger time.Duration
	// NotifyInterval is the least time between two NOTIFYs; 10 ms.
	NotifyInterval time.Duration
}

var sequencerDefaults = SequencerConfig{
	Batch: 1000, Poll: time.Second, MinInterval: 10 * time.Millisecond, Linger: 40 * time.Millisecond,
	NotifyInterval: 10 * time.Millisecond,
}

// SequencerResult is the result of one round.
type SequencerResult struct {
	// Numbered rows, the last of them at Last.
	Numbered int
	Last     int64
	Took     time.Duration
	// Covered is true if the round numbered nothing because another session waited to number what it would have.
	Covered bool
}

// Sequencer gives committed events their positions. Every replica of every service runs one.
type Sequencer struct {
	deps   SequencerDeps
	cfg    SequencerConfig
	number *pg.Statement
}

// NewSequencer checks its dependencies; it does not touch the database.
func NewSequencer(deps SequencerDeps, cfg SequencerConfig) (*Sequencer, error) {
	if deps.Pool == nil || deps.Logger == nil {
		return nil, errors.New("sequencer needs a pool and a logger")
	}
	cfg = config.Or(cfg, sequencerDefaults)
	cfg.Linger = max(cfg.Linger, cfg.MinInterval)
	return &Sequencer{deps: deps, cfg: cfg, number: number.For(cfg.Batch)}, nil
}

// Run numbers until ctx ends. While the database cannot be reached, Run waits for it.
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
		wake, urged := s.deps.Wake.C(), s.deps.Wake.urgent()
		began := time.Now()
		res, err := s.runOnce(ctx, lockUnlessCovered)
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
			pause = failing.next(ctx, s.deps.Logger, "numbering events", err)
		case res.Numbered == s.cfg.Batch: // more is waiting
			failing.reset()
		default:
			failing.reset()
			poll := s.deps.Numbered.Period(s.cfg.Poll)
			if res.Covered {
				poll = s.cfg.Poll // the session that waits may die
			}
			if !s.cfg.waitForWork(ctx, began, poll, wake, urged) {
				return nil
			}
			continue
		}
		if pause > 0 && !sleep(ctx, pause, nil) {
			return nil
		}
	}
}

// waitForWork sleeps after the round that began at began until the next one is due: at a wake, but not before Linger is
// over, or MinInterval if the sequencer is urged; at the latest after poll. It reports whether ctx is still alive.
func (c SequencerConfig) waitForWork(ctx context.Context, began time.Time, poll time.Duration, wake,
	urged <-chan struct{},
) bool {
	if !sleep(ctx, poll, wake) {
		return false
	}
	if pause := c.Linger - time.Since(began); pause > 0 && !sleep(ctx, pause, urged) {
		return false
	}
	pause := c.MinInterval - time.Since(began)
	return pause <= 0 || sleep(ctx, pause, nil)
}

// How a round gets its turn.
const (
	// A session that finds the lock taken waits for it, unless another session waits already: then it returns without
	// numbering, because the waiting session reads the log after it has the lock, and so later than now, and sees every
	// event that this one was to number. The waiting session releases its place in the queue only when it has the lock, so
	// no session relies on one that has already read the log. The inner CASE keeps that order.
	turnUnlessCovered = `CASE WHEN pg_try_advisory_xact_lock(%[1]d) THEN true
		WHEN pg_try_advisory_lock(%[2]d) THEN CASE WHEN pg_advisory_xact_lock(%[1]d)::text = '' THEN pg_advisory_unlock(%[2]d)
			END
		ELSE false END`
	// turnAfterAll waits for the lock in any case.
	turnAfterAll = `pg_advisory_xact_lock(%[1]d)::text = ''`
)

// lockSQL passes on to the next statement, as a setting, whether the round got its turn. Events are best read by their
// index, whatever the statistics of the table; planning that again, here and in the trigger, would cost more than the
// read itself. For the same reason both statements have no parameters.
func lockSQL(turn string) string {
	return fmt.Sprintf(`SELECT set_config('events.turn', (`+turn+
		`)::text, true), set_config('enable_seqscan', 'off', true),
		set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)`, sequencerLock, nextLock)
}

var (
	lockUnlessCovered = pg.Define(pg.RoleSequencer, "events.lock_unless_covered", lockSQL(turnUnlessCovered))
	lockAfterAll      = pg.Define(pg.RoleSequencer, "events.lock_after_all", lockSQL(turnAfterAll))
	number            = pg.DefineDynamic(pg.RoleSequencer, "events.number", numberSQL, 1000)
	notifyAll         = pg.Define(pg.RoleSequencer, "events.notify_all",
		`SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, '')`)
)

// numberSQL returns a statement that numbers, in the order of seq, committed events whose seqs the newest row leaves
// open, no more of them than most: seqs above its highest, and those of transactions that were running. It reads no
// event that has its number already.
func numberSQL(most int) string {
	return fmt.Sprintf(`
	INSERT INTO events.numbered (seqs, oldest)
	SELECT range_agg(int8range(t.seq, t.seq + 1)), pg_snapshot_xmin(pg_current_snapshot())
	FROM (
		SELECT e.seq
		FROM unnest(COALESCE((SELECT n.open FROM events.numbered n ORDER BY n.last_pos DESC LIMIT 1), '{[1,)}')) r
			CROSS JOIN LATERAL (
				SELECT x.seq FROM events.event x WHERE x.seq >= lower(r) AND x.seq < COALESCE(upper(r), 9223372036854775807)
				ORDER BY x.seq LIMIT %[1]d
			) e
		WHERE current_setting('events.turn') = 'true'
		ORDER BY e.seq LIMIT %[1]d
	) t
	HAVING count(*) > 0
	RETURNING first_pos, last_pos`, most)
}

// runOnce numbers one batch in one transaction, which is one round trip: idle, it ends without a write.
//
// A statement of its own takes the lock: the next one then reads a snapshot taken under the lock and sees the numbers
// that the previous holder gave. The lock ends with the transaction, after its row has become visible, so numbers
// appear in order and a reader that has seen n will never find anything below n afterwards.
func (s *Sequencer) runOnce(ctx context.Context, how *pg.Statement) (SequencerResult, error) {
	began := time.Now()
	conn, err := s.deps.Pool.Acquire(ctx)
	if err != nil {
		return SequencerResult{}, fmt.Errorf("number events: %w", err)
	}
	res, err := numberBatch(ctx, conn.Conn(), how, s.number)
	if err != nil {
		// The place in the queue belongs to the session: it must not outlive a round that was interrupted.
		_ = conn.Hijack().Close(context.WithoutCancel(ctx)) // it is given up
		return SequencerResult{}, fmt.Errorf("number events: %w", err)
	}
	conn.Release()
	res.Took = time.Since(began)
	return res, nil
}

func numberBatch(ctx context.Context, conn *pgx.Conn, how, number *pg.Statement) (SequencerResult, error) {
	var res SequencerResult
	// Without BEGIN a batch is a transaction that commits at its end.
	var batch pg.Batch
	var turn string
	batch.Queue(how).QueryRow(func(row pgx.Row) error { return row.Scan(&turn, nil, nil, nil) })
	batch.Queue(number).QueryRow(func(row pgx.Row) error {
		var first int64
		err := row.Scan(&first, &res.Last)
		if pg.IsNoRows(err) {
			return nil
		}
		res.Numbered = int(res.Last - first + 1)
		return err
	})
	err := batch.Send(ctx, conn)
	res.Covered = err == nil && turn != "true"
	return res, err
}

// Drain numbers until nothing is left, for tests and for tools that have no loop.
func (s *Sequencer) Drain(ctx context.Context) error {
	for {
		res, err := s.runOnce(ctx, lockAfterAll)
		if err != nil {
			return err
		}
		if res.Numbered > 0 {
			s.deps.Numbered.Notify()
			if _, err := pg.Exec(ctx, s.deps.Pool, notifyAll, Channel); err != nil {
				return fmt.Errorf("notify other processes: %w", err)
			}
		}
		if res.Numbered < s.cfg.Batch {
			return nil
		}
	}
}

// notifyLoop notifies other processes, at most once per interval. It never misses the last change, because it takes the
// channel that it waits on next before it notifies. What could not be sent is sent again: other processes, which
// listen, would find the change only as they poll.
func (s *Sequencer) notifyLoop(ctx context.Context, numbered *Signal, next <-chan struct{}) error {
	var failing backoff
	for {
		if !sleep(ctx, 0, next) {
			return nil
		}
		last := next
		next = numbered.C()
		pause := s.cfg.NotifyInterval
		// One statement, so one transaction; a crash loses nothing with it.
		_, err := pg.Exec(ctx, s.deps.Pool, notifyAll, Channel)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		if err != nil {
			next, pause = last, max(pause, failing.next(ctx, s.deps.Logger, "notifying of new events", err))
		} else {
			failing.reset()
		}
		if !sleep(ctx, pause, nil) {
			return nil
		}
	}
}

// sleep waits for d or for wake, whichever comes first; d of zero waits for wake alone. It reports whether ctx is still
// alive.
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
		log.WarnContext(ctx, "event loop failed", slog.String("doing", doing), slog.Any("error", err),
			slog.Int("failures", b.failures))
	}
	return min(20*time.Millisecond<<min(b.failures-1, 6), time.Second)
}
