package session

import (
	"context"
)

// Redial opens a session to the endpoint as it is now, beside the admitted one if there is one, and without waiting for
// the next retry. The session that is being opened meanwhile is followed by another.
func (c *Client) Redial(ctx context.Context) { c.send(ctx, event{redial: true}) }

// redial opens a session anew, after the one that is being opened.
func (r *runner) redial() {
	r.c.restartWaits()
	r.timeouts = 0
	if r.opening {
		r.again = true
		return
	}
	r.schedule(0)
}

// openedAgain opens the session that was asked for while another was being opened.
func (r *runner) openedAgain() {
	if r.again {
		r.again = false
		r.schedule(0)
	}
}
