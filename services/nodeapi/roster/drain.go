package roster

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// AskReconnect asks the agent to replace the session after a random part of spread.
func (s *Session) AskReconnect(why commonv1.Reason, spread time.Duration) {
	s.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Reconnect{Reconnect: &nodev1.Reconnect{
		Reason: why, Spread: durationpb.New(spread),
	}}})
}

// Drain asks every agent to connect to another replica and waits until all have left or ctx ends; then it cuts the
// remaining sessions.
func (r *Roster) Drain(ctx context.Context, spread time.Duration) {
	r.mu.Lock()
	r.closing = true
	empty := make(chan struct{})
	if len(r.all) == 0 {
		close(empty)
	} else {
		r.empty = empty
	}
	sessions := slices.Collect(maps.Keys(r.all))
	r.mu.Unlock()
	for _, s := range sessions {
		s.AskReconnect(commonv1.Reason_REASON_SERVER_DRAINING, spread)
	}
	select {
	case <-empty:
	case <-ctx.Done():
	}
	r.mu.Lock()
	left := slices.Collect(maps.Keys(r.all))
	r.mu.Unlock()
	for _, s := range left {
		_ = s.Identity.Conn.Close()
	}
}

// Wait waits for every goroutine that serves a session.
func (r *Roster) Wait() { r.wg.Wait() }

// RetireTime draws the end of a new session: its maximum age, give or take a fifth, so that a fleet that came together
// does not leave together.
func RetireTime(now time.Time, maxAge time.Duration) time.Time {
	fifth := maxAge / 5
	if fifth <= 0 {
		return now.Add(maxAge)
	}
	return now.Add(maxAge - fifth + rand.N(2*fifth))
}
