package reap

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
)

// The instances and allocations of some orphans are in states that this build does not know: these orphans are left to
// a sweep that knows the states, their rows stay as they are, and the others are ended.
func TestAnUnknownStateStopsNoOtherOrphan(t *testing.T) {
	m := newMorgue(t)
	givenUp := place{
		instance: "ending", run: "failed", claimed: true, orphaned: true, allocation: "release_failed", occupy: "cleanup",
	}
	launching, releasing := givenUp, givenUp
	launching.instance, releasing.allocation = "launching", "releasing"
	oddInstance, oddAllocation, plain := m.instance(launching), m.instance(releasing), m.instance(givenUp)
	instances, allocations := testkit.SetAside(t, "instance"), testkit.SetAside(t, "allocation")
	restore := []func(){
		names.Without(commonv1.InstanceState_INSTANCE_STATE_LAUNCHING),
		names.Without(commonv1.AllocationState_ALLOCATION_STATE_RELEASING),
	}
	again := func() {
		for _, one := range restore {
			one()
		}
	}
	defer again()
	m.sweep(Reaped{Ended: 1, Left: 2})
	m.sweep(Reaped{Left: 2})
	if n := len(m.ends(plain.WorkspaceID)); n != 1 {
		t.Errorf("%d ends of the other one are told", n)
	}
	if n := m.count(`SELECT count(*) FROM lifecycle.instance i JOIN lifecycle.allocation a USING (workspace_id)
		WHERE (i.state, a.state) IN (('launching', 'release_failed'), ('ending', 'releasing'))`); n != 2 {
		t.Errorf("%d of 2 are as they were stored", n)
	}
	if i, a := instances(), allocations(); i != 1 || a != 1 {
		t.Errorf("%d instances and %d allocations were reported", i, a)
	}
	again()
	m.sweep(Reaped{Ended: 2})
	for _, b := range []string{oddInstance.WorkspaceID, oddAllocation.WorkspaceID} {
		if n := len(m.ends(b)); n != 1 {
			t.Errorf("%d ends of one that is known again are told", n)
		}
	}
}
