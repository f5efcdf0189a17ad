package authority_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/authority"
)

// TestTheRootsAreReadAfterEvents: each ping reads the decisions, and none reads the roots again while a connection
// passes on events and there is none. After one they are read.
func TestTheRootsAreReadAfterEvents(t *testing.T) {
	var counts *testkit.Statements
	var numbered *events.Signal
	b := newBench(t, authority.Config{Poll: time.Hour, IssuersEvery: time.Nanosecond}, func(b *bench) {
		numbered = testkit.ListeningSignal(t, b.db)
		b.numbered = numbered
		b.pool, counts = testkit.CountedPool(t, b.db, pg.RoleRecovery)
	})
	s, _ := b.watch()
	pong := func(id int64) {
		t.Helper()
		s.ping(id)
		for b.next(s).GetPong().GetPingId() != id {
			continue
		}
	}
	for id := range int64(50) {
		pong(id + 1)
	}
	const roots = "trust.read_certificates_of_issuers"
	polls, reads := counts.Calls("authority.decisions_after"), counts.Calls(roots)
	if polls < 50 || reads != 1 {
		t.Errorf("%d polls have read the roots %d times", polls, reads)
	}
	if _, err := b.db.OwnerPool().Exec(b.ctx, `INSERT INTO recovery.trusted_issuer
		(fingerprint, name, certificate, not_after, origin, reason, decided_by)
		VALUES ('f', 'n', 'a root', mesh.clock(), 'repair', 'r', 'ada')`); err != nil {
		t.Fatal(err)
	}
	numbered.Notify()
	s.ping(100)
	for {
		f := <-s.out
		if sent := f.GetIssuers(); sent != nil {
			if len(sent.GetCertificates()) != 1 {
				t.Errorf("%d roots are sent", len(sent.GetCertificates()))
			}
			return
		}
		if f.GetPong() != nil {
			t.Fatal("the roots are not read after an event")
		}
	}
}
