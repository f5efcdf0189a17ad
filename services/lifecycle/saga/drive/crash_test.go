package drive_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/devstack/pgserver"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
	"github.com/gpuaas/mesh/services/lifecycle/saga/stall"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// TestCrashIsReclaimedAndTheZombieRefused: the first driver holds a step that neither beats nor ends; a second takes
// over after the lease, and the first one's writes are refused then.
func TestCrashIsReclaimedAndTheZombieRefused(t *testing.T) {
	testkit.IO(t)
	var calls atomic.Int32
	zombie, began := make(chan error, 1), make(chan struct{})
	release := make(chan struct{})
	steps := sagatest.PureSteps("one", "two")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) == 1 {
			close(began)
			<-release
			zombie <- errors.Join(env.Progress(context.WithoutCancel(ctx), "still here"),
				env.Tx(context.WithoutCancel(ctx), func(context.Context, pgx.Tx) error { return nil }))
		}
		return saga.Done(map[string]int{"by": env.Attempt}), nil
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
	b := newBed(t, def)
	cfg := b.Config("dead")
	cfg.Heartbeat, cfg.Lease = time.Minute, 3*time.Minute // it never beats in the time of this test
	b.Drive(cfg)
	_, id := b.Create("toy")
	<-began
	testkit.SetClockOffset(b.DB, 4*time.Minute)
	o := b.Second(def)
	o.Drive(o.Config("alive"))
	r := o.Await(id, testkit.Patience, "succeeded")
	if r.Fence != 2 {
		t.Errorf("fence = %d", r.Fence)
	}
	close(release)
	if err := <-zombie; !errors.Is(err, saga.ErrFenced) {
		t.Errorf("the zombie's writes = %v", err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := b.Core.Stats().FencedOut.Load(); n == 0 {
			return errors.New("no refused write was counted")
		}
		return nil
	})
	list := b.Timeline(id)
	if len(list) != 3 || list[0].State != "lost" || list[1].Attempt != 2 || list[1].OpSeq <= list[0].OpSeq ||
		string(list[1].Output) != `{"by": 2}` {
		t.Errorf("timeline = %+v", list)
	}
}

// TestPausedDriverLosesItsLease: a driver whose heartbeats do not arrive gives its step up before another driver may
// take it.
func TestPausedDriverLosesItsLease(t *testing.T) {
	testkit.IO(t)
	cause := make(chan error, 1)
	var calls atomic.Int32
	steps := sagatest.PureSteps("one")
	steps[0].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) > 1 {
			return saga.Done(nil), nil
		}
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return saga.Outcome{}, context.Cause(ctx)
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
	b := newBed(t, def)
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	b.Await(id, testkit.Patience, "running")
	// Another driver leases it, as it would after the lease has ended, without the wait.
	b.Exec(`UPDATE lifecycle.saga_run SET fence = fence + 1, owner = 'thief' WHERE id = $1`, id)
	select {
	case err := <-cause:
		if !errors.Is(err, saga.ErrFenced) {
			t.Errorf("cause = %v", err)
		}
	case <-time.After(testkit.Patience):
		t.Fatal("the step's context did not end")
	}
	b.Exec(`UPDATE lifecycle.saga_run SET next_at = mesh.clock(), lease_until = mesh.clock() WHERE id = $1`, id)
	b.Await(id, testkit.Patience, "succeeded")
}

func TestOwnLeasesAreReclaimedAtBoot(t *testing.T) {
	testkit.IO(t)
	steps := sagatest.PureSteps("one")
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	_, id := b.Create("toy")
	b.Exec(`UPDATE lifecycle.saga_run
		SET state = 'running', owner = 'a', fence = 5, lease_until = mesh.clock() + '1 hour',
		next_at = mesh.clock() + '1 hour' WHERE id = $1`, id)
	b.Drive(b.Config("a"))
	if r := b.Await(id, testkit.Patience, "succeeded"); r.Fence != 6 {
		t.Errorf("fence = %d", r.Fence)
	}
}

