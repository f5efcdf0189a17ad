package identity_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAPlainReconnectIsNoEventOfTheIdentity checks that the record of a node is announced when it changes, and not with
// each further session on the same certificate, of which nodeapi reports.
func TestAPlainReconnectIsNoEventOfTheIdentity(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	want := func(what string, more int, before *int) {
		t.Helper()
		list := testkit.Events(t, b.pool, "kind = 'node_identity.changed' AND aggregate_id = $1", n.id)
		if len(list) != *before+more {
			t.Fatalf("%s: %d events, want %d", what, len(list)-*before, more)
		}
		*before = len(list)
	}
	var events int
	want("enrolment", 2, &events)
	b.admit(n)
	want("the first session", 1, &events)
	b.admit(n)
	b.admit(n)
	want("two more sessions", 0, &events)
	if r := b.get(n); r.Confirmed != 3 {
		t.Errorf("generation %d is confirmed, want 3", r.Confirmed)
	}
	n.serial = b.offered(n)
	want("the next certificate", 1, &events)
	b.admit(n)
	want("the first session on it", 1, &events)
	b.admit(n)
	want("one more", 0, &events)
}
