package drift_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// full makes the disk of a node full, as lifecycle's gate tells it.
func (n *machine) full() {
	n.gate.Host = &commonv1.HostFacts{StateDisk: &commonv1.StateDisk{Path: "/var/lib/agent", Full: true, Detail: "full"}}
}

// TestANodeThatIsDownHasNoFullDisk checks that what the gate told of a node's disk hides for the threshold that the node
// is away, and no longer, and counts again when it is back.
func TestANodeThatIsDownHasNoFullDisk(t *testing.T) {
	k := newKit(t)
	n := k.up()
	n.full()
	k.put(n.gate)
	k.listen(30 * time.Second)
	k.round()
	k.wantReasons(n.id(), diskFull)
	k.put()
	k.lose(n)
	k.listen(staleAfter - time.Second)
	k.round()
	k.wantReasons(n.id(), diskFull)
	k.listen(time.Second)
	k.round()
	k.wantReasons(n.id(), diskFull, agentDown)
	k.put()
	k.back(n)
	k.round()
	k.wantReasons(n.id(), diskFull, agentDown, diskFull)
}
