package trust

import (
	"testing"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/trust/signing"
)

// TestAPreflightReadsAfterEvents: while a connection passes on events neither the issuer that signs nor the open
// rotation is read again and again; after an event both are, and a signature always reads the issuer.
func TestAPreflightReadsAfterEvents(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	numbered := testkit.ListeningSignal(t, r.db)
	pool, counts := testkit.CountedPool(t, r.db, pg.RoleRecovery)
	r.signer = signing.Follow(pool, numbered, p.deps.Rotating)
	p.deps.Signer, p.deps.Pool, p.deps.Numbered = r.signer, pool, numbered
	round := func() {
		t.Helper()
		if _, err := ask(t.Context(), p.deps.Signer); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.NoteIssuer(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	reads := func(want int, when string) {
		t.Helper()
		if issuer, rotation := counts.Calls("signing.read"), counts.Calls("trust.read_open_rotation"); issuer != want ||
			rotation != want {
			t.Errorf("%s: the issuer was read %d times, the rotation %d times, want %d", when, issuer, rotation, want)
		}
	}
	for range 10 {
		round()
	}
	reads(1, "without an event")
	numbered.Notify()
	round()
	round()
	reads(2, "after an event")
	before := counts.Calls("signing.read")
	if _, err := p.sign(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if counts.Calls("signing.read") == before {
		t.Error("a signature has not read which issuer signs")
	}
	// A rotation begins with an event, and is read each time while it lasts.
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{}); err != nil {
		t.Fatal(err)
	}
	numbered.Notify()
	before = counts.Calls("trust.read_open_rotation")
	for range 2 {
		if err := p.NoteIssuer(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := counts.Calls("trust.read_open_rotation") - before; got != 2 {
		t.Errorf("an open rotation was read %d times in two rounds", got)
	}
}
