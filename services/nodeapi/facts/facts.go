// Package facts writes what a replica observed: transitions of sessions as events, and agents' observations. It decides
// nothing, and it never writes an agent's heartbeat.
//
// Guarantees: the newest fact of each session is written at least once while the database can be reached; older ones of
// the same session that had not been written yet are skipped, since each fact carries the whole session, but for facts
// of the host that no newer one has. The writer holds at most one fact a session. The replica that has a node's session
// writes an agent's observation of its workloads once, and again only when it differs. It reports an observation as
// stale when the session has stopped repeating it.
package facts

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

const (
	// flushMost bounds the facts of one transaction.
	flushMost = 512
	// sessionsKnown is how many other sessions have facts, at least, before the versions of a session's facts are
	// forgotten. Facts of one session overtake each other within moments.
	sessionsKnown = 8192
	// tidyEvery is how often tidy runs, and how soon facts that could not be written are tried again.
	tidyEvery = 5 * time.Second
)

// Deps is what a writer works with.
type Deps struct {
	Logger *slog.Logger
	DB     *pgxpool.Pool
	// Wake tells this process's sequencer of new events.
	Wake func()
	// ForgetAfter is how long the newest observations of a node stay after its last session began; zero: 72 h.
	ForgetAfter time.Duration
}

// Writer of facts.
type Writer struct {
	logger      *slog.Logger
	db          *pgxpool.Pool
	wake        func()
	forgetAfter time.Duration

	mu      sync.Mutex
	pending map[string]*fact
	order   []string
	known   map[string]versions // by session; at most sessionsKnown
	former  map[string]versions // what known was when it was full last
	seen    map[kept]*observed
	flying  map[kept]bool // taken from seen, and being compared and written
	poke    chan struct{}

	observers map[string]*observer // by node: the newest session here
	unread    map[string]int64     // generations of those whose rows were not read
	pruned    time.Time            // when prune ran last; of the writing goroutine alone
	now       func() time.Time
}

// New makes a writer.
func New(deps Deps) *Writer {
	return &Writer{
		logger: deps.Logger, db: deps.DB, wake: deps.Wake,
		forgetAfter: cmp.Or(deps.ForgetAfter, 72*time.Hour),
		pending:     map[string]*fact{}, known: map[string]versions{}, seen: map[kept]*observed{},
		flying: map[kept]bool{}, poke: make(chan struct{}, 1), observers: map[string]*observer{}, unread: map[string]int64{},
		now: time.Now,
	}
}

// versions is what is remembered of a session's facts: the highest version so far, that of a fact with facts of the
// host, and whether one was the end of the session.
type versions struct {
	newest, host int64
	ended        bool
}

// fact is a session as an event reports it, with the correlation id of the event; empty: none.
type fact struct {
	*nodev1.SessionChanged
	correlation string
}

// Session takes a fact and the correlation id of its event. It does not block. Facts of one session may come in another
// order than that of their versions, because several goroutines report them: an older one takes back nothing that a
// newer one has reported, even if that is written already.
func (w *Writer) Session(changed *nodev1.SessionChanged, correlationID string) {
	f := &fact{SessionChanged: changed, correlation: correlationID}
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.noteLocked(changed)
	older := before.newest > f.GetVersion()
	if before.host > f.GetVersion() {
		f.Host = nil
	}
	switch waiting, ok := w.pending[f.GetSessionId()]; {
	case ok && waiting.GetVersion() > f.GetVersion():
		keep(waiting, f)
		return
	case ok:
		keep(f, waiting)
	case older && (before.ended || f.GetHost() == nil):
		return
	default:
		w.order = append(w.order, f.GetSessionId())
	}
	w.pending[f.GetSessionId()] = f
	if !older {
		w.followLocked(changed)
	}
	w.pokeLocked()
}

// noteLocked notes the version of a fact, and returns the versions that its session had before.
func (w *Writer) noteLocked(f *nodev1.SessionChanged) versions {
	id, version := f.GetSessionId(), f.GetVersion()
	before, ok := w.known[id]
	if !ok {
		before = w.former[id]
		if len(w.known) >= sessionsKnown {
			w.former, w.known = w.known, map[string]versions{}
		}
	}
	now := before
	now.newest = max(now.newest, version)
	if f.GetHost() != nil {
		now.host = max(now.host, version)
	}
	now.ended = now.ended || f.GetState() == commonv1.SessionState_SESSION_STATE_CLOSED
	w.known[id] = now
	return before
}

