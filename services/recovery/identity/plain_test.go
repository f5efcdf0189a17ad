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

// TestAPlainReconnectDoesNotWakeTheSequencer checks that a session wakes the sequencer only if an event was appended
// with it, and the readers of the authority view in any case.
func TestAPlainReconnectDoesNotWakeTheSequencer(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	fired := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	confirms := func(what string, wakes bool) {
		t.Helper()
		o := b.hello(n)
		opened := b.open(o)
		n.joinState = opened.GetJoinState()
		wake, changed := b.wake.C(), b.changed.C()
		if got := b.confirm(o, opened.GetGeneration()); !got.GetAdmitted() {
			t.Fatalf("%s: %v", what, got)
		}
		if woken := fired(wake); woken != wakes {
			t.Errorf("%s: the sequencer is woken: %t, want %t", what, woken, wakes)
		}
		if !fired(changed) {
			t.Errorf("%s: the readers of the authority view are not woken", what)
		}
	}
	confirms("the first session", true)
	confirms("another session", false)
	n.serial = b.offered(n)
	confirms("the first session on the next certificate", true)
	confirms("another session on it", false)
}
