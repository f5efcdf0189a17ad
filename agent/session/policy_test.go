package session_test

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// Scenario: a session is replaced, and a policy that was sent over it before comes only now, when its successor has a
// later one. The agent keeps the later one.
func TestAPolicyOverAFormerSessionIsNotTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		var mu sync.Mutex
		var taken []time.Duration
		h := start(t, p, p.memory(), func(deps *session.Deps, _ *session.Config) {
			deps.Hooks.Policy = func(policy *commonv1.NodePolicy) {
				mu.Lock()
				defer mu.Unlock()
				taken = append(taken, policy.GetStreamMaxAge().AsDuration())
			}
		})
		has := func(age time.Duration) bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.Contains(taken, age)
		}
		update := func(age time.Duration) *nodev1.ConnectResponse {
			return &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_PolicyUpdate{PolicyUpdate: &nodev1.PolicyUpdate{
				Policy: &commonv1.NodePolicy{StreamMaxAge: durationpb.New(age)},
			}}}
		}
		h.until("admitted", time.Second, h.admitted)
		former := p.session(0)
		if err := former.send(update(time.Minute)); err != nil {
			t.Fatal(err)
		}
		h.until("a policy over the present session is taken", time.Second, func() bool { return has(time.Minute) })
		reconnect := &nodev1.Reconnect{Spread: durationpb.New(time.Second)}
		if err := former.send(&nodev1.ConnectResponse{
			Frame: &nodev1.ConnectResponse_Reconnect{Reconnect: reconnect},
		}); err != nil {
			t.Fatal(err)
		}
		h.until("another session has taken its place", 10*time.Second, func() bool { return h.client.Generation() == 2 })
		if err := former.send(update(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		if err := p.session(1).send(update(3 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		h.until("the policy of the present session is taken", time.Second, func() bool { return has(3 * time.Minute) })
		h.until("the former session is closed", 30*time.Second,
			func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.closed == 1 })
		if has(2 * time.Minute) {
			t.Error("a policy over the former session was taken")
		}
		h.stop()
	})
}

// Scenario: the policy shortens the time after which a silent agent counts as down, and the interval of heartbeats with
// it, in the middle of a long one. The next heartbeat comes within the shorter interval.
func TestAShorterIntervalHoldsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.interval = 5 * time.Minute
		h := start(t, p, p.memory(), nil)
		h.until("admitted", time.Second, h.admitted)
		beats := func() int { p.mu.Lock(); defer p.mu.Unlock(); return p.beats }
		h.until("it has sent a heartbeat", 6*time.Minute, func() bool { return beats() > 0 })
		sent := beats()
		err := p.session(0).send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_PolicyUpdate{
			PolicyUpdate: &nodev1.PolicyUpdate{
				Policy: &commonv1.NodePolicy{HeartbeatInterval: durationpb.New(3 * time.Second)},
			},
		}})
		if err != nil {
			t.Fatal(err)
		}
		h.until("it has sent the next one", 3*time.Second+time.Second/10, func() bool { return beats() > sent })
		h.stop()
	})
}
