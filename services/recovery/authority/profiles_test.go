package authority_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/authority"
)

// TestProfilesFollowTheSnapshot checks that a watcher is sent the profiles after its snapshot, and once for each
// change.
func TestProfilesFollowTheSnapshot(t *testing.T) {
	testkit.IO(t)
	var now atomic.Pointer[recoveryv1.AuthorityProfiles]
	of := func(version int64) {
		now.Store(&recoveryv1.AuthorityProfiles{Profiles: []*recoveryv1.AuthorityProfile{
			{Profile: &commonv1.Profile{Version: version}},
		}})
	}
	of(1)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	b := &bench{t: t, ctx: ctx, db: testkit.DB(t), changed: &events.Signal{}}
	b.pool = b.db.Pool(pg.RoleRecovery)
	var err error
	b.poller, err = authority.New(authority.Deps{
		Logger: testkit.Logger(t), Pool: b.pool, Changed: b.changed, Profiles: now.Load,
	}, authority.Config{Poll: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- b.poller.Run(ctx) }()
	t.Cleanup(func() {
		b.watches.Wait()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	s, _ := b.watch()
	for b.next(s).GetSnapshotEnd() == nil {
	}
	sent := func() int64 {
		t.Helper()
		f := b.next(s)
		if f.GetProfiles() == nil {
			t.Fatalf("%v", f)
		}
		return f.GetProfiles().GetProfiles()[0].GetProfile().GetVersion()
	}
	if v := sent(); v != 1 {
		t.Fatalf("version %d after the snapshot", v)
	}
	of(2)
	b.changed.Notify()
	if v := sent(); v != 2 {
		t.Fatalf("version %d after a change", v)
	}
	s.ping(1) // a poll that finds no change sends none
	if b.next(s).GetPong() == nil {
		t.Error("the same profiles are sent twice")
	}
}
