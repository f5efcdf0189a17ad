package watch

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Config bounds a hub; zero fields mean the defaults.
type Config struct {
	// Limits of the streams that are open at once on this replica.
	Limits Limits
	// Pending is how many objects may wait for one watcher; 4096.
	Pending int
	// ResumeEvents is how many events a resume may read; 5000. For more events a snapshot is cheaper.
	ResumeEvents int
	// Interval is the least time between two states of one object; 250 ms.
	Interval time.Duration
	// Poll is how often the hub checks for commits of other replicas; 500 ms.
	Poll time.Duration
	// Scan is how often the hub looks for nodes whose state changed with the time alone; 2 s.
	Scan time.Duration
	// Heartbeat is the interval of a stream's heartbeats; 15 s.
	Heartbeat time.Duration
	// Check is how often a stream's session is checked; 2 s.
	Check time.Duration
}

var defaults = Config{
	Pending: 4096, ResumeEvents: 5000, Interval: 250 * time.Millisecond, Poll: 500 * time.Millisecond,
	Scan: 2 * time.Second, Heartbeat: 15 * time.Second, Check: 2 * time.Second,
}

// Deps of a hub.
type Deps struct {
	Logger     *slog.Logger
	DB         *pgxpool.Pool
	Reader     *view.Reader
	Advanced   func() <-chan struct{} // fires after this process projected something
	Registerer prometheus.Registerer
}

// Hub fans changes out to the watchers of this process.
type Hub struct {
	deps Deps
	cfg  Config
	idle chan struct{} // notified when the first watcher subscribes

	places *places

	mu   sync.Mutex
	subs map[*subscription]struct{}
	pos  int64 // all watchers have been offered every change up to it; -1: not known, as there is no watcher

	// The fields below are used by the loop alone.
	dirty   map[key]mark
	sent    map[key]time.Time
	read    int64
	scanned time.Time
	nodes   map[string]string       // reason of each node that is not connected
	events  map[string]struct{}     // the nodes whose events were read since the last scan
	beats   string                  // the replicas that beat at the last scan of all nodes
	whole   bool                    // the next scan is of all nodes
	seen    map[observedOn]observed // the last observation of each observed workspace

	slow prometheus.Counter
}

// New returns a hub.
func New(deps Deps, cfg Config) (*Hub, error) {
	if err := cfg.Limits.Validate(); err != nil {
		return nil, err
	}
	cfg = config.Or(cfg, defaults)
	cfg.Limits = cfg.Limits.WithDefaults()
	h := &Hub{
		deps: deps, cfg: cfg, places: newPlaces(cfg.Limits), idle: make(chan struct{}, 1),
		subs: map[*subscription]struct{}{}, pos: -1,
		dirty: map[key]mark{}, sent: map[key]time.Time{}, seen: map[observedOn]observed{}, read: -1,
		slow: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "watch_slow_consumers_total",
			Help: "Watchers that were sent the request to take a new snapshot because they fell behind.",
		}),
	}
	if deps.Registerer != nil {
		for _, c := range append(h.places.collectors(), h.slow) {
			if err := deps.Registerer.Register(c); err != nil {
				return nil, fmt.Errorf("register metrics of watches: %w", err)
			}
		}
	}
	return h, nil
}

