package operation

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// The stages of the step StepStorage, in their order.
var allStages = []string{"reserve", "launch", "connect", "hold_devices", "make_directory"}

// killer has the replica that sends a statement die there: the statement and its transaction fail, and the replica
// reaches the database no more.
type killer struct {
	mu   sync.Mutex
	at   func(sql string, args []any) bool // nil: no replica dies
	died chan struct{}

	victim *member // that died
	thaw   func()
}

type killerOf struct {
	*killer

	replica *member
}

// TraceQueryStart cancels the statement at which the replica dies.
func (k killerOf) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if !k.dies(data.SQL, data.Args) {
		return ctx
	}
	return ended(ctx)
}

// TraceQueryEnd does nothing.
func (killerOf) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart is TraceQueryStart for statements that are sent together.
func (k killerOf) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		if k.dies(q.SQL, q.Arguments) {
			return ended(ctx)
		}
	}
	return ctx
}

// TraceBatchQuery does nothing.
func (killerOf) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd does nothing.
func (killerOf) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// dies reports whether the replica dies at a statement, and freezes it then.
func (k killerOf) dies(sql string, args []any) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.at == nil || !k.at(sql, args) {
		return false
	}
	k.at, k.victim, k.thaw = nil, k.replica, k.replica.freeze()
	close(k.died)
	return true
}

// gone waits until a replica died, and closes its connections in Postgres: a statement that it sent before would
// otherwise end after the mesh's clock was moved, and lease the run again.
func (k *killer) gone(p *cluster) {
	p.t.Helper()
	select {
	case <-k.died:
	case <-time.After(testkit.Patience):
		p.t.Fatal("no replica came to the statement")
	}
	p.t.Cleanup(k.thaw)
	testkit.Eventually(p.t, testkit.Patience, func() error {
		var n int
		if err := p.db.Pool(pg.RoleLifecycle).QueryRow(testkit.Context(p.t), `SELECT count(pg_terminate_backend(pid))
			FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database()`,
			k.victim.name).Scan(&n); err != nil {
			return err
		}
		if n > 0 {
			return fmt.Errorf("the replica has %d connections", n)
		}
		return nil
	})
}

func ended(ctx context.Context) context.Context {
	dead, end := context.WithCancel(ctx)
	end()
	return dead
}

// begin requests a workspace with one GPU on an instance of its own, and returns its id and its run's.
func (p *cluster) begin(name string) (string, string) {
	p.t.Helper()
	res, err := p.seats[0].server.RequestOperation(p.t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: p.tenant(), Name: name, Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess, Gpus: 1},
		}},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return res.GetOperation().GetWorkspaceId(), res.GetOperation().GetOperationId()
}

// entered returns the stages that the attempts at StepStorage have entered, each as "attempt stage", in their order.
func (p *cluster) entered(run string) []string {
	p.t.Helper()
	var out []string
	for _, e := range testkit.Events(p.t, p.db.Pool(pg.RoleLifecycle), `kind = 'step.changed' AND workflow_id = $1`, run) {
		if e.Text("stage") == "" {
			continue
		}
		if now := e.Text("attempt") + " " + e.Text("stage"); len(out) == 0 || out[len(out)-1] != now {
			out = append(out, now)
		}
	}
	return out
}

// stages returns what entered returns for an attempt that enters stages.
func stages(attempt int, names ...string) []string {
	var out []string
	for _, name := range names {
		out = append(out, fmt.Sprint(attempt, " ", name))
	}
	return out
}

// madeOnce checks that everything which the step makes was made once.
func (p *cluster) madeOnce(id string) {
	p.t.Helper()
	for what, sql := range map[string]string{
		"allocations": `SELECT count(*) FROM lifecycle.allocation WHERE workspace_id = $1`,
		"instances":   `SELECT count(*) FROM lifecycle.instance WHERE workspace_id = $1`,
		"devices": `SELECT count(*) FROM lifecycle.gpu_hold JOIN lifecycle.allocation USING (allocation_id)
			WHERE workspace_id = $1`,
		"directories":  `SELECT count(*) FROM lifecycle.task WHERE workspace_id = $1 AND type = 'storage.allocate'`,
		"claims on it": `SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'storage'`,
	} {
		if n := p.count(sql, id); n != 1 {
			p.t.Errorf("%d %s", n, what)
		}
	}
	p.launchedOnce(id)
}

func (p *cluster) launchedOnce(id string) {
	p.t.Helper()
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	if n := p.world.launches[id+":1"]; n != 1 || len(p.world.overlaps) > 0 {
		p.t.Errorf("it was launched %d times; %v", n, p.world.overlaps)
	}
}

