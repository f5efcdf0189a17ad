package drive_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// The spec of one workspace names a placement that this build does not know, so that its event cannot be made. Its run
// stays open; the runs that are driven beside it come to their ends.
func TestAnUnknownValueInASpecStopsNoOtherRun(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: sagatest.PureSteps("one", "two"), States: sagatest.States(),
	})
	odd, oddRun := b.Create("toy")
	b.Exec(`UPDATE lifecycle.workspace SET spec = '{"placement": "orbit"}' WHERE id = $1`, odd)
	var good []string
	for range 5 {
		_, id := b.Create("toy")
		good = append(good, id)
	}
	b.Drive(b.Config("a"))
	for _, id := range good {
		b.Await(id, testkit.Patience, "succeeded")
	}
	if r := b.Run(oddRun); !r.Live() {
		t.Errorf("its run is %s", r.State)
	}
}