// TestShutdownHandsOver: a driver that stops ends its step's context, and another driver goes on with the same attempt
// at once.
func TestShutdownHandsOver(t *testing.T) {
	testkit.IO(t)
	began := make(chan struct{}, 2)
	var calls atomic.Int32
	steps := sagatest.PureSteps("one")
	steps[0].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		began <- struct{}{}
		if calls.Add(1) == 1 {
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), saga.ErrShutdown) {
				t.Errorf("cause = %v", context.Cause(ctx))
			}
			return saga.Outcome{}, context.Cause(ctx)
		}
		return saga.Done(nil), nil
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
	b := newBed(t, def)
	stop := b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	<-began
	stop()
	if r := b.Run(id); r.State != "waiting" || r.Owner != "" || r.WhyWaiting == "" {
		t.Errorf("after the stop: %s, owner %q, why %q", r.State, r.Owner, r.WhyWaiting)
	}
	o := b.Second(def)
	o.Drive(o.Config("b"))
	o.Await(id, testkit.Patience, "succeeded")
	if list := b.Timeline(id); len(list) != 1 || list[0].Attempt != 1 {
		t.Errorf("timeline = %+v", list)
	}
}

// TestUnreadableRunStopsNoOther: a run whose steps differ from its definition's is put aside with the reason; the
// others go on.
func TestUnreadableRunStopsNoOther(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: sagatest.PureSteps("one", "two"), States: sagatest.States(),
	})
	bad, badRun := b.Create("toy")
	b.Exec(`UPDATE lifecycle.saga_run SET step_names = '{other}' WHERE id = $1`, badRun)
	unknown, unknownRun := b.Create("toy")
	b.Exec(`UPDATE lifecycle.saga_run SET def_version = 99 WHERE id = $1`, unknownRun)
	var good []string
	for range 5 {
		_, id := b.Create("toy")
		good = append(good, id)
	}
	b.Drive(b.Config("a"))
	for _, id := range good {
		b.Await(id, testkit.Patience, "succeeded")
	}
	if r := b.Await(badRun, testkit.Patience, "stuck"); !strings.Contains(r.StuckReason, "unreadable") {
		t.Errorf("stuck reason = %q", r.StuckReason)
	}
	if w := b.Workspace(bad); w.State != "stuck" {
		t.Errorf("workspace = %s", w.State)
	}
	// A version that this build does not know is left for one that does.
	if r := b.Run(unknownRun); r.State != "pending" || r.Fence != 0 {
		t.Errorf("run of an unknown version: %s, fence %d (workspace %s)", r.State, r.Fence, unknown)
	}
}

// TestPoisonedBatchIsTakenApart: a run that breaks the statement itself does not take the batch with it.
func TestPoisonedBatchIsTakenApart(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States()})
	_, bad := b.Create("toy")
	ws, _ := b.Create("toy")
	// The open attempt is of another step, which no build has ever written.
	b.Exec(`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq,
		state, idem_key, stall_after)
		VALUES ($1, 0, 'one', 'undo', 1, $2, $3, 1, 1, 'waiting', 'k', '5 min')`, bad, ws, b.Tenant)
	b.Exec(`UPDATE lifecycle.saga_run SET fence = 3 WHERE id = $1`, bad)
	var good []string
	for range 5 {
		_, id := b.Create("toy")
		good = append(good, id)
	}
	b.Drive(b.Config("a"))
	for _, id := range good {
		b.Await(id, testkit.Patience, "succeeded")
	}
	b.Await(bad, testkit.Patience, "stuck")
}

