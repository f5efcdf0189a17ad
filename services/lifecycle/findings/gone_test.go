package findings

import (
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// goneSource is the name of a detector that the bed does not run: its placement is not configured there.
const goneSource = "boxes/docker"

// occupiedNode inserts the gate of a machine, and returns its id, a sight of it as occupied, the finding's subject, and
// a function that returns by whom it is cordoned.
func (b *bed) occupiedNode() (node string, sight finding.Seen, subject string, cordonOf func() string) {
	b.t.Helper()
	node = ids.New()
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.node_gate (node_id, name, fence_epoch, admitted)
		VALUES ($1, 'n', 1, true)`, node)
	sight = detect.Occupied(node, []detect.Record{{What: "workload", WorkspaceID: ids.New(), NodeID: node, Is: "a test"}})
	return node, sight, "node_occupied_without_allocation node " + node, func() string {
		b.t.Helper()
		g, _, err := gate.Get(b.t.Context(), b.db.Pool(pg.RoleLifecycle), node)
		if err != nil {
			b.t.Fatal(err)
		}
		return g.CordonedBy
	}
}

// Scenario: a placement was taken out of the configuration while its detector suspected a machine that another detector
// has found. The finding and its cordon end with that other one, and are not handed to a detector that no replica
// runs.
func TestAFindingIsNotHandedToADetectorThatIsGone(t *testing.T) {
	b := newBed(t, Config{})
	_, sight, subject, cordonOf := b.occupiedNode()
	b.appliesScan(goneSource, sight)
	b.appliesScan("records", sight)
	b.pass(2 * time.Hour)
	b.appliesScan("records", sight)
	if first := wantOnly(t, b.open(), subject)[0]; first.Source != "records" || cordonOf() != finding.CordonBy(first.ID) {
		t.Fatalf("the finding of %q cordons the machine, which is cordoned by %q", first.Source, cordonOf())
	}
	if got := b.appliesScan("records"); got.Resolved != 1 {
		t.Errorf("its detector no longer sees it and %+v", got)
	}
	wantOnly(t, b.open())
	if by := cordonOf(); by != "" {
		t.Errorf("the finding is over and the machine is cordoned by %q", by)
	}
}

// Scenario: while replicas are replaced, another replica runs a detector that this one does not know. A finding is
// handed to it as long as it scans. It is also handed to a detector of this replica that has not been able to scan for
// long, which concludes nothing.
func TestAFindingIsHandedToADetectorThatRunsElsewhereOrFails(t *testing.T) {
	b := newBed(t, Config{})
	node, sight, subject, _ := b.occupiedNode()
	b.appliesScan("agents", sight)
	b.pass(2 * time.Hour)
	b.appliesScan(goneSource, sight)
	b.appliesScan("records", sight)
	b.pass(b.sweeper.cfg.Grace + time.Second)
	b.appliesScan("records", sight)
	wantOnly(t, b.open(), subject)
	b.appliesScan("records")
	if held := wantOnly(t, b.open(), subject)[0]; held.Source != "agents" {
		t.Errorf("the finding was handed to %q, want the detector of this replica that fails", held.Source)
	}
	b.appliesScan("agents")
	if held := wantOnly(t, b.open(), subject)[0]; held.Source != goneSource {
		t.Errorf("the finding was handed to %q, want the detector of the other replica", held.Source)
	}
	if got := b.suspected(node); !slices.Equal(got, []string{goneSource}) {
		t.Errorf("%v suspect the machine", got)
	}
}

// Scenario: a placement was taken out of the configuration while a finding of its detector was open. A sweep an hour
// later ends the finding with its cordon, and takes away what the detector suspected; a sweep before that does neither.
func TestWhatADetectorFoundEndsAfterTheDetector(t *testing.T) {
	b := newBed(t, Config{})
	node, sight, subject, cordonOf := b.occupiedNode()
	b.appliesScan(goneSource, sight)
	b.pass(b.sweeper.cfg.Grace + time.Second)
	b.appliesScan(goneSource, sight)
	first := wantOnly(t, b.open(), subject)[0]
	b.pass(59 * time.Minute)
	b.sweep()
	if held := wantOnly(t, b.open(), subject)[0]; held.ID != first.ID || cordonOf() != finding.CordonBy(first.ID) {
		t.Errorf("finding %s, cordon by %q; want %s and its cordon", held.ID, cordonOf(), first.ID)
	}
	if got := b.suspected(node); !slices.Equal(got, []string{goneSource}) {
		t.Errorf("%v suspect the machine, want the detector that may run elsewhere", got)
	}
	b.pass(2 * time.Minute)
	if got := b.sweep(); got.Resolved != 1 {
		t.Errorf("a sweep after the end of the detector makes %+v", got)
	}
	wantOnly(t, b.open())
	if by := cordonOf(); by != "" {
		t.Errorf("the finding is over and the machine is cordoned by %q", by)
	}
	if got := b.suspected(node); len(got) != 0 {
		t.Errorf("%v still suspect the machine", got)
	}
}