// Run sends changes to the watchers until ctx ends.
func (h *Hub) Run(ctx context.Context) error {
	for {
		advanced := h.deps.Advanced()
		wait, err := h.runOnce(ctx)
		if err != nil && ctx.Err() == nil {
			h.deps.Logger.WarnContext(ctx, "watch fan-out failed", slog.Any("error", err))
			wait = time.Second
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-advanced:
		case <-h.idle:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// runOnce offers the changes to the watchers and returns how long to wait at most before the next call.
func (h *Hub) runOnce(ctx context.Context) (time.Duration, error) {
	h.mu.Lock()
	start, watched := h.pos, len(h.subs) > 0
	if !watched {
		h.pos = -1
	}
	h.mu.Unlock()
	if !watched || start < 0 {
		h.dirty, h.sent, h.nodes, h.seen, h.read = map[key]mark{}, map[key]time.Time{}, nil, map[observedOn]observed{}, -1
		h.events, h.whole = nil, false
		return time.Minute, nil
	}
	h.read = max(h.read, start)
	if err := h.readLog(ctx); err != nil {
		return 0, err
	}
	if time.Since(h.scanned) >= h.cfg.Scan {
		// Changes from the log do not wait for the scan of all nodes, which may time out on a large fleet.
		if err := h.scan(ctx); err != nil && ctx.Err() == nil {
			h.deps.Logger.WarnContext(ctx, "look at the age of the nodes' sessions failed", slog.Any("error", err))
		}
		h.scanned = time.Now()
	}
	return h.send(ctx)
}

// readLog marks the objects that the events up to the cursor have changed.
func (h *Hub) readLog(ctx context.Context) error {
	to, err := project.Position(ctx, h.deps.DB)
	if err != nil {
		return err
	}
	for h.read < to {
		records, next, err := events.Read(ctx, h.deps.DB, h.read, watched(), 1000)
		if err != nil {
			return err
		}
		for _, r := range records {
			if r.Pos > to {
				break
			}
			if err := h.note(ctx, r); err != nil {
				return err
			}
		}
		if next <= h.read {
			break
		}
		h.read = min(next, to)
	}
	return nil
}

// note marks the objects that an event has changed. After a rebuild any object may have changed, and some may be gone:
// all watchers have to take a new snapshot.
func (h *Hub) note(ctx context.Context, r events.Record) error {
	switch r.Kind {
	case project.KindRebuilt:
		h.mu.Lock()
		defer h.mu.Unlock()
		for s := range h.subs {
			s.end(errExpired("the projections were made again"))
		}
		return nil
	case project.KindReplayed:
		var err error
		if r, err = replayed(ctx, h.deps.DB, r); err != nil {
			return err
		}
	default:
		if !h.shows(r) {
			return nil
		}
	}
	add(h.dirty, r)
	h.noteNodes(r)
	return nil
}

// send loads the changed objects that are due and offers them to all watchers. A change of a node is a change of the
// workspaces that it shows on, and these keep to their own interval. A change that no event made does not wait: it has
// no position at which a resume would find it.
func (h *Hub) send(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	due, wait := map[key]mark{}, h.cfg.Poll
	for k, m := range h.dirty {
		if left := h.untilNext(k, began); left > 0 && m.pos != noPosition {
			wait = min(wait, left)
			continue
		}
		due[k] = m
	}
	var items []item
	later := map[key]mark{}
	if len(due) > 0 {
		err := h.deps.Reader.Read(ctx, list.All(), func(ctx context.Context, s *view.Snapshot) error {
			shown, err := workspacesOf(ctx, s, due)
			if err != nil {
				return err
			}
			for k, m := range shown {
				if h.untilNext(k, began) > 0 && m.pos != noPosition {
					later[k] = m
				} else {
					m.created = h.dirty[k].created
					due[k] = m
				}
			}
			items, err = load(ctx, s, due)
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	for k := range due {
		delete(h.dirty, k)
		h.sent[k] = began
	}
	for k, m := range later {
		if old, ok := h.dirty[k]; ok {
			m = mark{pos: min(m.pos, old.pos), created: old.created}
		}
		h.dirty[k] = m
		wait = min(wait, h.untilNext(k, began))
	}
	for k, at := range h.sent {
		if began.Sub(at) >= h.cfg.Interval {
			delete(h.sent, k)
		}
	}
	// The position does not pass an object that is not sent yet, so that a resume sends it.
	reached := h.read
	for _, m := range h.dirty {
		reached = min(reached, m.pos-1)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.subs {
		s.offer(items, reached)
	}
	h.pos = max(h.pos, reached)
	return wait, nil
}

// untilNext returns how long an object must wait until its next state may be sent; zero or less if it may be sent now.
func (h *Hub) untilNext(k key, now time.Time) time.Duration {
	return h.sent[k].Add(h.cfg.Interval).Sub(now)
}

// subscribe registers a watcher. The hub offers it every change after the returned position.
func (h *Hub) subscribe(ctx context.Context, f Filter) (*subscription, int64, error) {
	pos, err := project.Position(ctx, h.deps.DB)
	if err != nil {
		return nil, 0, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pos < 0 || len(h.subs) == 0 {
		h.pos = pos
	}
	s := newSubscription(f, h.cfg.Pending, h.pos)
	h.subs[s] = struct{}{}
	select {
	case h.idle <- struct{}{}:
	default:
	}
	return s, h.pos, nil
}

func (h *Hub) unsubscribe(s *subscription) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subs, s)
}
