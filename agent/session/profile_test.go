package session_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// TestAnotherEndpointIsDialledAtOnce: an offered profile goes to the hook and its answer to the server; Redial replaces
// the session, also if one is being opened to the endpoint from before.
func TestAnotherEndpointIsDialledAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.script = func(v *visit) error {
			generation, err := v.issue()
			if err != nil {
				return err
			}
			offer := &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_ProfileOffer{
				ProfileOffer: &nodev1.ProfileOffer{Profile: &commonv1.Profile{Fingerprint: "f"}},
			}}
			if err := errors.Join(v.welcome(generation), v.ready(generation), v.admit(generation), v.send(offer)); err != nil {
				return err
			}
			return v.run()
		}
		var mu sync.Mutex
		endpoint, asked := "nodeapi:1", []string{}
		var h *harness
		started := make(chan struct{})
		h = start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) {
			d.Endpoint = func() (string, error) {
				<-started
				mu.Lock()
				defer mu.Unlock()
				asked = append(asked, endpoint)
				if len(asked) == 2 { // another endpoint, while the open to this one is in flight
					defer h.client.Redial(t.Context())
					defer func() { endpoint = "nodeapi:3" }()
				}
				return endpoint, nil
			}
			d.Hooks.Profile = func(_ context.Context, profile *commonv1.Profile) {
				if err := h.client.AnswerProfile(&nodev1.ProfileAnswer{Fingerprint: profile.GetFingerprint()}); err != nil {
					t.Error(err)
				}
			}
		})
		close(started)
		h.until("admitted", time.Minute, h.admitted)
		mu.Lock()
		endpoint = "nodeapi:2"
		mu.Unlock()
		h.client.Redial(t.Context())
		h.until("three sessions", time.Second, func() bool {
			h.hmu.Lock()
			defer h.hmu.Unlock()
			return len(h.admissions) == 3
		})
		h.until("the answers", time.Second, func() bool { return p.saw("profile answer f") == 3 })
		h.stop()
		if !slices.Equal(asked, []string{"nodeapi:1", "nodeapi:2", "nodeapi:3"}) {
			t.Errorf("dialled %v", asked)
		}
	})
}
