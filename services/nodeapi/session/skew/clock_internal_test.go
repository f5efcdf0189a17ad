package skew

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// TestAStepOfTheReplicasClockMakesNoSkew: the host's wall clock is set between two readings, and agents whose clocks
// are right open sessions and send heartbeats before the next reading.
func TestAStepOfTheReplicasClockMakesNoSkew(t *testing.T) {
	begin := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	server := begin.Add(time.Hour)
	for name, c := range map[string]struct{ step, slept time.Duration }{
		"nothing":     {},
		"back":        {step: -10 * time.Minute},
		"forward":     {step: 10 * time.Minute},
		"it was away": {slept: 10 * time.Minute},
	} {
		after := time.Second + c.slept // from the reading to Welcome
		at := func(d time.Duration) instant {
			return instant{wall: begin.Add(d + c.step), steady: begin.Add(d - c.slept)}
		}
		var clock Clock
		clock.set(instant{wall: begin, steady: begin}, server, time.Millisecond)
		first, last := clock.span(at(after))
		if truth := server.Add(after); first.After(truth) || last.Before(truth.Add(-time.Millisecond)) {
			t.Errorf("%s: from %v to %v, want %v between them", name, first, last, truth)
		}
		k := Meter{floor: first}
		for i, d := range []time.Duration{after, after + time.Second, after + 2*time.Second} {
			_, arrived := clock.span(at(d))
			off, report := k.Heartbeat(&nodev1.Heartbeat{
				Monotonic: durationpb.New(d), WallClock: timestamppb.New(server.Add(d)),
			}, arrived, time.Now())
			if report {
				t.Errorf("%s: heartbeat %d is reported as %s off", name, i+1, off)
			}
		}
		clock.set(at(after+3*time.Second), server.Add(after+3*time.Second), time.Millisecond)
		if first, last = clock.span(at(after + 3*time.Second)); last.Sub(first) > 2*time.Millisecond {
			t.Errorf("%s: the next reading leaves %s", name, last.Sub(first))
		}
	}
}
