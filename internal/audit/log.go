package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
)

const (
	// maxCounted bounds how many kinds are counted in memory; occurrences of others are counted in the database, by one
	// statement each.
	maxCounted = 4096
	// sweepBatch is how many windows one round of the sweep reads.
	sweepBatch = 200
	// stopGrace is how long a shutdown waits until the last counts are written.
	stopGrace = 3 * time.Second
)

// Deps of a Log. Pool logs in as the service whose schema Schema is.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Schema string
	Policy policy.Reader
	Wake   *events.Signal // notified after commits that appended entries
}

// Log writes entries that may repeat. A nil Log records decisions and nothing else, for tools and tests that have no
// windows.
type Log struct {
	deps Deps

	mu      sync.Mutex
	counted map[string]*counter
	spent   map[string]*spent // by actor
}

// counter is what this process has counted in one window since it last wrote the count to the database.
type counter struct {
	entry *commonv1.AuditEntry
	keys  keys
	n     int64
	known time.Time // when the count was last written to the database, by this process's monotonic clock
}

type keys struct{ key, successKey string }

// New returns a Log and checks its dependencies; it does not touch the database.
func New(deps Deps) (*Log, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Schema == "" || deps.Policy == nil || deps.Wake == nil {
		return nil, errors.New("audit log needs a logger, a pool, a schema, a policy and a signal")
	}
	if !slices.Contains(roles, deps.Schema) {
		return nil, fmt.Errorf("audit log: no windows in schema %q, only in %q", deps.Schema, roles)
	}
	return &Log{deps: deps, counted: map[string]*counter{}, spent: map[string]*spent{}}, nil
}

func keysOf(e Entry, p *commonv1.AuditEntry) keys {
	why := p.GetDetails().GetFields()["reason_code"].GetStringValue()
	if why == "" {
		why = p.GetReason()
	}
	return keys{
		key: hash(p.GetActor(), p.GetAction(), p.GetOutcome(), p.GetSubjectType(), p.GetSubjectId(), e.AllocationID,
			why),
		successKey: hash(p.GetActor(), p.GetAction(), p.GetSubjectType(), p.GetSubjectId()),
	}
}

// Record appends the entry of a decision that changed state, in its transaction, and ends the windows of refusals of
// the same request by the same actor: each gets its last entry with first, last and count. Record costs no round trip
// of its own.
func (l *Log) Record(ctx context.Context, tx pgx.Tx, e Entry) (string, error) {
	if l == nil {
		return Record(ctx, tx, e)
	}
	if err := l.recordSuccess(ctx, tx, e); err != nil {
		return "", err
	}
	return Record(ctx, tx, e)
}

func (l *Log) recordSuccess(ctx context.Context, tx pgx.Tx, e Entry) error {
	p := e.proto(ctx)
	p.Reason = "what was refused before went through"
	put(p, "recovered", "true")
	successKey := keysOf(e, p).successKey
	p.DedupeKeyHash = successKey
	payload, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode audit entry: %w", err)
	}
	ev := event(p, e.AllocationID)
	pending := l.take(tx, successKey)
	err = pg.Queue(ctx, tx, closeWindows.For(l.deps.Schema), successKey, ev.ID, ev.Kind, ev.AggregateType, ev.AggregateID,
		string(payload), ev.CorrelationID, ev.TenantID, ev.WorkspaceID, ev.WorkflowID, ev.AllocationID, ev.NodeID, pending)
	if err != nil {
		return fmt.Errorf("settle audit windows: %w", err)
	}
	return nil
}

// take returns how many occurrences with the key successKey are counted here and not yet written, for a transaction to
// write them. They are counted here again if the transaction does not commit, and forgotten if it does or may have.
// From a transaction whose end cannot be observed take returns 0: those occurrences are written later, as a window of
// their own.
func (l *Log) take(tx pgx.Tx, successKey string) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var taken []*counter
	for _, c := range l.counted {
		if c.keys.successKey == successKey {
			taken = append(taken, &counter{entry: c.entry, keys: c.keys, n: c.n, known: c.known})
		}
	}
	if len(taken) == 0 || !pg.OnEnd(tx, func(committed bool) {
		l.took(taken, committed || pg.OutcomeUnknown(tx))
	}) {
		return 0
	}
	var n int64
	for _, c := range taken {
		n += c.n
		l.counted[c.keys.key].n = 0
	}
	return n
}