func TestStallsAreFlaggedAndNotKilled(t *testing.T) {
	testkit.IO(t)
	release := make(chan struct{})
	moved := make(chan struct{})
	steps := sagatest.PureSteps("slow")
	steps[0].StallAfter = time.Minute
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		<-release
		if err := env.Progress(ctx, "pods 2/3"); err != nil {
			return saga.Outcome{}, err
		}
		close(moved)
		<-ctx.Done()
		return saga.Outcome{}, context.Cause(ctx)
	}
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), StallAfter: 10 * time.Minute,
	})
	cfg := b.Config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, time.Minute
	b.Drive(cfg)
	_, id := b.Create("toy")
	b.Await(id, testkit.Patience, "running")
	testkit.SetClockOffset(b.DB, 61*time.Second)
	stalled := func(want bool, prefix string) func() error {
		return func() error {
			list, r := b.Timeline(id), b.Run(id)
			if len(list) != 1 || list[0].Stalled != want || !strings.HasPrefix(r.StuckReason, prefix) ||
				(prefix == "" && r.StuckReason != "") {
				return fmt.Errorf("stalled %v, stuck reason %q", list[0].Stalled, r.StuckReason)
			}
			return nil
		}
	}
	testkit.Eventually(t, testkit.Patience, stalled(true, "step_stalled"))
	if r := b.Run(id); r.State != "running" {
		t.Errorf("a stalled run is %s", r.State)
	}
	close(release)
	<-moved
	testkit.Eventually(t, testkit.Patience, stalled(false, ""))
	if list := b.Timeline(id); list[0].Progress != "pods 2/3" {
		t.Errorf("progress = %q", list[0].Progress)
	}
	testkit.SetClockOffset(b.DB, 11*time.Minute)
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.Run(id); !strings.HasPrefix(r.StuckReason, "run_stalled") &&
			!strings.HasPrefix(r.StuckReason, "step_stalled") {
			return fmt.Errorf("stuck reason %q", r.StuckReason)
		}
		return nil
	})
}

// TestAStepStallsThoughItsDriversAreLost checks that the time of a stall goes on counting when a driver is lost, and
// begins again only with an attempt after one that ended by itself.
func TestAStepStallsThoughItsDriversAreLost(t *testing.T) {
	testkit.IO(t)
	for _, tc := range []struct {
		before string
		want   int
	}{{"lost", 1}, {"failed", 0}} {
		t.Run(tc.before, func(t *testing.T) {
			steps := sagatest.PureSteps("wedged")
			steps[0].StallAfter = time.Minute
			steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
				return saga.Wait(saga.WaitFor{For: time.Hour, Why: "waiting for nothing"}), nil
			}
			b := newBed(t, saga.Definition{
				Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), StallAfter: time.Hour,
			})
			stop := b.Drive(b.Config("a"))
			_, id := b.Create("toy")
			b.Await(id, testkit.Patience, "waiting")
			stop()
			b.Exec(`UPDATE lifecycle.saga_step SET attempt = 2 WHERE run_id = $1`, id)
			b.Exec(`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, idem_key, state,
				fence, op_seq, stall_after, started_at, finished_at, version)
				SELECT run_id, step, name, dir, 1, workspace_id, tenant_id, idem_key, $2, fence, op_seq, stall_after,
					started_at - interval '50 seconds', started_at, 1
				FROM lifecycle.saga_step WHERE run_id = $1`, id, tc.before)
			testkit.SetClockOffset(b.DB, 20*time.Second)
			if n, err := stall.Mark(testkit.Context(t), b.Core, time.Hour); err != nil || n != tc.want {
				t.Errorf("%d steps stall after an attempt that was %s, not %d: %v", n, tc.before, tc.want, err)
			}
		})
	}
}

