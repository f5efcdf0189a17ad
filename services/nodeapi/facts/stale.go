package facts

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
)

// overdue is an observation that its session has not repeated.
type overdue struct {
	kept

	generation int64
	heard      time.Time
}

// takeOverdue returns at most flushMost observations that sessions which stand have not repeated for longer than
// staleAfter.
func (w *Writer) takeOverdue() []overdue {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now()
	var out []overdue
	for node, o := range w.observers {
		for workspace, k := range o.known {
			if len(out) < flushMost && now.Sub(k.heard) > staleAfter {
				out = append(out, overdue{kept{workspace, node}, o.generation, k.heard})
				w.flying[kept{workspace, node}] = true // a repetition that arrives meanwhile is written after it
			}
		}
	}
	return out
}

// fade reports observations that have become stale, and forgets that they are written, so that the next one of the same
// workspace is written again.
func (w *Writer) fade(ctx context.Context) error {
	late := w.takeOverdue()
	if len(late) == 0 {
		return nil
	}
	defer w.landed()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := pg.InTx(ctx, w.db, func(ctx context.Context, tx pgx.Tx) error { return w.writeStale(ctx, tx, late) })
	if err != nil {
		return fmt.Errorf("report stale observations: %w", err)
	}
	w.mu.Lock()
	for _, l := range late {
		if o := w.observers[l.nodeID]; o != nil && o.generation == l.generation {
			delete(o.known, l.workspaceID)
		}
	}
	w.mu.Unlock()
	w.wake()
	return nil
}

func (w *Writer) writeStale(ctx context.Context, tx pgx.Tx, late []overdue) error {
	nodes := make([]string, len(late))
	for i, l := range late {
		nodes[i] = l.nodeID
	}
	slices.Sort(nodes)
	standing, err := pg.All[observerRow](ctx, tx, lockObservers, slices.Compact(slices.Clone(nodes)))
	if err != nil {
		return fmt.Errorf("read sessions of observations: %w", err)
	}
	newest := map[string]int64{}
	for _, s := range standing {
		newest[s.NodeID] = s.Generation
	}
	heard := map[kept]time.Time{}
	var ofNodes, workspaces []string
	for _, l := range late {
		if newest[l.nodeID] <= l.generation {
			heard[l.kept] = l.heard
			ofNodes, workspaces = append(ofNodes, l.nodeID), append(workspaces, l.workspaceID)
		}
	}
	dropped, err := pg.All[droppedRow](ctx, tx, dropObservations, ofNodes, workspaces)
	if err != nil || len(dropped) == 0 {
		return err
	}
	evs := make([]events.Seen, len(dropped))
	for i, d := range dropped {
		fact := &nodev1.Observation{}
		if err := proto.Unmarshal(d.Body, fact); err != nil {
			fact = &nodev1.Observation{WorkspaceId: d.WorkspaceID} // its content is not needed to report it as stale
		}
		fact.StaleSince = timestamppb.New(d.Now.Add(-w.now().Sub(heard[kept{d.WorkspaceID, d.NodeID}])))
		evs[i].Event = observationEvent(d.NodeID, "", fact)
	}
	_, err = events.AppendSeen(ctx, tx, evs...)
	return err
}

// prune deletes rows of nodes whose last session began longer ago than forgetAfter, and of replicas that are gone. The
// observations of a node that comes back are written anew. One call deletes one batch; if there may be more, the next
// call goes on.
func (w *Writer) prune(ctx context.Context) error {
	now := w.now()
	if now.Sub(w.pruned) < min(pruneEvery, w.forgetAfter/10) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	more, err := w.pruneBatch(ctx)
	if more && err == nil {
		return nil
	}
	w.pruned = now
	if err != nil {
		return fmt.Errorf("delete observations of nodes that are gone: %w", err)
	}
	return replicas.Forget(ctx, w.db)
}

// pruneBatch deletes observations of at most nodesPruned nodes that are gone, and at most observationsPruned of them,
// and then the nodes that have none left. It reports whether there may be more.
func (w *Writer) pruneBatch(ctx context.Context) (bool, error) {
	more := false
	err := pg.InTx(ctx, w.db, func(ctx context.Context, tx pgx.Tx) error {
		more = false
		gone, err := pg.Values[string](ctx, tx, lockGone, w.forgetAfter.Seconds())
		if err != nil || len(gone) == 0 {
			return err
		}
		tag, err := pg.Exec(ctx, tx, pruneObservations, gone)
		if err != nil {
			return err
		}
		if tag.RowsAffected() >= observationsPruned {
			more = true // the nodes stay for the next batch, by which the rest of their observations is found
			return nil
		}
		more = len(gone) >= nodesPruned
		_, err = pg.Exec(ctx, tx, pruneObservers, gone)
		return err
	})
	return more, err
}
