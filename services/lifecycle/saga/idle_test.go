package saga_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// TestAtRestNothingIsAskedAgain checks that a driver of a mesh at rest asks once whether a run is live, and again after
// a notification, which each start of a run comes with.
func TestAtRestNothingIsAskedAgain(t *testing.T) {
	testkit.IO(t)
	b := sagatest.NewBed(t)
	pool, counts := testkit.CountedPool(t, b.DB, pg.RoleLifecycle)
	registry, err := saga.NewRegistry(saga.Definition{
		Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States(),
	})
	if err != nil {
		t.Fatal(err)
	}
	if b.Core, err = saga.New(saga.Deps{DB: pool, Registry: registry, Logger: testkit.Logger(t)}); err != nil {
		t.Fatal(err)
	}
	numbered := testkit.ListeningSignal(t, b.DB)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.Core.FollowRemoteWakes(ctx, numbered) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	const poll = time.Second
	rests := func() bool { return b.Core.NextPoll(t.Context(), 0, poll) > poll }
	testkit.Eventually(t, testkit.Patience, func() error {
		if !rests() {
			return errors.New("no rest though no run is live")
		}
		return nil
	})
	const ask = "saga.any_live"
	before := counts.Calls(ask)
	for range 3 {
		if !rests() || counts.Calls(ask) != before {
			t.Fatalf("at rest it asks %d times more", counts.Calls(ask)-before)
		}
	}
	numbered.Notify()
	if !rests() || counts.Calls(ask) != before+1 {
		t.Errorf("after a notification it asks %d times, want once", counts.Calls(ask)-before)
	}
	b.Create("toy")
	numbered.Notify()
	if rests() {
		t.Error("it rests though a run is live")
	}
}
