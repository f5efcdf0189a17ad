// Package backoff owns the waits between attempts of an agent: full jitter under a doubling bound, and never before the
// time a peer asked for.
//
// A fleet that lost its control plane at one moment must not reconnect at one moment: every wait is drawn from the
// whole range, so that the arrivals of many agents are spread evenly. It reads no clock and keeps no timer; the caller
// waits.
package backoff

import (
	"math/rand/v2"
	"time"
)

// Policy bounds the waits.
type Policy struct {
	Base time.Duration // the range of the first wait
	Cap  time.Duration // the range never grows beyond it
}

// Backoff counts failed attempts and draws the next wait. The zero value draws zero. It is not safe for concurrent use.
type Backoff struct {
	policy  Policy
	attempt int
	draw    func(n int64) int64 // uniform in [0,n)
}

// New returns a Backoff with zero failures.
func New(policy Policy) *Backoff {
	return &Backoff{policy: policy, draw: rand.Int64N}
}

// WithDraw replaces the random source, and returns b; draw(n) returns a number in [0,n).
func (b *Backoff) WithDraw(draw func(n int64) int64) *Backoff {
	b.draw = draw
	return b
}

// Next counts one failure and returns how long to wait: retryAfter and a random part of the present range. The jitter
// is added to the peer's retryAfter, since the peer sent the same one to many agents at once.
func (b *Backoff) Next(retryAfter time.Duration) time.Duration {
	return b.NextWithin(retryAfter, b.policy.Cap)
}

// NextWithin is Next with a range that does not grow beyond most, where the time that is left is shorter than the
// policy's waits.
func (b *Backoff) NextWithin(retryAfter, most time.Duration) time.Duration {
	bound := b.policy.Base
	for i := 0; i < b.attempt && bound < b.policy.Cap; i++ {
		bound *= 2
	}
	bound = min(bound, b.policy.Cap, most)
	b.attempt++
	return max(retryAfter, 0) + b.Jitter(bound)
}

// Jitter returns a random duration in [0,bound).
func (b *Backoff) Jitter(bound time.Duration) time.Duration {
	if bound <= 0 || b.draw == nil {
		return 0
	}
	return time.Duration(b.draw(int64(bound)))
}

// Attempts returns the number of failures in a row.
func (b *Backoff) Attempts() int { return b.attempt }

// Reset sets the number of failures to zero.
func (b *Backoff) Reset() { b.attempt = 0 }
