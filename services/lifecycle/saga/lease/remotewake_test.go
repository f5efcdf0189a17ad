package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// TestACancelAtAnotherReplicaNeedsNoHeartbeat: the replica that drives the run is notified when the event is numbered.
func TestACancelAtAnotherReplicaNeedsNoHeartbeat(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	began, ended := make(chan struct{}), make(chan error, 1)
	steps := sagatest.PureSteps("one")
	steps[0].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		close(began)
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return saga.Outcome{}, context.Cause(ctx)
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
	driving := newBed(t, def)
	asked := bedOn(t, driving.DB, nil, def)
	cfg := driving.Config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, 10*time.Minute
	driving.Drive(cfg)
	numbered := &events.Signal{}
	following, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- driving.Core.FollowRemoteWakes(following, numbered) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	_, id := driving.Create("toy")
	<-began
	if err := pg.InTx(ctx, asked.DB.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		_, err := asked.Core.Cancel(ctx, tx, id, "alice", "")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	asked.Core.Committed()
	numbering := time.NewTicker(20 * time.Millisecond)
	defer numbering.Stop()
	for {
		select {
		case cause := <-ended:
			if cause != saga.ErrCancelRequested { //nolint:errorlint // the cause itself
				t.Errorf("cause = %v", cause)
			}
			driving.Await(id, time.Minute, "failed")
			return
		case <-numbering.C:
			numbered.Notify()
		case <-ctx.Done():
			t.Fatal("the step's context was not cancelled")
		}
	}
}
