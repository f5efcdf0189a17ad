package facts

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/observation"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
)

const (
	// observationsPending bounds the workspaces whose newest observation waits to be written. Agents repeat what is
	// dropped.
	observationsPending = 16384
	// staleAfter is how long an observation counts as evidence after an agent whose session stands last repeated it.
	// Agents repeat every observation each minute.
	staleAfter = 150 * time.Second
	// pruneEvery is how often rows of nodes that are gone are deleted at least.
	pruneEvery = time.Hour
	// nodesPruned and observationsPruned bound what one call of prune deletes.
	nodesPruned, observationsPruned = 100, 1000
)

// kept names a workspace on one node. Observations of the same workspace by another node are kept apart.
type kept struct{ workspaceID, nodeID string }

// observed is the newest observation of one workspace's workloads that has not been compared with what is written, or
// differs from it.
type observed struct {
	nodeID, instanceID string
	generation         int64 // of the session that reported it
	fact               *nodev1.Observation
	digest             observation.Digest
	at                 time.Time // when it came, by this process's monotonic clock
	waited             bool      // the database could not be written
}

// observer is what is known of the observations of one node's newest session here.
type observer struct {
	generation int64
	known      map[string]*repeated // by workspace: the written observations; nil until they have been read
}

// repeated is an observation that is written, and when the session last reported it.
type repeated struct {
	digest observation.Digest
	heard  time.Time
}

// Observed takes an observation by the agent of a session of its workloads. It is untrusted evidence, and is written if
// it differs from the written one. Observed does not block.
func (w *Writer) Observed(nodeID, instanceID string, generation int64, f *nodev1.Observation) {
	f.StaleSince = nil // only a replica may set it
	digest, err := observation.Of(f)
	if err != nil {
		w.logger.Warn("observation not taken", slog.Any("error", err))
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.observerLocked(nodeID, generation)
	if o == nil {
		return // a newer session reports all of it
	}
	at, now := kept{f.GetWorkspaceId(), nodeID}, w.now()
	// While an earlier observation of the same workspace is being written, it is not known which one the database has.
	if k := o.known[at.workspaceID]; k != nil && k.digest == digest && !w.flying[at] {
		k.heard = now
		delete(w.seen, at)
		return
	}
	if _, waits := w.seen[at]; waits || len(w.seen) < observationsPending {
		w.seen[at] = &observed{
			nodeID: nodeID, instanceID: instanceID, generation: generation, fact: f, digest: digest,
			at: now,
		}
	}
	w.pokeLocked()
}

// observerLocked returns the state of a node's session, and creates it at the first report of a newer session. It
// returns nil if a newer session has begun.
func (w *Writer) observerLocked(nodeID string, generation int64) *observer {
	o := w.observers[nodeID]
	switch {
	case o == nil || o.generation < generation:
		o = &observer{generation: generation}
		w.observers[nodeID] = o
		w.unread[nodeID] = generation
	case o.generation > generation:
		return nil
	}
	return o
}

// followLocked keeps one observer for each session that stands. An observation of an earlier session that this one does
// not repeat becomes stale, so each session is followed from its admission on.
func (w *Writer) followLocked(f *nodev1.SessionChanged) {
	switch f.GetState() { //nolint:exhaustive // the others begin and end nothing
	case commonv1.SessionState_SESSION_STATE_ADMITTED:
		w.observerLocked(f.GetNodeId(), f.GetGeneration())
	case commonv1.SessionState_SESSION_STATE_CLOSED:
		if o := w.observers[f.GetNodeId()]; o != nil && o.generation == f.GetGeneration() {
			delete(w.observers, f.GetNodeId())
			delete(w.unread, f.GetNodeId())
		}
	}
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
		w.flying[id] = true
	}
	return out
}

// landed records that the observations that were taken have been written or given back.
func (w *Writer) landed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.flying)
}

func (w *Writer) giveBackObserved(seen []*observed) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range seen {
		o.waited = true
		at := kept{o.fact.GetWorkspaceId(), o.nodeID}
		if _, newer := w.seen[at]; !newer {
			w.seen[at] = o
		}
	}
}

// takeUnread returns the generations, by node, of the sessions whose nodes' rows must be read: all those with an
// observation in seen, and others up to flushMost in all.
func (w *Writer) takeUnread(seen []*observed) map[string]int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]int64{}
	for _, o := range seen {
		if now := w.observers[o.nodeID]; now == nil || now.known == nil || now.generation != o.generation {
			out[o.nodeID] = max(out[o.nodeID], o.generation)
		}
	}
	for node, generation := range w.unread {
		if len(out) >= flushMost {
			break
		}
		out[node] = max(out[node], generation)
	}
	return out
}

// written is what a transaction read and wrote of observations.
type written struct {
	read     map[string]int64                         // the generations of the nodes whose rows were read
	stored   map[string]map[string]observation.Digest // those rows
	upToDate []*observed                              // written, or as they are written already
	overtook map[string]bool                          // nodes of which a newer session has reported something
}

