package task

// Waiting returns how many tasks wait for a transaction of the queue.
func (s *Server) Waiting() int {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return len(s.queue.waiting)
}

// QueueLanes is how many transactions of a queue are under way at once.
const QueueLanes = queueLanes