func TestBudgetAndDeadlineEndTheForwardPhase(t *testing.T) {
	testkit.IO(t)
	var rec sagatest.Record
	steps := sagatest.Recorded(&rec, "one", "two")
	steps[1].Budget = 100 * time.Millisecond
	steps[1].Retry = saga.RetryPolicy{Attempts: 2, First: 5 * time.Millisecond, Max: 5 * time.Millisecond}
	steps[1].Do = func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) {
		<-ctx.Done()
		rec.Add("cause %v", context.Cause(ctx))
		return saga.Outcome{}, context.Cause(ctx)
	}
	waiting := sagatest.PureSteps("forever")
	waiting[0].Undo = sagatest.Noop
	waiting[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		return saga.Wait(saga.WaitFor{For: time.Hour, Why: "it never comes"}), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()},
		saga.Definition{
			Name: "forever", Version: 1, Steps: waiting, States: sagatest.States(), Deadline: 300 * time.Millisecond,
		})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	if r := b.Await(id, testkit.Patience, "failed"); r.ErrorCode != "deadline_of_step_exceeded" {
		t.Errorf("error = %s: %s", r.ErrorCode, r.Error)
	}
	want := []string{
		"do one", "cause " + saga.ErrBudget.Error(), "cause " + saga.ErrBudget.Error(), "undo two",
		"undo one",
	}
	if got := rec.All(); !slices.Equal(got, want) {
		t.Errorf("calls = %v, want %v", got, want)
	}
	_, id = b.Create("forever")
	if r := b.Await(id, testkit.Patience, "failed"); r.ErrorCode != "deadline_exceeded" {
		t.Errorf("error = %s: %s", r.ErrorCode, r.Error)
	}
}

// TestPostgresRestartMidRun: the database is killed while steps run; every run ends once, and no step of a later
// position runs before an earlier.
func TestPostgresRestartMidRun(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	server, err := pgserver.StartTemporary(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	passwords := map[string]string{pg.RoleOwner: "p"}
	for _, role := range pg.Roles() {
		passwords[role] = "p"
	}
	if err := schema.Provision(ctx, server.AdminURL(),
		schema.Provisioning{WorkloadDatabase: "-", Passwords: passwords}); err != nil {
		t.Fatal(err)
	}
	if _, err := schema.Migrate(ctx, server.URL(pg.DatabaseMesh, pg.RoleOwner, "p"), schema.MigrateOptions{}); err != nil {
		t.Fatal(err)
	}
	pool, err := pg.Open(ctx, pg.Config{URL: server.URL(pg.DatabaseMesh, pg.RoleLifecycle, "p")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	steps := sagatest.PureSteps("one", "two", "three")
	killed := make(chan struct{})
	var once atomic.Bool
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if once.CompareAndSwap(false, true) {
			if err := server.Kill9(); err != nil {
				t.Error(err)
			}
			close(killed)
		}
		return saga.Done(nil), nil
	}
	registry, err := saga.NewRegistry(saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	if err != nil {
		t.Fatal(err)
	}
	core, err := saga.New(saga.Deps{DB: pool, Registry: registry, Logger: testkit.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	tenant := ids.New()
	if _, err := pool.Exec(ctx, `INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 't')`, tenant); err != nil {
		t.Fatal(err)
	}
	var runIDs []string
	for n := range 5 {
		err := pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			ws, err := workspace.Insert(ctx, tx, workspace.Draft{TenantID: tenant, Name: fmt.Sprintf("w%d", n)})
			if err != nil {
				return err
			}
			out, err := core.Start(ctx, tx,
				saga.StartRequest{WorkspaceID: ws, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Definition: "toy"})
			runIDs = append(runIDs, out.RunID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	b := &bed{&sagatest.Bed{T: t, Core: core}}
	cfg := b.Config("a")
	cfg.Lease, cfg.Heartbeat = 3*time.Second, 200*time.Millisecond // it is waited for
	b.Drive(cfg)
	<-killed
	if err := server.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	for _, id := range runIDs {
		testkit.Eventually(t, testkit.Patience, func() error {
			r, err := runs.Get(ctx, pool, id)
			if err == nil && r.State != "succeeded" {
				err = fmt.Errorf("run is %s: %s", r.State, r.WhyWaiting)
			}
			return err
		})
		list, err := runs.Timeline(ctx, pool, id)
		if err != nil {
			t.Fatal(err)
		}
		succeeded := map[string]int{}
		for _, a := range list {
			if a.State == "succeeded" {
				succeeded[a.Name]++
			}
		}
		for _, s := range []string{"one", "two", "three"} {
			if succeeded[s] != 1 {
				t.Errorf("step %s of run %s succeeded %d times: %+v", s, id, succeeded[s], list)
			}
		}
	}
}
