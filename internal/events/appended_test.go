package events_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAProgramWithoutASequencerWakesThoseOfOthers: what a program has appended is numbered at its notification, and not
// at the next poll of a sequencer.
func TestAProgramWithoutASequencerWakesThoseOfOthers(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	var wake, numbered, there events.Signal
	l, err := events.NewListener(events.ListenerDeps{
		Pool: d.Pool(pg.RoleSequencer), Numbered: &there, Wake: &wake, Logger: testkit.Logger(t),
	})
	must(t, err)
	first, connected := numbered.C(), there.C()
	start(t, l.Run)
	<-connected
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1))
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{Poll: time.Hour}).Run)
	<-first // the sequencer has made its first round, and sleeps
	second := numbered.C()
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 2))
	must(t, events.NotifyAppended(ctx, d.Pool(pg.RoleLifecycle)))
	select {
	case <-second:
	case <-ctx.Done():
		t.Fatal("never numbered")
	}
}
