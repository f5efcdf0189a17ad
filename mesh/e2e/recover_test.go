package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/material"
)

// resumedWithin is the budget from a driver's crash to the next transition of a run that it had leased, for 95 of 100.
const resumedWithin = 20 * time.Second

// readyUsually is how long half of the services take from a crash until they are ready, on a quiet machine of two
// processors and with something to spare.
const readyUsually = 800 * time.Millisecond

// recoveries measures how long each service takes from a crash until it is ready again, and how long the runs that a
// driver had leased stand still.
type recoveries struct {
	url string // of the database, as the administrator

	mu      sync.Mutex
	took    map[string][]time.Duration
	held    []interruption
	unknown []error // crashes whose interrupted runs could not be read
}

// interruption is one run that a driver had leased when it died.
type interruption struct {
	run   string
	fence int64
	at    time.Time
}

// watched measures recoveries, and runs the functions beside that must run meanwhile. The returned function ends it,
// and may be called again.
func watched(t test, c *cluster.Cluster, beside ...func(context.Context)) (r *recoveries, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.ctx)
	var wg sync.WaitGroup
	r = &recoveries{took: map[string][]time.Duration{}, url: databaseURL(t, c, pg.DatabaseMesh)}
	for _, p := range c.Processes() {
		seen := len(p.Exits())
		wg.Go(func() { r.watchReady(ctx, p, seen) })
		if p.Service == material.Lifecycle {
			wg.Go(func() { r.watchRuns(ctx, p, seen) })
		}
	}
	for _, b := range beside {
		wg.Go(func() { b(ctx) })
	}
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return r, stop
}

func (r *recoveries) watchReady(ctx context.Context, p *cluster.Process, seen int) {
	for app.Sleep(ctx, 20*time.Millisecond) {
		exits := p.Exits()
		if len(exits) == seen {
			continue
		}
		seen = len(exits)
		for p.PID() == exits[seen-1].PID || p.Ready(ctx) != nil {
			if !app.Sleep(ctx, 25*time.Millisecond) {
				return
			}
			if len(p.Exits()) > seen {
				break // it died again before it was ready
			}
		}
		if len(p.Exits()) == seen {
			r.mu.Lock()
			r.took[p.Service] = append(r.took[p.Service], time.Since(exits[seen-1].At))
			r.mu.Unlock()
		}
	}
}

// watchRuns reads, after each end of a driver, the runs that it had leased. A lease outlives its holder, so the rows
// stay until another driver takes the runs over.
func (r *recoveries) watchRuns(ctx context.Context, p *cluster.Process, seen int) {
	for app.Sleep(ctx, 20*time.Millisecond) {
		exits := p.Exits()
		for _, exit := range exits[seen:] {
			held, err := r.runsOf(ctx, exit)
			r.mu.Lock()
			r.held = append(r.held, held...)
			if err != nil {
				r.unknown = append(r.unknown, err)
			}
			r.mu.Unlock()
		}
		seen = len(exits)
	}
}

// runsOf asks for no longer than a lease lasts, since Postgres may be down too.
func (r *recoveries) runsOf(ctx context.Context, exit cluster.Exit) ([]interruption, error) {
	var out []interruption
	err := insist(ctx, "the runs of a dead driver", 2*time.Second, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		conn, err := pgx.Connect(ctx, r.url)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close(ctx) }()
		rows, err := conn.Query(ctx, `SELECT id::text, fence FROM lifecycle.saga_run WHERE owner = $1`, exit.Replica)
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (interruption, error) {
			i := interruption{at: exit.At}
			return i, row.Scan(&i.run, &i.fence)
		})
		return err
	})
	return out, err
}

// check prints the measurements and checks the budget of resumption. It is called when everything is at rest.
func (r *recoveries) check(t test, least int) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	total := 0
	for _, service := range slices.Sorted(maps.Keys(r.took)) {
		total += len(r.took[service])
		t.Logf("crash to ready: %-10s %3d times, %s", service, len(r.took[service]), spread(r.took[service]))
	}
	conn, err := pgx.Connect(t.ctx, r.url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.ctx)) }()
	var taken, moved []time.Duration
	for _, i := range r.held {
		// Taken over: the next attempt is open, though that was lost to another crash later, which counts by itself. Moved
		// on: an attempt of a later fence has ended.
		var open, done *time.Time
		if err := conn.QueryRow(t.ctx,
			`SELECT min(started_at), min(finished_at) FILTER (WHERE state <> 'lost') FROM lifecycle.saga_step
			WHERE run_id = $1 AND fence > $2 AND started_at > $3`, i.run, i.fence, i.at).Scan(&open, &done); err != nil {
			t.Error(err)
			continue
		}
		if open == nil {
			if again := slices.ContainsFunc(r.held,
				func(o interruption) bool { return o.run == i.run && o.fence > i.fence }); !again {
				t.Errorf("run %s was interrupted at %s and never went on", i.run, i.at.Format(time.TimeOnly))
			}
			continue
		}
		taken = append(taken, open.Sub(i.at))
		if done != nil {
			moved = append(moved, done.Sub(i.at))
		}
	}
	t.Logf("runs interrupted: %d, and %d crashes of drivers of which it is unknown", len(r.held), len(r.unknown))
	if len(moved) > 0 {
		t.Logf("crash to end of its next attempt: %s", spread(moved))
	}
	if len(taken) > 0 {
		t.Logf("crash to next transition of the interrupted run: %s", spread(taken))
		if p95, limit := quantile(taken, 95), r.limit(t); p95 > limit {
			t.Errorf("interrupted runs go on after %.1f s (p95), more than %s", p95.Seconds(), limit)
		}
	}
	if len(taken) < least {
		t.Errorf("%d interrupted runs were measured, fewer than %d", len(taken), least)
	}
}