// storageAttempts returns the attempts at StepStorage as the timeline shows them.
func (p *cluster) storageAttempts(run string) []runs.Attempt {
	p.t.Helper()
	all, err := runs.Timeline(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), run)
	if err != nil {
		p.t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(a runs.Attempt) bool { return a.Name != provision.StepStorage || a.Dir != runs.Do })
}

// TestAStepWhoseDriverDiesGoesOnInItsStage has the replica die in the middle of each stage, in that of the launch after
// the instance was launched and before that is recorded. Another replica goes on in that stage and makes nothing twice.
func TestAStepWhoseDriverDiesGoesOnInItsStage(t *testing.T) {
	inserts := func(table string) func(string, []any) bool {
		return func(sql string, _ []any) bool { return strings.Contains(sql, "INSERT INTO lifecycle."+table+" ") }
	}
	for n, at := range []func(sql string, args []any) bool{
		inserts("allocation"),
		func(sql string, args []any) bool {
			return strings.Contains(sql, "UPDATE lifecycle.instance") && slices.Contains(args, any("live"))
		},
		func(sql string, _ []any) bool {
			return strings.HasSuffix(sql, "FROM lifecycle.node_gate g WHERE g.node_id = $1")
		},
		inserts("gpu_hold"),
		inserts("task"),
	} {
		t.Run(allStages[n], func(t *testing.T) {
			const lease = time.Minute
			k := &killer{at: at, died: make(chan struct{})}
			p := newCluster(t, clusterConfig{
				seats: 2, lease: lease, tracers: func(s *member) pgx.QueryTracer { return killerOf{k, s} },
			})
			id, run := p.begin("demo")
			k.gone(p)
			if list := p.storageAttempts(run); len(list) != 1 || list[0].Stage != allStages[n] || list[0].State != "running" {
				t.Errorf("the timeline shows %+v", list)
			}
			testkit.SetClockOffset(p.db, lease+time.Second)
			p.rests(id, "active")
			want := slices.Concat(stages(1, allStages[:n+1]...), stages(2, allStages[n:]...))
			if got := p.entered(run); !slices.Equal(got, want) {
				t.Errorf("the attempts entered %q, want %q", got, want)
			}
			if list := p.storageAttempts(run); len(list) != 2 || list[0].State != "lost" || list[0].Stage != allStages[n] ||
				list[1].State != "succeeded" || list[1].Stage != "make_directory" {
				t.Errorf("the timeline shows %+v", list)
			}
			p.madeOnce(id)
		})
	}
}

// reluctant is a world that refuses to launch beside a former instance as long as refuse is set.
type reluctant struct {
	*world

	refuse *atomic.Bool
}

func (r reluctant) Launch(ctx context.Context, b placement.LaunchRequest) (placement.Launched, error) {
	if r.refuse.Load() {
		return placement.Launched{}, fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE, "a former instance runs")
	}
	return r.world.Launch(ctx, b)
}

// TestAStepThatWaitsGoesOnInItsStage: the step waits in three of its stages, and is paused by rollback mode in each.
// The timeline shows the stage all the time, no stage is entered twice, and it is one attempt.
func TestAStepThatWaitsGoesOnInItsStage(t *testing.T) {
	var refuse atomic.Bool
	refuse.Store(true)
	p := newCluster(t, clusterConfig{
		seats: 2, lease: time.Hour, instances: func(w *world) placement.Driver { return reluctant{w, &refuse} },
	})
	p.dead(1)
	p.mutes(true)
	id, run := p.begin("demo")
	for _, wait := range []struct {
		stage, why string
		over       func()
	}{
		{"launch", "previous_epoch_alive", func() { refuse.Store(false) }},
		{"connect", noAgent, func() { p.dead(0) }},
		{"make_directory", "waiting for the agent to make", func() { p.mutes(false) }},
	} {
		shows := func(when string) {
			t.Helper()
			list := p.storageAttempts(run)
			if len(list) != 1 || list[0].Stage != wait.stage || list[0].State != "waiting" {
				t.Errorf("in %s, %s: the timeline shows %+v", wait.stage, when, list)
			}
		}
		p.parked(run, provision.StepStorage, wait.why)
		shows("waiting")
		testkit.SetRollback(p.db, true)
		p.wake(id)
		p.parked(run, provision.StepStorage, "control_plane_rollback")
		shows("paused")
		testkit.SetRollback(p.db, false)
		p.parked(run, provision.StepStorage, wait.why)
		wait.over()
		p.wake(id)
	}
	p.rests(id, "active")
	if got, want := p.entered(run), stages(1, allStages...); !slices.Equal(got, want) {
		t.Errorf("the attempt entered %q, want %q", got, want)
	}
	p.madeOnce(id)
}

