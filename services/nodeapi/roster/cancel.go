package roster

import (
	"sync"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

const (
	// cancelsPerFrame bounds the tasks that one TaskCancel names.
	cancelsPerFrame = 512
	// cancelListProtocol is the first version of the protocol whose agents read more than the first task of a TaskCancel.
	cancelListProtocol = 3
	// sendAtOnce is how much of its queue a session may fill with frames of one kind before it waits for the writer.
	sendAtOnce = outboxLimit / 2
)

// Cancels makes the frames that ask this session's agent to stop tasks for one reason: one frame for up to
// cancelsPerFrame tasks, or one frame for each task if the agent's build does not read a list.
func (s *Session) Cancels(refs []*nodev1.TaskRef, epoch int64, reason string) []*nodev1.ConnectResponse {
	most := cancelsPerFrame
	if s.Protocol() < cancelListProtocol {
		most = 1
	}
	out := make([]*nodev1.ConnectResponse, 0, (len(refs)+most-1)/most)
	for len(refs) > 0 {
		n := min(most, len(refs))
		out = append(out, &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskCancel{TaskCancel: &nodev1.TaskCancel{
			Task: refs[0], More: refs[1:n:n], Epoch: epoch, Reason: reason,
		}}})
		refs = refs[n:]
	}
	return out
}

// SendAll queues any number of frames, and waits between them for the agent to read. It returns false if the session
// takes no more frames. If the agent reads nothing, the session ends when a frame has taken longer than WriteWithin,
// and SendAll returns then. The session's handler and its writer must not call it.
func (s *Session) SendAll(frames []*nodev1.ConnectResponse) bool {
	for len(frames) > 0 {
		n := min(sendAtOnce, len(frames))
		for _, f := range frames[:n] {
			s.Send(f)
		}
		frames = frames[n:]
		if len(frames) > 0 {
			s.awaitWritten()
		}
	}
	return !s.Gone()
}

// awaitWritten waits until the writer has written every queued frame, or the session has ended.
func (s *Session) awaitWritten() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.writing && !s.gone {
		s.wait()
	}
}

// wait waits for the writer to end. The caller holds the lock.
func (s *Session) wait() {
	if s.cond == nil {
		s.cond = sync.NewCond(&s.mu)
	}
	s.cond.Wait()
}