// writeObserved writes those observations that differ from what is written, in a transaction. A session is registered
// with its first report. After that no observation of an earlier session is written, however long it waited: the rows
// always hold what the newest session reported.
func (w *Writer) writeObserved(ctx context.Context, tx pgx.Tx, seen []*observed, unread map[string]int64) (*written,
	error,
) {
	out := &written{read: unread, stored: map[string]map[string]observation.Digest{}, overtook: map[string]bool{}}
	highest := map[string]int64{}
	for _, o := range seen {
		highest[o.nodeID] = max(highest[o.nodeID], o.generation)
	}
	for node, generation := range unread {
		highest[node] = max(highest[node], generation)
	}
	if len(highest) == 0 {
		return out, nil
	}
	nodes := slices.Sorted(maps.Keys(highest)) // one order of locks
	generations := make([]int64, len(nodes))
	for i, node := range nodes {
		generations[i] = highest[node]
	}
	if len(unread) > 0 {
		if _, err := pg.Exec(ctx, tx, registerObservers, nodes, generations); err != nil {
			return nil, fmt.Errorf("register sessions of observations: %w", err)
		}
	}
	standing, err := pg.All[observerRow](ctx, tx, lockObservers, nodes)
	if err != nil {
		return nil, fmt.Errorf("read sessions of observations: %w", err)
	}
	newest := make(map[string]int64, len(standing))
	for _, s := range standing {
		newest[s.NodeID] = s.Generation
		out.overtook[s.NodeID] = s.Generation > highest[s.NodeID]
	}
	if err := w.readStored(ctx, tx, unread, out); err != nil {
		return nil, err
	}
	var changed []*observed
	for _, o := range seen {
		switch digest, stored := w.digestOf(o, out); {
		case newest[o.nodeID] > o.generation: // a newer session has replaced what it reported
		case stored && digest == o.digest:
			out.upToDate = append(out.upToDate, o)
		default:
			out.upToDate, changed = append(out.upToDate, o), append(changed, o)
		}
	}
	return out, w.writeChanged(ctx, tx, changed)
}

// readStored reads the digests of the written observations of nodes into out.
func (w *Writer) readStored(ctx context.Context, tx pgx.Tx, unread map[string]int64, out *written) error {
	if len(unread) == 0 {
		return nil
	}
	for node := range unread {
		out.stored[node] = map[string]observation.Digest{}
	}
	rows, err := pg.All[digestRow](ctx, tx, readDigests, slices.Collect(maps.Keys(unread)))
	if err != nil {
		return fmt.Errorf("read what is written of observations: %w", err)
	}
	for _, r := range rows {
		out.stored[r.NodeID][r.WorkspaceID] = observation.Digest(r.Digest)
	}
	return nil
}

// digestOf returns the digest of the written observation of the same workspace and node; false if none is written.
func (w *Writer) digestOf(o *observed, out *written) (observation.Digest, bool) {
	if stored, ok := out.stored[o.nodeID]; ok {
		d, found := stored[o.fact.GetWorkspaceId()]
		return d, found
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := w.observers[o.nodeID]; now != nil && now.generation == o.generation {
		if k := now.known[o.fact.GetWorkspaceId()]; k != nil {
			return k.digest, true
		}
	}
	return observation.Digest{}, false
}

func (w *Writer) writeChanged(ctx context.Context, tx pgx.Tx, changed []*observed) error {
	if len(changed) == 0 {
		return nil
	}
	if _, err := events.AppendSeen(ctx, tx, w.observations(changed)...); err != nil {
		return err
	}
	var nodes, workspaces, goneNodes, goneWorkspaces []string
	var digests, bodies [][]byte
	for _, o := range changed {
		if observation.Gone(o.fact) {
			goneNodes, goneWorkspaces = append(goneNodes, o.nodeID), append(goneWorkspaces, o.fact.GetWorkspaceId())
			continue
		}
		body, err := proto.Marshal(o.fact)
		if err != nil {
			return fmt.Errorf("encode observation: %w", err)
		}
		nodes, workspaces = append(nodes, o.nodeID), append(workspaces, o.fact.GetWorkspaceId())
		digests, bodies = append(digests, o.digest[:]), append(bodies, body)
	}
	if len(nodes) > 0 {
		if _, err := pg.Exec(ctx, tx, keepObservations, nodes, workspaces, digests, bodies); err != nil {
			return fmt.Errorf("keep observations: %w", err)
		}
	}
	if len(goneNodes) > 0 {
		if _, err := pg.Exec(ctx, tx, dropObservations, goneNodes, goneWorkspaces); err != nil {
			return fmt.Errorf("drop observations: %w", err)
		}
	}
	return nil
}

// applyWritten applies the results of a transaction to the writer's state, after its commit.
func (w *Writer) applyWritten(done *written) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now()
	for node, generation := range done.read {
		if w.unread[node] == generation {
			delete(w.unread, node)
		}
		o := w.observers[node]
		if o == nil || o.generation != generation || o.known != nil {
			continue
		}
		o.known = map[string]*repeated{}
		if done.overtook[node] {
			continue // another replica has the node's newer session, and follows its observations
		}
		for workspace, digest := range done.stored[node] {
			o.known[workspace] = &repeated{digest: digest, heard: now}
		}
	}
	for _, s := range done.upToDate {
		o := w.observers[s.nodeID]
		switch {
		case o == nil || o.generation != s.generation:
		case observation.Gone(s.fact):
			delete(o.known, s.fact.GetWorkspaceId())
		default:
			o.known[s.fact.GetWorkspaceId()] = &repeated{digest: s.digest, heard: s.at}
		}
	}
}

// observations returns the observations as events. One that is written at once takes the time of its event; one that
// had to wait carries its age.
func (w *Writer) observations(seen []*observed) []events.Seen {
	evs := make([]events.Seen, len(seen))
	for i, o := range seen {
		evs[i].Event = observationEvent(o.nodeID, o.instanceID, o.fact)
		if age := w.now().Sub(o.at); o.waited || age > replicas.Every {
			evs[i].Ago = age
		}
	}
	return evs
}

func observationEvent(nodeID, instanceID string, fact *nodev1.Observation) events.Event {
	return events.Event{
		Kind: "workload.observed", AggregateType: "observation", AggregateID: fact.GetWorkspaceId(), Payload: fact,
		Correlation: events.Correlation{WorkspaceID: fact.GetWorkspaceId(), NodeID: nodeID, NodeInstanceID: instanceID},
	}
}
