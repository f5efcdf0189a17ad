package dispatch

import (
	"context"
	"time"
)

// Listing is a hub with one watcher, whose lists a test makes one by one.
type Listing struct {
	hub     *Hub
	watcher *watcher
}

// List makes a hub whose lists the test makes itself, with page nodes a page.
func (h *Hub) List(page int) *Listing {
	h.page = page
	return &Listing{hub: h, watcher: h.add()}
}

// Next makes one whole list, and returns the nodes with work and the tasks to be cancelled that are in it.
func (l *Listing) Next(ctx context.Context) (nodes, cancels []string) {
	l.hub.sweep(ctx, true)
	hints := l.hub.take(l.watcher)
	for _, c := range hints.GetCancels() {
		cancels = append(cancels, c.GetTask().GetTaskId())
	}
	return hints.GetNodeIds(), cancels
}

// KeepUnderWay lets a task that was leased as it was queued keep others from being leased so until a report comes.
func (s *Server) KeepUnderWay() { s.standing.underWay = time.Hour }

// HasStandingLease reports whether a node has a session that tasks may be leased to as they are queued.
func (s *Server) HasStandingLease(nodeID string) bool { return s.standing.has(nodeID) }

// Waiting returns how many tasks wait for a transaction of the queue.
func (s *Server) Waiting() int {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return len(s.queue.waiting)
}

// QueueLanes is how many transactions of a queue are under way at once.
const QueueLanes = queueLanes

// SweepMost bounds a list of cancels.
const SweepMost = sweepMost