// limit is the budget of resumption on this machine. Where services need longer than readyUsually to come back, as on
// one that is busy with other packages, everything does.
func (r *recoveries) limit(t test) time.Duration {
	t.Helper()
	var all []time.Duration
	for _, took := range r.took {
		all = append(all, took...)
	}
	if len(all) == 0 {
		return resumedWithin
	}
	slow := max(1, quantile(all, 50).Seconds()/readyUsually.Seconds())
	if slow > 1 {
		t.Logf("this machine is %.1f times slower than usual", slow)
	}
	return time.Duration(float64(resumedWithin) * slow)
}

func spread(of []time.Duration) string {
	return fmt.Sprintf("p50 %.2f s, p95 %.2f s, max %.2f s of %d", quantile(of, 50).Seconds(), quantile(of, 95).Seconds(),
		quantile(of, 100).Seconds(), len(of))
}

// quantile returns the smallest value that percent of all do not exceed.
func quantile(of []time.Duration, percent int) time.Duration {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[max(0, (len(sorted)*percent+99)/100-1)]
}

// TestARunGoesOnByAnotherReplica kills a driver in the middle of a step and leaves it dead: the other one must continue
// its runs, within the budget, with the default lease.
func TestARunGoesOnByAnotherReplica(tt *testing.T) {
	t := within(tt, 10*time.Minute)
	c := start(t, cluster.Config{Nodes: 3, Env: []string{"GPUAAS_LIFECYCLE_SAGA_LEASE=15s"}})
	createTenant(t, c)
	r, stop := watched(t, c)
	killed := map[int]bool{}
	var all []*request
	var starts []time.Duration
	for round, point := range []string{"intent.after_commit*=kill:2", "advance.before_commit*=kill:3"} {
		armed, others := c.Lifecycle[round], slices.Delete(slices.Clone(c.Lifecycle), round, round+1)
		arm(t, armed, killed, "lifecycle.saga."+point)
		starts = append(starts, prefer(t, c, others, killed)...)
		var batch []*request
		for i := range 6 {
			name := fmt.Sprintf("r%d-%d", round, i)
			batch = append(batch, &request{
				name: name, key: name,
				spec: &lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC},
			})
		}
		all = append(all, batch...)
		if err := createAll(t.ctx, c, batch); err != nil {
			t.Error(err)
		}
		t.must(armed.Name+" to die at its kill point", time.Minute, func(context.Context) error {
			if exits := armed.Exits(); len(exits) == 0 || exits[len(exits)-1].PID != armed.PID() {
				return fmt.Errorf("%s lives", armed.Name)
			}
			return nil
		})
		dead := armed.PID()
		awaitRest(t, c, 90*time.Second, batch...)
		if pid := armed.PID(); pid != dead {
			t.Errorf("%s was to stay dead and runs as %d", armed.Name, pid)
		}
		armed.BeforeStart(nil)
		if err := armed.Start(); err != nil {
			t.Fatal(err)
		}
		t.must(armed.Name+" to be back", time.Minute, armed.Ready)
	}
	stop()
	r.took = map[string][]time.Duration{"start": starts} // a driver that is left dead is not ready soon
	r.check(t, 2)
	checkRequests(t, c, all)
	checkWorld(t, c)
	checkLogs(t, c, killed)
}

// arm starts one driver anew with a kill point, and lets it stay dead. The others have none: if all were armed, all
// could die, and no driver would be left.
func arm(t test, p *cluster.Process, killed map[int]bool, point string) {
	t.Helper()
	p.BeforeStart(func() []string { return []string{"GPUAAS_FAILPOINTS=" + point} })
	killed[p.PID()] = true
	if err := p.Kill9(); err != nil {
		t.Fatal(err)
	}
	t.must(p.Name+" to be started anew", time.Minute, func(ctx context.Context) error {
		if exits := p.Exits(); len(exits) == 0 || exits[len(exits)-1].PID == p.PID() {
			return fmt.Errorf("%s is not started yet", p.Name)
		}
		return p.Ready(ctx)
	})
	p.LetDie()
}

// prefer leaves a driver without the others for as long as it takes the operator's requests to come its way. A
// connection stays at the replica that accepted it, and the replica that gets a request for a workspace begins its run:
// otherwise the armed driver would die late, or never. It returns how long each took from its start until it was ready.
func prefer(t test, c *cluster.Cluster, others []*cluster.Process, killed map[int]bool) []time.Duration {
	t.Helper()
	for _, p := range others {
		p.LetDie()
		killed[p.PID()] = true
		if err := p.Kill9(); err != nil {
			t.Fatal(err)
		}
	}
	createTenant(t, c) // which is there already
	var took []time.Duration
	for _, p := range others {
		began := time.Now()
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		t.must(p.Name+" to be back", 2*time.Minute, p.Ready)
		took = append(took, time.Since(began))
	}
	return took
}
