// Package facts writes what a replica saw as events: transitions of sessions, and one beat for the whole replica. Nothing here is a verdict, and a
// heartbeat of an agent is never written.
//
// Guarantees: the newest fact of each session is written at least once while the database can be reached; older ones of the same session that had not
// been written yet are skipped, since each fact carries the whole session. The writer holds at most one fact a session.
package facts

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// BeatEvery is the cadence of a replica's beat.
	BeatEvery = 5 * time.Second
	// flushMost bounds the facts of one transaction.
	flushMost = 512
)

// Counts answers how many sessions stand here and how many are late.
type Counts func() (sessions, late int)

// Replica is what others are told of this one.
type Replica struct {
	ID      string
	Address string // host:port at which other services reach it
}

// Writer of facts.
type Writer struct {
	logger  *slog.Logger
	db      *pgxpool.Pool
	wake    func()
	replica Replica
	counts  Counts
	onTime  func(sent, received, server time.Time)

	mu      sync.Mutex
	pending map[string]*nodev1.SessionChanged
	order   []string
	seen    map[held]*observed
	poke    chan struct{}
	lastOK  time.Time
}

// held names a workspace as one node has it: what another says of it is another's word.
type held struct{ workspaceID, nodeID string }

// observed is the newest observation of one workspace's workloads that has not been written.
type observed struct {
	nodeID, instanceID string
	fact               *nodev1.Observation
	at                 time.Time // when it came, by this process's monotonic clock
	waited             bool      // the database could not be written
}

// New makes a writer. wake tells this process's sequencer of new events; onTime is given each reading of the database's clock.
func New(logger *slog.Logger, db *pgxpool.Pool, replica Replica, wake func(), counts Counts, onTime func(sent, received, server time.Time)) *Writer {
	return &Writer{
		logger: logger, db: db, wake: wake, replica: replica, counts: counts, onTime: onTime,
		pending: map[string]*nodev1.SessionChanged{}, seen: map[held]*observed{}, poke: make(chan struct{}, 1),
	}
}

// Session takes a fact. It does not block.
func (w *Writer) Session(f *nodev1.SessionChanged) {
	w.mu.Lock()
	if old, ok := w.pending[f.GetSessionId()]; ok {
		keep(f, old)
	} else {
		w.order = append(w.order, f.GetSessionId())
	}
	w.pending[f.GetSessionId()] = f
	w.mu.Unlock()
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

// keep takes what travels once, or when it changes, from an older fact that was not written, where the newer one has none of it.
func keep(newer, old *nodev1.SessionChanged) {
	if newer.GetHost() == nil {
		newer.Host = old.GetHost()
	}
	if newer.GetProfile() == nil {
		newer.Profile = old.GetProfile()
	}
	if len(newer.GetDiagnostics()) == 0 {
		newer.Diagnostics = old.GetDiagnostics()
	}
}

// observationsPending bounds the workspaces whose newest observation waits to be written; agents say it again.
const observationsPending = 16384

// Observed takes what an agent saw of its workloads: untrusted evidence, written when it changed. It does not block.
func (w *Writer) Observed(nodeID, instanceID string, f *nodev1.Observation) {
	w.mu.Lock()
	at := held{f.GetWorkspaceId(), nodeID}
	if _, waits := w.seen[at]; waits || len(w.seen) < observationsPending {
		w.seen[at] = &observed{nodeID: nodeID, instanceID: instanceID, fact: f, at: time.Now()}
	}
	w.mu.Unlock()
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

// Run writes facts and beats until ctx ends.
func (w *Writer) Run(ctx context.Context) error {
	tick := time.NewTicker(BeatEvery)
	defer tick.Stop()
	w.beat(ctx, false)
	for {
		select {
		case <-w.poke:
		case <-tick.C:
			w.beat(ctx, false)
		case <-ctx.Done():
			return nil
		}
		w.flush(ctx)
	}
}

// Leave writes the last facts and a beat that says that the replica leaves.
func (w *Writer) Leave(ctx context.Context) error {
	w.flush(ctx)
	w.beat(ctx, true)
	return nil
}

func (w *Writer) takeObserved() []*observed {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := make([]*observed, 0, min(len(w.seen), flushMost))
	for id, o := range w.seen {
		if len(out) == flushMost {
			break
		}
		out = append(out, o)
		delete(w.seen, id)
	}
	return out
}

func (w *Writer) take() []*nodev1.SessionChanged {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(w.order), flushMost)
	out := make([]*nodev1.SessionChanged, 0, n)
	for _, id := range w.order[:n] {
		out = append(out, w.pending[id])
		delete(w.pending, id)
	}
	w.order = append([]string(nil), w.order[n:]...)
	return out
}

func (w *Writer) giveBack(facts []*nodev1.SessionChanged) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range facts {
		if newer, ok := w.pending[f.GetSessionId()]; ok {
			keep(newer, f)
			continue
		}
		w.pending[f.GetSessionId()] = f
		w.order = append(w.order, f.GetSessionId())
	}
}

