package background

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// The lock of a job is held by a session, and so ends with the process whatever becomes of that.
var (
	runners = []string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}

	lockJob   = pg.DefineShared(runners, "background.lock_job", `SELECT pg_try_advisory_lock(hashtextextended('background/' || current_user || '/' || $1::text, 0))`)
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

// take returns whether the job may run here: no run of it is under way on any replica.
func (l *locks) take(ctx context.Context, job string) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, running := l.held[job]; running {
		return false, nil
	}
	if l.conn == nil {
		conn, err := l.pool.Acquire(ctx)
		if err != nil {
			return false, fmt.Errorf("connect: %w", err)
		}
		l.conn = conn
	}
	free, err := pg.Value[bool](ctx, l.conn, lockJob, job)
	if err != nil {
		l.drop(ctx) // whether the session has the lock is not known
		return false, fmt.Errorf("take the lock of the job: %w", err)
	}
	if free {
		l.held[job] = true
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
