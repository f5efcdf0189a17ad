package background

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// statements counts what a pool executes.
type statements struct{ n atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.n.Add(1)
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TestJobsThatAreDueTogetherCostTwoStatements: one statement takes and locks them, one releases their locks.
func TestJobsThatAreDueTogetherCostTwoStatements(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	config, err := pgxpool.ParseConfig(db.URL(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	counted := &statements{}
	config.ConnConfig.Tracer = counted
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var together sync.WaitGroup
	together.Add(3)
	var jobs []Job
	for _, name := range []string{"first", "second", "third"} {
		jobs = append(jobs, Job{Name: name, Every: time.Hour, Timeout: time.Minute, Run: func(context.Context) error {
			together.Done()
			together.Wait()
			return nil
		}})
	}
	r, err := New(Deps{Pool: pool, Logger: testkit.Logger(t), Registerer: prometheus.NewRegistry()}, jobs...)
	if err != nil {
		t.Fatal(err)
	}
	r.locks.within = time.Hour // the last job to end releases all locks, however long that takes
	run, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(run) }()
	together.Wait()
	testkit.Eventually(t, testkit.Patience, func() error {
		if pool.Stat().AcquiredConns() != 0 {
			return pgx.ErrTxClosed // not yet released
		}
		return nil
	})
	// Two more statements queried the jobs when they had no rows yet, and added them.
	if n := counted.n.Load(); n > 2+2 {
		t.Errorf("%d statements", n)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
