package dispatch

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// sweepEvery is how often the whole list is sent again, and so the longest that a lost hint delays work.
	sweepEvery = time.Second
	// busyFor is how long after a list that was not empty the list is still sent every sweepEvery.
	busyFor = 5 * time.Second
	// sweepSpacing is the least time between two lists: how long work that another replica queued may wait for its hint.
	sweepSpacing = 100 * time.Millisecond
	// sweepPage is how many nodes with open tasks one statement of such a list reads.
	sweepPage = 1000
	// sweepMost bounds a list of cancels.
	sweepMost = 5000
	// sweepWithin is how long a list of nodes with work may take, and a list of cancels.
	sweepWithin = 5 * time.Second
	// hintsPending bounds the hints that wait for one slow watcher; the sweep repeats those beyond it.
	hintsPending = 8192
)

// Hub sends replicas of nodeapi hints about which nodes have work. Hints may be lost: the sweep repeats them.
type Hub struct {
	db     *pgxpool.Pool
	logger *slog.Logger
	// remote fires when any process has numbered events: another replica of lifecycle may have queued work.
	remote *events.Signal
	page   int // sweepPage
	// after is the node behind which the next list of nodes with work begins, and halved how often its pages are halved.
	// The loop alone reads them.
	after  string
	halved int
	// resting is set while the last list of both kinds found nothing; of the loop alone.
	resting bool

	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

type watcher struct {
	nodes   map[string]struct{}
	cancels []*lifecyclev1.TaskCancelHint
	wake    chan struct{}
}

// NewHub returns a hub.
func NewHub(logger *slog.Logger, db *pgxpool.Pool, elsewhere *events.Signal) *Hub {
	return &Hub{
		db: db, logger: logger, remote: elsewhere, page: sweepPage, after: firstNode, watchers: map[*watcher]struct{}{},
	}
}

// Notify sends the hint that nodes have work. The caller calls it after the commit.
func (h *Hub) Notify(nodeIDs ...string) {
	h.each(func(w *watcher) {
		for _, n := range nodeIDs {
			if len(w.nodes) < hintsPending {
				w.nodes[n] = struct{}{}
			}
		}
	})
}

// Cancel sends the hint that a task is to stop. The sweep and the node's next session repeat a lost hint.
func (h *Hub) Cancel(c *lifecyclev1.TaskCancelHint) {
	h.each(func(w *watcher) {
		if len(w.cancels) < hintsPending {
			w.cancels = append(w.cancels, c)
		}
	})
}

func (h *Hub) each(put func(*watcher)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		put(w)
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// sweeps is when the hub has swept, and when it sweeps again.
type sweeps struct {
	busy time.Time // when there was work last
	last time.Time // the last whole sweep, which reads cancels as well
	// due is set if events came so soon after the last whole sweep that they caused none. One may be a cancel.
	due bool
}

// wait returns how long the hub waits for an event before the next whole sweep. quiet is the period without work.
func (s *sweeps) wait(now time.Time, quiet time.Duration) time.Duration {
	period := sweepEvery
	if !s.due && now.Sub(s.busy) > busyFor {
		period = quiet
	}
	return max(0, period-now.Sub(s.last))
}

// timed notes a whole sweep. It returns true.
func (s *sweeps) timed(now time.Time) bool {
	s.last, s.due = now, false
	return true
}

// event reports whether an event causes a whole sweep: at most one does in sweepEvery.
func (s *sweeps) event(now time.Time) bool {
	if now.Sub(s.last) < sweepEvery {
		s.due = true
		return false
	}
	return s.timed(now)
}

// Run repeats the list of nodes with work until ctx ends: soon after events were numbered, and every second while there
// are tasks to be leased or delivered, or cancels without an answer. While there are none it waits for the longer
// period of events.Signal.Period, if a connection listens for events of other replicas.
func (h *Hub) Run(ctx context.Context) error {
	whole := true
	s := sweeps{busy: time.Now(), last: time.Now()}
	for {
		elsewhere := h.remote.C()
		began := time.Now()
		if h.sweep(ctx, whole) {
			s.busy = began
		}
		whole = false
		// Many events must not cause as many scans: scans take about a tenth of the time at most, unless one takes longer
		// than a tenth of sweepEvery.
		select {
		case <-time.After(min(max(sweepSpacing, 10*time.Since(began)), sweepEvery)):
		case <-ctx.Done():
			return nil
		}
		timer := time.NewTimer(s.wait(time.Now(), h.remote.Period(sweepEvery)))
		select {
		case <-timer.C:
			whole = s.timed(time.Now())
		case <-elsewhere:
			whole = s.event(time.Now())
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		timer.Stop()
	}
}

// sweep sends hints for nodes with work; if whole is set, also for cancels that their agents have not answered, whether
// or not the nodes could be listed. It reports whether there was anything to send, or a list failed.
func (h *Hub) sweep(ctx context.Context, whole bool) bool {
	h.mu.Lock()
	idle := len(h.watchers) == 0
	h.mu.Unlock()
	if idle {
		return false
	}
	if whole && h.resting && h.nothing(ctx) {
		return false
	}
	more := h.sweepNodes(ctx)
	if whole {
		more = h.sweepCancels(ctx) || more
		h.resting = !more
	}
	return more
}

// nothing reports whether no node has an open task and no cancel waits for its answer. It asks for both in one
// transaction; if it cannot tell, the lists do.
func (h *Hub) nothing(ctx context.Context) bool {
	call, cancel := context.WithTimeout(ctx, sweepWithin)
	defer cancel()
	found := 0
	count := func(rows pgx.Rows) error {
		for rows.Next() {
			found++
		}
		return rows.Err()
	}
	var batch pg.Batch
	batch.Queue(nodesWithTasks, 1, firstNode).Query(count)
	batch.Queue(listCancels, 1).Query(count)
	return batch.Send(call, h.db) == nil && found == 0
}

// sweepNodes continues after the last page of a list that failed, so that the last nodes get their hints though a whole
// list takes longer than sweepWithin. If that list did not read a single page, the pages of the next are half as long.
func (h *Hub) sweepNodes(ctx context.Context) bool {
	call, cancel := context.WithTimeout(ctx, sweepWithin)
	defer cancel()
	from := h.after
	page := max(1, h.page>>h.halved)
	more, after, err := nodesWithWork(call, h.db, page, from, func(nodes []string) error {
		h.Notify(nodes...)
		return nil
	})
	h.after = after
	if err != nil {
		switch {
		case after != from:
		case page > 1:
			h.halved++
		default:
			h.after = firstNode
		}
		if ctx.Err() == nil {
			h.logger.WarnContext(ctx, "nodes with work not listed", slog.Any("error", err))
		}
		return true
	}
	h.halved = 0
	return more || from != firstNode // this list did not read the nodes up to from
}

func (h *Hub) sweepCancels(ctx context.Context) bool {
	call, cancel := context.WithTimeout(ctx, sweepWithin)
	defer cancel()
	cancels, err := unansweredCancels(call, h.db, sweepMost)
	if err != nil {
		if ctx.Err() == nil {
			h.logger.WarnContext(ctx, "cancels not listed", slog.Any("error", err))
		}
		return true
	}
	for _, c := range cancels {
		h.Cancel(c)
	}
	return len(cancels) > 0
}

func (h *Hub) add() *watcher {
	w := &watcher{nodes: map[string]struct{}{}, wake: make(chan struct{}, 1)}
	h.mu.Lock()
	h.watchers[w] = struct{}{}
	h.mu.Unlock()
	return w
}

func (h *Hub) remove(w *watcher) {
	h.mu.Lock()
	delete(h.watchers, w)
	h.mu.Unlock()
}

func (h *Hub) take(w *watcher) *lifecyclev1.WatchWorkResponse {
	h.mu.Lock()
	defer h.mu.Unlock()
	res := &lifecyclev1.WatchWorkResponse{Cancels: w.cancels, NodeIds: slices.Collect(maps.Keys(w.nodes))}
	w.nodes, w.cancels = map[string]struct{}{}, nil
	return res
}

// WatchWork streams hints to one replica of nodeapi.
func (s *Server) WatchWork(ctx context.Context, _ *lifecyclev1.WatchWorkRequest,
	stream *connect.ServerStream[lifecyclev1.WatchWorkResponse],
) error {
	w := s.deps.Hub.add()
	defer s.deps.Hub.remove(w)
	// An empty first message opens the stream: by it the replica knows that the stream is served.
	if err := stream.Send(&lifecyclev1.WatchWorkResponse{}); err != nil {
		return fmt.Errorf("send hints: %w", err)
	}
	var lost error
	_, _, err := nodesWithWork(ctx, s.deps.DB, sweepPage, firstNode, func(nodes []string) error {
		lost = stream.Send(&lifecyclev1.WatchWorkResponse{NodeIds: nodes, Sweep: true})
		return lost
	})
	if lost != nil {
		return fmt.Errorf("send hints: %w", lost)
	}
	if err != nil { // the next sweep sends their hints
		s.deps.Logger.WarnContext(ctx, "nodes with work not listed", slog.Any("error", err))
	}
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return nil
		}
		if err := stream.Send(s.deps.Hub.take(w)); err != nil {
			return fmt.Errorf("send hints: %w", err)
		}
	}
}