func (w *Writer) pokeLocked() {
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

// keep copies the fields that an agent sends once or on change (host, profile, diagnostics, task types, recovery) from
// an older fact that was not written to the newer one, where the newer one lacks them. Most facts have the newest
// diagnostics alone, so that each diagnostic is copied by itself.
func keep(newer, old *fact) {
	if newer.GetHost() == nil {
		newer.Host = old.GetHost()
	}
	if newer.GetProfile() == nil {
		newer.Profile = old.GetProfile()
	}
	if len(old.GetDiagnostics()) > 0 {
		newer.Diagnostics, _ = roster.MergeDiagnostics(old.GetDiagnostics(), newer.GetDiagnostics())
	}
	if len(newer.GetTaskTypes()) == 0 {
		newer.TaskTypes = old.GetTaskTypes()
	}
	if newer.GetRecovery() == nil {
		newer.Recovery = old.GetRecovery()
	}
}

// Run writes facts until ctx ends.
func (w *Writer) Run(ctx context.Context) error {
	tick := time.NewTicker(tidyEvery)
	defer tick.Stop()
	for {
		select {
		case <-w.poke:
		case <-tick.C:
			w.tidy(ctx)
		case <-ctx.Done():
			return nil
		}
		w.flush(ctx)
	}
}

// tidy does the writes that only the passing of time calls for: stale observations, and rows to prune.
func (w *Writer) tidy(ctx context.Context) {
	for _, do := range []func(context.Context) error{w.fade, w.prune} {
		if err := do(ctx); err != nil && ctx.Err() == nil {
			w.logger.WarnContext(ctx, "observations not tidied", slog.Any("error", err))
		}
	}
}

// Leave writes the last facts.
func (w *Writer) Leave(ctx context.Context) { w.flush(ctx) }

func (w *Writer) take() []*fact {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(w.order), flushMost)
	out := make([]*fact, 0, n)
	for _, id := range w.order[:n] {
		out = append(out, w.pending[id])
		delete(w.pending, id)
	}
	w.order = append([]string(nil), w.order[n:]...)
	return out
}

// giveBack has facts that could not be written wait again, unless a newer fact of the session waits.
func (w *Writer) giveBack(facts []*fact) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range facts {
		switch waiting, ok := w.pending[f.GetSessionId()]; {
		case ok && waiting.GetVersion() >= f.GetVersion():
			keep(waiting, f)
			continue
		case ok:
			keep(f, waiting)
		default:
			w.order = append(w.order, f.GetSessionId())
		}
		w.pending[f.GetSessionId()] = f
	}
}

func (w *Writer) flush(ctx context.Context) {
	for {
		facts, seen := w.take(), w.takeObserved()
		unread := w.takeUnread(seen)
		if len(facts) == 0 && len(seen) == 0 && len(unread) == 0 {
			return
		}
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := w.write(call, facts, seen, unread)
		cancel()
		if err != nil {
			w.giveBack(facts)
			w.giveBackObserved(seen)
			w.landed()
			if ctx.Err() == nil {
				w.logger.WarnContext(ctx, "session facts not written", slog.Int("facts", len(facts)), slog.Any("error", err))
			}
			return // the next tick tries again
		}
		w.landed()
		w.wake()
	}
}

func (w *Writer) write(ctx context.Context, facts []*fact, seen []*observed,
	unread map[string]int64,
) error {
	evs := make([]events.Event, len(facts))
	for i, f := range facts {
		evs[i] = events.Event{
			Kind: "session.changed", AggregateType: "session", AggregateID: f.GetSessionId(), AggregateVersion: f.GetVersion(),
			Payload: f.SessionChanged,
			Correlation: events.Correlation{
				CorrelationID: f.correlation, NodeID: f.GetNodeId(), NodeInstanceID: f.GetNodeInstanceId(),
			},
		}
	}
	var done *written
	err := pg.InTx(ctx, w.db, func(ctx context.Context, tx pgx.Tx) error {
		if len(evs) > 0 {
			if _, err := events.Append(ctx, tx, evs...); err != nil {
				return err
			}
		}
		var err error
		done, err = w.writeObserved(ctx, tx, seen, unread)
		return err
	})
	if err != nil {
		return fmt.Errorf("write session facts: %w", err)
	}
	w.applyWritten(done)
	return nil
}
