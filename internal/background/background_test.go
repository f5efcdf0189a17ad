package background_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// start runs jobs over db until the answered function is called.
func start(t *testing.T, db *testkit.Database, jobs ...background.Job) func() {
	t.Helper()
	r, err := background.New(background.Deps{Pool: db.Pool(pg.RoleLifecycle), Schema: pg.RoleLifecycle, Logger: testkit.Logger(t)}, jobs...)
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
	tell := func(c chan struct{}) {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	stop := start(t, testkit.DB(t),
		background.Job{Name: "good", Every: time.Second, Run: func(context.Context) error { tell(good); return nil }},
		background.Job{Name: "bad", Every: time.Second, Run: func(context.Context) error { tell(bad); return errors.New("no") }},
		background.Job{Name: "panics", Every: time.Second, Run: func(context.Context) error { tell(panics); panic("really not") }})
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
	job := background.Job{Name: "hourly", Every: time.Hour, Run: func(context.Context) error { runs <- struct{}{}; return nil }}
	first := start(t, db, job)
	select {
	case <-runs:
	case <-ctx.Done():
		t.Fatal("the job did not run at the start")
	}
	second := start(t, db, job)
	first() // the second leads from here on, and its start is within the period
	third := make(chan struct{}, 1)
	last := start(t, db, job, background.Job{Name: "mark", Every: time.Hour, Run: func(context.Context) error { third <- struct{}{}; return nil }})
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
		"no name":   {{Every: time.Second, Run: work}},
		"no period": {{Name: "a", Run: work}},
		"no work":   {{Name: "a", Every: time.Second}},
		"two alike": {{Name: "a", Every: time.Second, Run: work}, {Name: "a", Every: time.Minute, Run: work}},
	} {
		if _, err := background.New(background.Deps{Schema: pg.RoleLifecycle, Logger: testkit.Logger(t)}, jobs...); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
}