// mutes has no agent take work, or all of them again.
func (p *cluster) mutes(mute bool) {
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	p.world.mute = mute
}

// TestAStageWhoseGroundIsGoneFallsBack: the step waits in its last stage, and what an earlier stage has made goes away.
// It goes on in that stage.
func TestAStageWhoseGroundIsGoneFallsBack(t *testing.T) {
	for _, tc := range []struct {
		name string
		gone string // statement that takes it away
		then func(p *cluster, id, run string)
		to   string // the stage to fall back to
		ends string // state of the workspace
	}{
		{
			name: "session", to: "connect", ends: "active", gone: `UPDATE lifecycle.node_gate SET session_epoch = 0
			WHERE node_id = (SELECT node_id FROM lifecycle.instance WHERE workspace_id = $1)`,
			then: func(p *cluster, id, run string) {
				p.parked(run, provision.StepStorage, noAgent)
				if list := p.storageAttempts(run); list[0].Stage != "connect" {
					p.t.Errorf("the timeline shows %+v", list)
				}
				p.change(`UPDATE lifecycle.node_gate SET session_epoch = 1
					WHERE node_id = (SELECT node_id FROM lifecycle.instance WHERE workspace_id = $1)`, id)
			},
		},
		{name: "devices", to: "hold_devices", ends: "active", gone: `DELETE FROM lifecycle.gpu_hold
			WHERE allocation_id = (SELECT allocation_id FROM lifecycle.allocation WHERE workspace_id = $1)`},
		{name: "slot", to: "reserve", ends: "active", gone: `WITH gone AS (
			UPDATE lifecycle.allocation SET state = 'released', occupancy = 'none'
			WHERE workspace_id = $1 RETURNING allocation_id)
			DELETE FROM lifecycle.gpu_hold USING gone WHERE gpu_hold.allocation_id = gone.allocation_id`},
		{name: "instance", to: "launch", ends: "failed", gone: `UPDATE lifecycle.instance
			SET state = 'ended', ended_at = mesh.clock() WHERE workspace_id = $1`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newCluster(t, clusterConfig{seats: 2, lease: time.Hour})
			p.mutes(true)
			id, run := p.begin("demo")
			p.parked(run, provision.StepStorage, "waiting for the agent to make")
			p.change(tc.gone, id)
			p.wake(id)
			if tc.then != nil {
				tc.then(p, id, run)
				p.wake(id)
			}
			p.mutes(false)
			w := p.rests(id, tc.ends)
			from := slices.Index(allStages, tc.to)
			want := append(stages(1, allStages...), stages(1, allStages[from:]...)...)
			if tc.ends == "failed" {
				want = append(stages(1, allStages...), stages(1, tc.to)...)
				if w.LastErrorCode != "epoch_ended" {
					t.Errorf("it failed with %s: %s", w.LastErrorCode, w.LastError)
				}
			}
			if got := p.entered(run); !slices.Equal(got, want) {
				t.Errorf("the attempt entered %q, want %q", got, want)
			}
			p.launchedOnce(id)
		})
	}
}

// change changes rows of a workspace as no step does.
func (p *cluster) change(sql, id string) {
	p.t.Helper()
	if _, err := p.db.OwnerPool().Exec(p.t.Context(), sql, id); err != nil {
		p.t.Fatal(err)
	}
}

// TestARunFromBeforeStagesGoesOn: a run waits in a database of a build without stages, which is migrated. The step
// finds what is there and goes on.
func TestARunFromBeforeStagesGoesOn(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: time.Hour})
	p.dead(1)
	id, run := p.begin("demo")
	p.parked(run, provision.StepStorage, noAgent)
	file, err := fs.ReadFile(migrations.FS, "00249_stages_of_attempts.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(file), "-- +goose Down")
	before := p.entered(run)
	err = pg.InTx(t.Context(), p.db.OwnerPool(), func(ctx context.Context, tx pgx.Tx) error {
		for _, sql := range []string{down, up} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if list := p.storageAttempts(run); len(list) != 1 || list[0].Stage != "" {
		t.Errorf("after the migration the timeline shows %+v", list)
	}
	p.dead(0)
	p.wake(id)
	p.rests(id, "active")
	want := slices.Concat(stages(1, allStages[:3]...), stages(1, allStages...))
	if got := p.entered(run); len(before) != 3 || !slices.Equal(got, want) {
		t.Errorf("the attempt entered %q, want %q", got, want)
	}
	p.madeOnce(id)
}
