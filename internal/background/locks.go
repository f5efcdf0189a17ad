package background

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// The lock of a job is held by a session, and so ends with the process whatever becomes of that.
var (
	runners = []string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}

	lockJobs = pg.DefineShared(runners, "background.lock_jobs", `
		SELECT n.name FROM unnest($1::text[]) AS n (name) WHERE pg_try_advisory_lock(hashtextextended('background/' || current_user || '/' || n.name, 0))`)
	unlockJob = pg.DefineShared(runners, "background.unlock_job", `SELECT pg_advisory_unlock(hashtextextended('background/' || current_user || '/' || $1::text, 0))`)
)

// locks are the jobs that this replica runs. They share one connection of the pool, which is held only while there is one.
type locks struct {
	pool   *pgxpool.Pool
	logger *slog.Logger

	mu   sync.Mutex
	conn *pgxpool.Conn // nil while no job runs
	held map[string]bool
}

// take locks jobs, all by one statement, and returns those that may run here: no run of them is under way on any replica.
func (l *locks) take(ctx context.Context, jobs []string) (map[string]bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	free := map[string]bool{}
	jobs = slices.DeleteFunc(slices.Clone(jobs), func(job string) bool { _, running := l.held[job]; return running })
	if len(jobs) == 0 {
		return free, nil
	}
	if l.conn == nil {
		conn, err := l.pool.Acquire(ctx)
		if err != nil {
			return nil, fmt.Errorf("connect: %w", err)
		}
		l.conn = conn
	}
	locked, err := pg.Values[string](ctx, l.conn, lockJobs, jobs)
	if err != nil {
		l.drop(ctx) // whether the session has the locks is not known
		return nil, fmt.Errorf("take the locks of jobs: %w", err)
	}
	for _, job := range locked {
		l.held[job], free[job] = true, true
	}
	l.releaseIdle()
	return free, nil
}

// give gives the lock of a job back. Where the session is gone, so is the lock.
func (l *locks) give(ctx context.Context, job string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	locked := l.held[job]
	delete(l.held, job)
	if !locked || l.conn == nil {
		return
	}
	if held, err := pg.Value[bool](ctx, l.conn, unlockJob, job); err != nil || !held {
		l.logger.WarnContext(ctx, "the lock of background work was not given back; its session is closed", slog.String("job", job), obs.Err(err))
		l.drop(ctx)
		return
	}
	l.releaseIdle()
}

// releaseIdle gives the connection back once no job runs.
func (l *locks) releaseIdle() {
	for _, locked := range l.held {
		if locked {
			return
		}
	}
	if l.conn != nil {
		l.conn.Release()
		l.conn = nil
	}
}

// drop closes the session, which ends its locks. Jobs that run go on: that one of them may then run twice harms nothing.
func (l *locks) drop(ctx context.Context) {
	if l.conn == nil {
		return
	}
	conn := l.conn.Hijack()
	l.conn = nil
	for job := range l.held {
		l.held[job] = false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	if err := conn.Close(ctx); err != nil {
		l.logger.DebugContext(ctx, "close a session", obs.Err(err))
	}
}

// close ends the session whatever still runs, so that the pool can be closed.
func (l *locks) close(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(ctx)
}