// took completes take when the transaction has ended. written is also true if the outcome of the commit is unknown: no
// occurrence is counted twice.
func (l *Log) took(taken []*counter, written bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range taken {
		if !written {
			l.giveBack(c)
		} else if now := l.counted[c.keys.key]; now != nil && now.n == 0 {
			delete(l.counted, c.keys.key) // the next one is the first again
		}
	}
}

// giveBack counts the occurrences again that the transaction did not write after all. The caller holds the lock.
func (l *Log) giveBack(c *counter) {
	if now := l.counted[c.keys.key]; now != nil {
		now.n += c.n
	} else if c.n > 0 {
		l.counted[c.keys.key] = c
	}
}

// Repeated records an entry that may repeat and that changed nothing: it writes the first of its kind in a window at
// once and counts the others. If the entry cannot be written, Repeated returns the error and counts the entry too, so
// that a later round of Run writes it; not after pg.ErrCommitUnknown, when it may have been written.
func (l *Log) Repeated(ctx context.Context, e Entry) error {
	if l == nil {
		return nil
	}
	p := e.proto(ctx)
	k := keysOf(e, p)
	p.DedupeKeyHash = k.key
	l.mu.Lock()
	if c := l.counted[k.key]; c != nil {
		c.n++
		l.mu.Unlock()
		return nil
	}
	if len(l.counted) < maxCounted {
		l.counted[k.key] = &counter{entry: p, keys: k, known: time.Now()}
	}
	l.mu.Unlock()
	err := l.count(ctx, p, k, 1)
	if err == nil || errors.Is(err, pg.ErrCommitUnknown) {
		return err
	}
	// The next round writes it, with what was counted meanwhile.
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.counted[k.key]; c != nil {
		c.n++
	}
	return err
}

// Refuse is Repeated for a request that ended in err, and returns err; an error that is no decision is not recorded. If
// the audit log cannot be written, the caller still gets err.
func (l *Log) Refuse(ctx context.Context, e Entry, err error) error {
	if l == nil || err == nil {
		return err
	}
	entry, ok := e.Refusal(err)
	if !ok {
		return err
	}
	if failed := l.Repeated(ctx, entry); failed != nil && ctx.Err() == nil {
		l.deps.Logger.ErrorContext(ctx, "refusal not audited", slog.String("action", e.Action), obs.Err(failed))
	}
	return err
}

// count adds n occurrences to the window in the database, and appends an entry if they are the first or if a summary is
// due.
func (l *Log) count(ctx context.Context, p *commonv1.AuditEntry, k keys, n int64) error {
	payload, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode audit entry: %w", err)
	}
	appended := false
	err = pg.InTx(ctx, l.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		w, err := pg.One[window](ctx, tx, countInWindow.For(l.deps.Schema), k.key, k.successKey, string(payload), n,
			l.window().Seconds())
		if err != nil {
			return fmt.Errorf("count repeated decision: %w", err)
		}
		appended = w.First || w.Due
		if !appended {
			// The transaction changes only a count, which a crash may lose.
			if _, err := pg.Exec(ctx, tx, commitAsync); err != nil {
				return fmt.Errorf("set asynchronous commit: %w", err)
			}
			return nil
		}
		return appendCounted(ctx, tx, p, w.Count, w.FirstAt, w.LastAt)
	})
	if err != nil {
		return err
	}
	if appended {
		l.deps.Wake.Notify()
	}
	return nil
}

func appendCounted(ctx context.Context, tx pgx.Tx, p *commonv1.AuditEntry, count int64, first, last time.Time) error {
	p = proto.Clone(p).(*commonv1.AuditEntry) // other goroutines count with the original meanwhile
	p.Count, p.FirstAt, p.LastAt = count, timestamppb.New(first), timestamppb.New(last)
	if _, err := events.Append(ctx, tx,
		event(p, p.GetDetails().GetFields()["allocation_id"].GetStringValue())); err != nil {
		return fmt.Errorf("record repeated decision: %w", err)
	}
	return nil
}