func (w *Writer) giveBackObserved(seen []*observed) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range seen {
		o.waited = true
		at := held{o.fact.GetWorkspaceId(), o.nodeID}
		if _, newer := w.seen[at]; !newer {
			w.seen[at] = o
		}
	}
}

func (w *Writer) flush(ctx context.Context) {
	for {
		facts, seen := w.take(), w.takeObserved()
		if len(facts) == 0 && len(seen) == 0 {
			return
		}
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := w.write(call, facts, seen)
		cancel()
		if err != nil {
			w.giveBack(facts)
			w.giveBackObserved(seen)
			if ctx.Err() == nil {
				w.logger.WarnContext(ctx, "session facts not written", slog.Int("facts", len(facts)), slog.Any("error", err))
			}
			return // the next beat tries again
		}
		w.wake()
	}
}

func (w *Writer) write(ctx context.Context, facts []*nodev1.SessionChanged, seen []*observed) error {
	evs := make([]events.Event, len(facts))
	for i, f := range facts {
		evs[i] = events.Event{
			Kind: "session.changed", AggregateType: "session", AggregateID: f.GetSessionId(), AggregateVersion: f.GetVersion(), Payload: f,
			Correlation: events.Correlation{NodeID: f.GetNodeId(), NodeInstanceID: f.GetNodeInstanceId()},
		}
	}
	err := pg.InTx(ctx, w.db, func(ctx context.Context, tx pgx.Tx) error {
		if len(evs) > 0 {
			if _, err := events.Append(ctx, tx, evs...); err != nil {
				return err //nolint:wrapcheck // wrapped below
			}
		}
		if len(seen) > 0 {
			if _, err := events.AppendSeen(ctx, tx, observations(seen)...); err != nil {
				return err //nolint:wrapcheck // wrapped below
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("write session facts: %w", err)
	}
	return nil
}

// observations returns them as events. One that is written at once is as old as its event: replicas write within moments, and those of one replica keep
// their order. One that had to wait keeps its age, since the agent may have told another replica more since.
func observations(seen []*observed) []events.Seen {
	evs := make([]events.Seen, len(seen))
	for i, o := range seen {
		evs[i].Event = events.Event{
			Kind: "workload.observed", AggregateType: "observation", AggregateID: o.fact.GetWorkspaceId(), Payload: o.fact,
			Correlation: events.Correlation{WorkspaceID: o.fact.GetWorkspaceId(), NodeID: o.nodeID, NodeInstanceID: o.instanceID},
		}
		if o.waited {
			evs[i].Ago = time.Since(o.at)
		}
	}
	return evs
}

// beat says that this replica listens, and reads the database's clock on the way.
func (w *Writer) beat(ctx context.Context, leaving bool) {
	ctx, cancel := context.WithTimeout(ctx, BeatEvery)
	defer cancel()
	sessions, late := w.counts()
	sent := time.Now()
	var beatAt time.Time
	err := pg.InTx(ctx, w.db, func(ctx context.Context, tx pgx.Tx) error {
		beat, err := pg.One[replicaRow](ctx, tx, beatReplica, w.replica.ID, sessions, late, leaving)
		if err != nil {
			return fmt.Errorf("write beat: %w", err)
		}
		beatAt = beat.BeatAt
		_, err = events.Append(ctx, tx, events.Event{
			Kind: "replica.beat", AggregateType: "replica", AggregateID: w.replica.ID, AggregateVersion: beat.Version,
			Payload: &nodev1.ReplicaBeat{
				ReplicaId: w.replica.ID, Address: w.replica.Address, StartedAt: timestamppb.New(beat.StartedAt), BeatAt: timestamppb.New(beatAt),
				Sessions: int32(sessions), Late: int32(late), Leaving: leaving, Version: beat.Version, //nolint:gosec // counts of sessions of one process
			},
		})
		return err //nolint:wrapcheck // logged below
	})
	if err != nil {
		w.logger.WarnContext(ctx, "replica beat not written", slog.Any("error", err))
		return
	}
	w.onTime(sent, time.Now(), beatAt)
	w.mu.Lock()
	w.lastOK = time.Now()
	w.mu.Unlock()
	w.wake()
}

// Health explains a replica whose beat the rest of the mesh does not see.
func (w *Writer) Health(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if since := time.Since(w.lastOK); since > 3*BeatEvery {
		return fmt.Errorf("no beat written for %s", since.Truncate(time.Second))
	}
	return nil
}
