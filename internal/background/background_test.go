package background_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// start runs jobs over db until the returned function is called.
func start(t *testing.T, db *testkit.Database, jobs ...background.Job) func() {
	t.Helper()
	return startCounted(t, db, prometheus.NewRegistry(), jobs...)
}

// startCounted is start with a registry from which the test reads metrics.
func startCounted(t *testing.T, db *testkit.Database, registry *prometheus.Registry, jobs ...background.Job) func() {
	t.Helper()
	for i := range jobs {
		if jobs[i].Timeout == 0 {
			jobs[i].Timeout = time.Minute
		}
	}
	r, err := background.New(background.Deps{
		Pool: db.Pool(pg.RoleLifecycle), Logger: testkit.Logger(t), Registerer: registry,
	}, jobs...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testkit.Context(t))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestJobsRunAgainWhateverBecameOfTheLastRun(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	good, bad, panics := make(chan struct{}, 16), make(chan struct{}, 16), make(chan struct{}, 16)
	notify := func(c chan struct{}) {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	stop := start(t, testkit.DB(t),
		background.Job{Name: "good", Every: time.Second, Run: func(context.Context) error { notify(good); return nil }},
		background.Job{
			Name: "bad", Every: time.Second,
			Run: func(context.Context) error { notify(bad); return errors.New("no") },
		},
		background.Job{
			Name: "panics", Every: time.Second,
			Run: func(context.Context) error { notify(panics); panic("really not") },
		})
	defer stop()
	for _, c := range []chan struct{}{good, bad, panics, good, bad, panics} {
		select {
		case <-c:
		case <-ctx.Done():
			t.Fatal("a job does not run again")
		}
	}
}

func TestAJobRunsOnOneReplicaAtATime(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	db := testkit.DB(t)
	runs := make(chan struct{}, 16)
	job := background.Job{
		Name: "hourly", Every: time.Hour,
		Run: func(context.Context) error { runs <- struct{}{}; return nil },
	}
	first := start(t, db, job)
	select {
	case <-runs:
	case <-ctx.Done():
		t.Fatal("the job did not run at the start")
	}
	second := start(t, db, job)
	first() // from here on only the second replica runs jobs, and its start is within the period
	third := make(chan struct{}, 1)
	last := start(t, db, job, background.Job{
		Name: "mark", Every: time.Hour,
		Run: func(context.Context) error { third <- struct{}{}; return nil },
	})
	second()
	select {
	case <-third:
	case <-ctx.Done():
		t.Fatal("no replica took over")
	}
	last()
	if n := len(runs); n != 0 {
		t.Fatalf("the job ran %d times more within its period", n)
	}
}

func TestAJobIsEndedAtItsTimeAndHoldsUpNoOther(t *testing.T) {
	testkit.IO(t)
	ctx, registry := testkit.Context(t), prometheus.NewRegistry()
	hung := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	ran, ended := make(chan struct{}, 64), make(chan struct{}, 64)
	stop := startCounted(t, testkit.DB(t), registry,
		background.Job{Name: "hangs", Every: time.Hour, Run: hung},
		background.Job{Name: "hangs_too", Every: time.Hour, Run: hung},
		background.Job{Name: "hangs_as_well", Every: time.Hour, Run: hung},
		background.Job{Name: "short", Every: time.Hour, Timeout: time.Second, Run: func(ctx context.Context) error {
			<-ctx.Done()
			ended <- struct{}{}
			return ctx.Err()
		}},
		background.Job{
			Name: "matters", Every: time.Second,
			Run: func(context.Context) error { ran <- struct{}{}; return nil },
		})
	defer stop()
	for _, c := range []chan struct{}{ran, ended, ran} {
		select {
		case <-c:
		case <-ctx.Done():
			t.Fatal("a job that hangs holds up another")
		}
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := counted(t, registry, "short", "timeout"); n != 1 {
			return fmt.Errorf("%v runs timed out", n)
		}
		return nil
	})
	if n := counted(t, registry, "matters", "done"); n < 1 {
		t.Errorf("%v runs of the job that matters are counted", n)
	}
}

func TestJobsShareOneConnectionForTheirLocks(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool, err := pg.Open(ctx, pg.Config{URL: db.URL(pg.RoleLifecycle), MaxConns: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var jobs []background.Job
	began := make(chan struct{}, 64)
	for i := range 4 {
		jobs = append(jobs, background.Job{
			Name: fmt.Sprintf("hangs_%d", i), Every: time.Hour, Timeout: time.Hour,
			Run: func(ctx context.Context) error {
				began <- struct{}{}
				<-ctx.Done()
				return ctx.Err()
			},
		})
	}
	asked := make(chan error, 64)
	jobs = append(jobs, background.Job{
		Name: "asks", Every: time.Second, Timeout: time.Minute,
		Run: func(ctx context.Context) error {
			_, err := pg.Era(ctx, pool)
			asked <- err
			return err
		},
	})
	r, err := background.New(background.Deps{
		Pool: pool, Logger: testkit.Logger(t), Registerer: prometheus.NewRegistry(),
	}, jobs...)
	if err != nil {
		t.Fatal(err)
	}
	runs, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(runs) }()
	for range 4 {
		select {
		case <-began:
		case <-ctx.Done():
			t.Fatal("a job does not begin while others run")
		}
	}
	for range 2 {
		select {
		case err := <-asked:
			if err != nil {
				t.Error(err)
			}
		case <-ctx.Done():
			t.Fatal("jobs that run keep all connections")
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// counted returns how many runs of a job had an outcome.
func counted(t *testing.T, registry *prometheus.Registry, job, outcome string) float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "background_runs_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["job"] == job && labels["outcome"] == outcome {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

func TestARunLetsTheNextOnesGoBy(t *testing.T) {
	testkit.IO(t)
	ctx, db, registry := testkit.Context(t), testkit.DB(t), prometheus.NewRegistry()
	began, let := make(chan struct{}, 64), make(chan struct{})
	job := background.Job{Name: "slow", Every: time.Second, Run: func(ctx context.Context) error {
		began <- struct{}{}
		select {
		case <-let:
		case <-ctx.Done():
		}
		return nil
	}}
	stop := startCounted(t, db, registry, job)
	defer stop()
	other := start(t, db, job) // another replica
	defer other()
	<-began
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := counted(t, registry, "slow", "still_running"); n == 0 {
			return errors.New("no run was dropped")
		}
		return nil
	})
	if n := len(began); n != 0 {
		t.Errorf("%d more runs began beside it", n)
	}
	close(let)
	select {
	case <-began:
	case <-ctx.Done():
		t.Fatal("the job does not run again")
	}
}

func TestAStopEndsTheJobThatRuns(t *testing.T) {
	testkit.IO(t)
	began, ended := make(chan struct{}), make(chan struct{})
	stop := start(t, testkit.DB(t), background.Job{Name: "long", Every: time.Hour, Run: func(ctx context.Context) error {
		close(began)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	}})
	select {
	case <-began:
	case <-testkit.Context(t).Done():
		t.Fatal("the job did not begin")
	}
	stop()
	select {
	case <-ended:
	default:
		t.Fatal("the runner left a job running")
	}
}

func TestJobsAreWhole(t *testing.T) {
	work := func(context.Context) error { return nil }
	for name, jobs := range map[string][]background.Job{
		"no name":    {{Every: time.Second, Timeout: time.Second, Run: work}},
		"no period":  {{Name: "a", Timeout: time.Second, Run: work}},
		"no timeout": {{Name: "a", Every: time.Second, Run: work}},
		"no work":    {{Name: "a", Every: time.Second, Timeout: time.Second}},
		"two alike": {
			{Name: "a", Every: time.Second, Timeout: time.Second, Run: work}, {
				Name: "a", Every: time.Minute, Timeout: time.Second, Run: work,
			},
		},
	} {
		deps := background.Deps{Logger: testkit.Logger(t), Registerer: prometheus.NewRegistry()}
		if _, err := background.New(deps, jobs...); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
}
