package judge_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
)

// TestALateEventTakesNothingBack checks that an event of an identity or a gate that was set aside, and is read after a
// newer one that says what was known before it, is no evidence.
func TestALateEventTakesNothingBack(t *testing.T) {
	k := newKit(t)
	n := k.up()
	n.full()
	k.put(n.gate)
	late, lateGate := proto.CloneOf(n.identity), proto.CloneOf(n.gate)
	late.State, lateGate.Host = fencedState, nil
	k.versions["node_identity.changed"+n.id()]++
	k.versions["gate.changed"+n.id()]++
	k.put(n.identity, n.gate)
	k.round()
	k.wantReasons(n.id(), diskFull)
	k.versions["node_identity.changed"+n.id()] -= 2
	k.versions["gate.changed"+n.id()] -= 2
	k.put(late, lateGate)
	k.round()
	k.wantReasons(n.id(), diskFull)
	if rows := k.count(`SELECT count(*) FROM recovery.judgement WHERE node_id = $1 AND identity_state = 'active'`,
		n.id()); rows != 1 {
		t.Error("the identity is not active any more")
	}
}
