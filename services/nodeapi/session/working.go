package session

import (
	"sync"
	"time"
)

// workingEvery is how often an agent is sent a sign that its opening is under way. Agents leave a server that is silent
// for a few times this long.
const workingEvery = 1500 * time.Millisecond

// working sends the agent an acknowledgement of no heartbeat every workingEvery until the function that it returns
// has returned, so that an opening which waits its turn is not taken for a stopped replica.
func (h *handler) working() func() {
	var mu sync.Mutex
	var timer *time.Timer
	over := false
	h.server.opening.Add(1)
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(workingEvery, func() {
		mu.Lock()
		defer mu.Unlock()
		if over {
			return
		}
		h.sess.Send(h.server.heartbeatAck(h.sess, 0))
		timer.Reset(workingEvery)
	})
	return func() {
		h.server.opening.Add(-1)
		timer.Stop()
		mu.Lock()
		defer mu.Unlock()
		over = true
	}
}
