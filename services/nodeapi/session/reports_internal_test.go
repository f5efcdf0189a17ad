package session

import (
	"fmt"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// dropped counts the frames that were dropped.
type dropped struct {
	Metrics

	frames int
}

func (d *dropped) Frame(string) { d.frames++ }

// TestAFloodOfObservationsIsBounded: an agent that invents workspaces, each of which would be a row and an event, has
// as many of them taken as a machine may have, and then a few in a second.
func TestAFloodOfObservationsIsBounded(t *testing.T) {
	const flood = 20_000
	counted, taken := &dropped{}, 0
	h := &handler{server: &Server{deps: Deps{
		Metrics: counted, Observe: func(*roster.Session, *nodev1.Observation) { taken++ },
	}}}
	start := time.Now()
	for range flood {
		h.observed(&nodev1.Observation{WorkspaceId: ids.New()}, start)
	}
	if taken != observationsAtOnce || counted.frames != flood-taken {
		t.Errorf("%d were taken at once, and %d dropped", taken, counted.frames)
	}
	for range flood {
		h.observed(&nodev1.Observation{WorkspaceId: ids.New()}, start.Add(time.Second))
	}
	if want := observationsAtOnce + int(time.Second/observationPause); taken != want {
		t.Errorf("%d were taken within a second, want %d", taken, want)
	}
	// What a working agent reports after a while is taken.
	for range observationsAtOnce {
		h.observed(&nodev1.Observation{WorkspaceId: ids.New()}, start.Add(time.Minute))
	}
	if want := 2*observationsAtOnce + int(time.Second/observationPause); taken != want {
		t.Errorf("%d were taken after a minute, want %d", taken, want)
	}
}

// TestAFloodOfChangesIsAFewReports: facts of the host that change with each heartbeat are four reports, and then one a
// minute, of which the last has the newest facts. A state directory without room is reported nevertheless.
func TestAFloodOfChangesIsAFewReports(t *testing.T) {
	start := time.Now()
	var c hostChanges
	c.reported(&commonv1.HostFacts{})
	reports := 0
	var last *commonv1.HostFacts
	take := func(facts *commonv1.HostFacts, at time.Duration) {
		if got := c.take(facts, start.Add(at)); got != nil {
			reports, last = reports+1, got
		}
	}
	for i := range 100 {
		take(&commonv1.HostFacts{Kernel: fmt.Sprint(i)}, time.Duration(i)*time.Millisecond)
	}
	if reports != hostReports {
		t.Errorf("%d reports at once", reports)
	}
	for _, full := range []bool{true, false} {
		take(&commonv1.HostFacts{Kernel: "disk", StateDisk: &commonv1.StateDisk{Full: full}}, time.Second)
		if last.GetStateDisk() == nil || last.GetStateDisk().GetFull() != full {
			t.Errorf("the state directory waits: %v", last)
		}
	}
	take(&commonv1.HostFacts{Kernel: "last"}, 2*time.Second)
	take(nil, 10*time.Minute)
	if last.GetKernel() != "last" || reports != hostReports+3 {
		t.Errorf("%d reports, of which the last is %v", reports, last)
	}
	for i := range 1000 {
		take(&commonv1.HostFacts{StateDisk: &commonv1.StateDisk{Full: i%2 == 0}}, 20*time.Minute)
	}
	if reports > 3*hostReports+3 {
		t.Errorf("%d reports of a state directory that changes", reports)
	}
}

// TestAFloodOfDiagnosticsIsAFewReports: eight at once, then one in five seconds, and nothing is lost.
func TestAFloodOfDiagnosticsIsAFewReports(t *testing.T) {
	start := time.Now()
	var d diagnosed
	seen, reports := map[string]bool{}, 0
	note := func(list []*commonv1.Diagnostic) {
		if len(list) > 0 {
			reports++
		}
		for _, one := range list {
			seen[one.GetDedupeKeyHash()] = true
		}
	}
	for i := range 60 {
		note(d.take([]*commonv1.Diagnostic{{DedupeKeyHash: fmt.Sprint(i)}}, start))
	}
	if reports != diagnosticReports || len(seen) != diagnosticReports {
		t.Errorf("%d reports of %d diagnostics at once", reports, len(seen))
	}
	note(d.take(nil, start.Add(time.Second)))
	note(d.take(nil, start.Add(diagnosticPause)))
	if reports != diagnosticReports+1 || len(seen) != 60 {
		t.Errorf("%d reports of %d diagnostics after the pause", reports, len(seen))
	}
	note(d.take([]*commonv1.Diagnostic{{DedupeKeyHash: "end"}}, start.Add(diagnosticPause)))
	if note(d.takeWaiting()); !seen["end"] || len(d.takeWaiting()) != 0 {
		t.Error("the last waits when the session ends")
	}
}
