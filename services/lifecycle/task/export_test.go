package task

import "time"

// KeepUnderWay has a task that was leased unasked keep others from being leased so until a report comes.
func (s *Server) KeepUnderWay() { s.standing.underWay = time.Hour }

// Stands reports whether a node has a session that may be leased to unasked.
func (s *Server) Stands(nodeID string) bool { return s.standing.has(nodeID) }

// Waiting returns how many tasks wait for a transaction of the queue.
func (s *Server) Waiting() int {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return len(s.queue.waiting)
}

// QueueLanes is how many transactions of a queue are under way at once.
const QueueLanes = queueLanes
