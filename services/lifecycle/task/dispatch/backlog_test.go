package dispatch_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestExpiredTasksOfANodeAreOneReport checks that the tasks of a node that expire in the queue are one event, however
// many they are and whenever they expire, and another one once the node has been connected for a while and none expires
// any more.
func TestExpiredTasksOfANodeAreOneReport(t *testing.T) {
	k := newKit(t)
	const interval = time.Minute
	away, here := k.node(), k.node()
	k.session(away, false)
	for range 3 {
		k.enqueue(away)
	}
	ahead := time.Duration(0)
	sweep := func(after time.Duration) {
		t.Helper()
		ahead += after
		testkit.SetClockOffset(k.db, ahead)
		k.beat(here)
		k.beat(away)
		if _, err := k.tasks.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := k.tasks.EndBacklogs(t.Context(), interval); err != nil {
			t.Fatal(err)
		}
	}
	stale := names.Of(commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE)
	want := func(reasons ...string) {
		t.Helper()
		list, err := testkit.ReadEvents(t.Context(), k.db.Pool(pg.RoleReadmodel), `kind = 'task_backlog.changed'`)
		if err != nil {
			t.Fatal(err)
		}
		if len(list) != len(reasons) {
			t.Fatalf("%d events, want %v", len(list), reasons)
		}
		last := int64(0)
		for i, e := range list {
			got := ""
			if r := e.Text("reason"); r != "" {
				got = stale
			}
			if got != reasons[i] || e.AggregateID != away.id || e.NodeID != away.id || e.AggregateVersion <= last {
				t.Errorf("event %d: %v of %s, version %d after %d, want %q", i, e.Message, e.AggregateID, e.AggregateVersion, last,
					reasons[i])
			}
			last = e.AggregateVersion
		}
	}
	sweep(0)
	want()
	sweep(61 * time.Second)
	want(stale)
	k.enqueue(away)
	sweep(61 * time.Second)
	want(stale)
	sweep(10 * time.Minute)
	want(stale) // it is away
	k.ready(away)
	sweep(interval / 2)
	want(stale) // it is back, and has had no time yet
	sweep(interval)
	want(stale, "")
	sweep(interval)
	want(stale, "")
	// It begins anew, and ends after a day even if the node stays away.
	k.session(away, false)
	k.enqueue(away)
	sweep(61 * time.Second)
	want(stale, "", stale)
	sweep(25 * time.Hour)
	want(stale, "", stale, "")
}
