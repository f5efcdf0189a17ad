package session

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/services/nodeapi/session/admission"
)

// TestACallWaitsForAShareOfTheOpenings checks that a call to recovery waits for more sessions only while handshakes
// wait to begin, and until it has its share of the openings under way, of which a source has a bounded number.
func TestACallWaitsForAShareOfTheOpenings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{admission: admission.New(func() time.Duration { return 0 }, nil)}
		if s.fills(1) {
			t.Error("a call waits though no handshake does")
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		begin := func() {
			server, client := net.Pipe()
			conn := s.admission.Handshaking(ctx, server, "the source")
			go func() { _, _ = client.Write([]byte{0}) }()
			go func() {
				if _, err := conn.Read(make([]byte, 1)); err == nil {
					conn.End() // its opening goes on
				}
				<-ctx.Done()
				_ = conn.Close()
				_ = client.Close()
			}()
			synctest.Wait()
		}
		for begun := -1; begun < s.admission.Openings(); {
			begun = s.admission.Openings()
			begin()
		}
		for range crowd {
			begin()
		}
		share := s.admission.Openings() / fillShare
		if share < 2 || !s.fills(share-1) || s.fills(share) {
			t.Errorf("of %d openings, a call waits with %d sessions: %t, with %d: %t", s.admission.Openings(), share-1,
				s.fills(share-1), share, s.fills(share))
		}
		cancel()
		synctest.Wait()
		if s.fills(0) {
			t.Error("a call waits though no handshake does any longer")
		}
	})
}