func (l *Log) window() time.Duration { return l.deps.Policy.Current().AuditDedupeWindow() }

// summariseIn is how many rounds of Run pass from one scan of the windows of all replicas to the next.
const summariseIn = 6

// Run writes what was counted to the database, and the summaries that are due, until ctx ends.
func (l *Log) Run(ctx context.Context) error {
	for round := 1; ; round++ {
		select {
		case <-time.After(max(min(l.window()/10, 10*time.Second), time.Second)):
		case <-ctx.Done():
			l.last(context.WithoutCancel(ctx))
			return nil
		}
		do := l.RunOnce
		if round%summariseIn > 0 {
			// does no query if nothing was counted
			do = func(ctx context.Context) error { return l.flush(ctx, false) }
		}
		if err := do(ctx); err != nil && ctx.Err() == nil {
			l.deps.Logger.WarnContext(ctx, "repeated decisions not told", obs.Err(err))
		}
	}
}

// last writes the remaining counts to the database at a shutdown.
func (l *Log) last(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	if err := l.flush(ctx, true); err != nil {
		l.deps.Logger.WarnContext(ctx, "repeated decisions not told at the end", obs.Err(err))
	}
}

// RunOnce does one round of Run.
func (l *Log) RunOnce(ctx context.Context) error {
	return errors.Join(l.flush(ctx, false), l.summarise(ctx))
}

// flush writes the counts of this process to the database, and forgets windows in which it counted nothing. A count
// that cannot be written is kept for the next round; not after pg.ErrCommitUnknown, when it may have been written.
func (l *Log) flush(ctx context.Context, all bool) error {
	window := l.window()
	l.mu.Lock()
	var due []*counter
	for k, c := range l.counted {
		switch {
		case c.n > 0:
			c.known = time.Now()
			due = append(due, &counter{entry: c.entry, keys: c.keys, n: c.n, known: c.known})
			c.n = 0
		case all || time.Since(c.known) >= window:
			delete(l.counted, k)
		}
	}
	l.mu.Unlock()
	var errs []error
	for _, c := range due {
		if err := l.count(ctx, c.entry, c.keys, c.n); err != nil {
			errs = append(errs, err)
			if errors.Is(err, pg.ErrCommitUnknown) {
				continue
			}
			l.mu.Lock()
			l.giveBack(c)
			l.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// summarise writes the counts since the last entry of each window that has passed, and ends the windows in which
// nothing was counted.
func (l *Log) summarise(ctx context.Context) error {
	for {
		n, wrote := 0, false
		err := pg.InTx(ctx, l.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			n, wrote, err = l.summariseBatch(ctx, tx)
			return err
		})
		if err != nil {
			return err
		}
		if wrote {
			l.deps.Wake.Notify()
		}
		if n < sweepBatch {
			return nil
		}
	}
}

func (l *Log) summariseBatch(ctx context.Context, tx pgx.Tx) (int, bool, error) {
	list, err := pg.All[passed](ctx, tx, takePassed.For(l.deps.Schema), l.window().Seconds(), sweepBatch)
	if err != nil {
		return 0, false, fmt.Errorf("read audit windows: %w", err)
	}
	wrote := false
	for _, w := range list {
		if w.Count == w.Reported {
			if _, err := pg.Exec(ctx, tx, endWindow.For(l.deps.Schema), w.Key); err != nil {
				return 0, false, fmt.Errorf("end audit window: %w", err)
			}
			continue
		}
		p := &commonv1.AuditEntry{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(w.Entry, p); err != nil {
			return 0, false, fmt.Errorf("read audit window: %w", err)
		}
		if _, err := pg.Exec(ctx, tx, goOnWithWindow.For(l.deps.Schema), w.Key); err != nil {
			return 0, false, fmt.Errorf("move audit window: %w", err)
		}
		if err := appendCounted(ctx, tx, p, w.Count, w.FirstAt, w.LastAt); err != nil {
			return 0, false, err
		}
		wrote = true
	}
	return len(list), wrote, nil
}
