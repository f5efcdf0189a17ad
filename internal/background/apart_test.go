package background

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestShortJobsThatAreDueTogetherRunOneAfterTheOther: each of them uses connections, and the connections that a burst
// needed stay open for a minute.
func TestShortJobsThatAreDueTogetherRunOneAfterTheOther(t *testing.T) {
	testkit.IO(t)
	ctx, pool := testkit.Context(t), testkit.DB(t).Pool(pg.RoleLifecycle)
	var running, most atomic.Int64
	ran := make(chan struct{}, 8)
	var jobs []Job
	for _, name := range []string{"first", "second", "third", "fourth"} {
		jobs = append(jobs, Job{Name: name, Every: time.Hour, Timeout: time.Minute, Run: func(ctx context.Context) error {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			_, err := pg.Era(ctx, pool)
			ran <- struct{}{}
			return err
		}})
	}
	r, err := New(Deps{Pool: pool, Logger: testkit.Logger(t), Registerer: prometheus.NewRegistry()}, jobs...)
	if err != nil {
		t.Fatal(err)
	}
	r.apart = time.Hour
	runs, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(runs) }()
	for range jobs {
		select {
		case <-ran:
		case <-ctx.Done():
			t.Fatal("a job does not run")
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := most.Load(); n != 1 {
		t.Errorf("%d ran at once", n)
	}
}
