package authority_test

import (
	"bytes"
	"slices"
	"testing"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/recovery/authority"
)

// TestWatchersAreSentTheIssuers: a watcher is sent the roots before its first pong, and again when they change.
func TestWatchersAreSentTheIssuers(t *testing.T) {
	b := newBench(t, authority.Config{Poll: 100 * time.Millisecond})
	s, _ := b.watch()
	s.ping(1)
	frame := func(good func(*recoveryv1.WatchAuthorityResponse) bool) *recoveryv1.WatchAuthorityResponse {
		t.Helper()
		for range 64 {
			select {
			case f := <-s.out:
				if good(f) {
					return f
				}
				if f.GetPong() != nil {
					t.Fatal("a pong came first")
				}
			case <-time.After(time.Minute):
				t.Fatal("no frame came")
			}
		}
		t.Fatal("too many frames")
		return nil
	}
	issuers := func(f *recoveryv1.WatchAuthorityResponse) bool { return f.GetIssuers() != nil }
	if got := frame(issuers).GetIssuers().GetCertificates(); len(got) != 0 {
		t.Errorf("at first: %d roots", len(got))
	}
	frame(func(f *recoveryv1.WatchAuthorityResponse) bool { return f.GetPong() != nil })
	root := []byte("a root")
	if _, err := b.db.OwnerPool().Exec(t.Context(), `INSERT INTO recovery.trusted_issuer
		(fingerprint, name, certificate, not_after, origin, reason, decided_by)
		VALUES ('f', 'n', $1, mesh.clock(), 'repair', 'r', 'ada')`, root); err != nil {
		t.Fatal(err)
	}
	if got := frame(issuers).GetIssuers().GetCertificates(); !slices.EqualFunc(got, [][]byte{root}, bytes.Equal) {
		t.Errorf("after the change: %q", got)
	}
	late, _ := b.watch()
	for {
		if f := <-late.out; issuers(f) {
			if len(f.GetIssuers().GetCertificates()) != 1 {
				t.Error("a watcher that comes later is sent other roots")
			}
			return
		}
	}
}
