package operation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// strict is the world with the refusals and the list of a real driver.
type strict struct{ *world }

func (s strict) Launch(ctx context.Context, b placement.LaunchRequest) (placement.Launched, error) {
	if err := s.mayLaunch(b); err != nil {
		return placement.Launched{}, err
	}
	return s.world.Launch(ctx, b)
}

func (s strict) mayLaunch(b placement.LaunchRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, have := range s.instances {
		ws, epoch := splitInstance(key)
		if ws != b.WorkspaceID || have.ended {
			continue
		}
		switch {
		case epoch == b.Epoch && have.instance != b.InstanceID:
			return placement.LostHistory("fake:"+key, have.instance, b)
		case epoch < b.Epoch && !have.fenced:
			s.refusals++
			return fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE, "an earlier epoch is not confirmed ended",
				fault.Conflicting("fake:"+key))
		}
	}
	return nil
}

func splitInstance(key string) (string, int64) {
	ws, text, _ := strings.Cut(key, ":")
	var epoch int64
	_, _ = fmt.Sscan(text, &epoch)
	return ws, epoch
}

func (s strict) List(context.Context) ([]placement.Instance, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []placement.Instance
	for key, b := range s.instances {
		ws, epoch := splitInstance(key)
		if !ids.Valid(ws) {
			continue
		}
		i := placement.Instance{
			WorkspaceID: ws, Epoch: epoch, InstanceID: b.instance, ProviderID: "fake:" + key,
			StartedAt: time.Unix(1, 0),
		}
		if b.ended {
			i.EndedAt = time.Unix(2, 0)
		}
		out = append(out, i)
	}
	return out, nil
}

// Standing returns the instances that have not ended.
func (s strict) Standing(ctx context.Context) ([]placement.Instance, error) {
	list, err := s.List(ctx)
	return slices.DeleteFunc(list, func(i placement.Instance) bool { return !i.EndedAt.IsZero() && i.Strays == 0 }), err
}

// plant makes an instance of a lost history exist at the provider.
func (p *cluster) plant(id string, epoch int64) string {
	p.t.Helper()
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	instance := ids.New()
	p.world.instances[fmt.Sprintf("%s:%d", id, epoch)] = &worldInstance{instance: instance}
	return instance
}

func (p *cluster) standingOf(id string, epoch int64) bool {
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	b := p.world.instances[fmt.Sprintf("%s:%d", id, epoch)]
	return b != nil && !b.ended
}

func (p *cluster) reaper(driver placement.Driver) *reap.Reaper {
	p.t.Helper()
	reg, err := obs.NewRegistry()
	if err != nil {
		p.t.Fatal(err)
	}
	r, err := reap.NewReaper(reap.ReaperDeps{
		Logger: testkit.Logger(p.t), DB: p.db.Pool(pg.RoleLifecycle), Identities: p.world,
		Metrics: reg.ForService("lifecycle"), Committed: func() {},
		Drivers: map[commonv1.PlacementDriver]placement.Driver{byProcess: driver},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return r
}

// wake makes the workspace's run check again now.
func (p *cluster) wake(id string) {
	p.t.Helper()
	core := p.seats[0].core
	if err := pg.InTx(p.t.Context(), p.db.Pool(pg.RoleLifecycle),
		func(ctx context.Context, tx pgx.Tx) error { return core.WakeWorkspaces(ctx, tx, id) }); err != nil {
		p.t.Fatal(err)
	}
	core.Committed()
}

// A recreation whose placement still runs an earlier instance that no row names waits for its end, however often it is
// refused, and then goes on.
func TestARecreationWaitsForTheEndOfAFormerInstance(t *testing.T) {
	var driver strict
	p := newCluster(t, clusterConfig{
		seats: 1, lease: 15 * time.Second,
		instances: func(w *world) placement.Driver { driver = strict{w}; return driver },
	})
	id := p.create(p.tenant(), "demo", byProcess)
	// A lost history had recreated the workspace; the epoch that is drawn now is above that one, as after a raise of the
	// era.
	if _, err := p.db.OwnerPool().Exec(t.Context(),
		`UPDATE lifecycle.workspace SET epoch = 4, version = version + 1 WHERE id = $1`, id); err != nil {
		t.Fatal(err)
	}
	p.plant(id, 2)
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	const tries = 8 // more than the step has attempts
	testkit.Eventually(t, testkit.Patience, func() error {
		p.world.mu.Lock()
		n := p.world.refusals
		p.world.mu.Unlock()
		if w := p.workspace(id); w.State != "recreating" {
			t.Fatalf("after %d refusals the workspace is %s: %s", n, w.State, w.LastError)
		}
		if n < tries {
			p.wake(id)
			return fmt.Errorf("the launch was refused %d times", n)
		}
		return nil
	})
	run, open, err := runs.Live(t.Context(), p.db.Pool(pg.RoleLifecycle), id)
	if err != nil || !open {
		t.Fatalf("%v %v", open, err)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND name = $2`, run.ID,
		provision.StepStorage); n != 1 {
		t.Errorf("the wait took %d attempts", n)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		n := p.count(`SELECT count(*) FROM lifecycle.saga_run
			WHERE id = $1 AND state = 'waiting' AND starts_with(why_waiting, 'previous_epoch_alive')`, run.ID)
		if n != 1 {
			return fmt.Errorf("the run does not show what it waits for")
		}
		return nil
	})
	swept, err := p.reaper(driver).Sweep(t.Context())
	if err != nil || swept.Ended == 0 || p.standingOf(id, 2) {
		t.Fatalf("swept %+v, %v", swept, err)
	}
	p.wake(id)
	if w := p.rests(id, "active"); w.Epoch != 5 {
		t.Errorf("it is in epoch %d", w.Epoch)
	}
	if len(p.world.overlaps) > 0 {
		t.Errorf("two instances stood at once: %q", p.world.overlaps)
	}
}

// An epoch that a lost history has used is refused for good, and neither the run's undo nor a sweep ends the instance
// that exists at it. The next epoch supersedes that instance.
func TestALaunchAtAnEpochOfALostHistoryIsRefusedAndEndsNothing(t *testing.T) {
	t.Parallel()
	var driver strict
	p := newCluster(t, clusterConfig{
		seats: 1, lease: 15 * time.Second,
		instances: func(w *world) placement.Driver { driver = strict{w}; return driver },
	})
	id := p.create(p.tenant(), "demo", byProcess)
	if err := p.world.End(t.Context(), id, 1); err != nil { // the lost history had ended it
		t.Fatal(err)
	}
	p.plant(id, 2)
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	if w := p.rests(id, "failed"); w.LastErrorCode != "instance_of_lost_history" {
		t.Errorf("it failed as %s: %s", w.LastErrorCode, w.LastError)
	}
	if !p.standingOf(id, 2) {
		t.Fatal("the undo ended the instance of the lost history")
	}
	reaper := p.reaper(driver)
	if swept, err := reaper.Sweep(t.Context()); err != nil || swept.Ended != 0 || swept.Unknown != 1 ||
		!p.standingOf(id, 2) {
		t.Fatalf("swept %+v, %v", swept, err)
	}
	if _, err := p.seats[0].ask(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if p.workspace(id).Epoch != 3 {
			return fmt.Errorf("no epoch was drawn")
		}
		return nil
	})
	if swept, err := reaper.Sweep(t.Context()); err != nil || swept.Ended != 1 || p.standingOf(id, 2) {
		t.Fatalf("swept %+v, %v", swept, err)
	}
	p.wake(id)
	p.rests(id, "active")
}
