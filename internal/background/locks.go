package background

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
)

// The lock of a job belongs to a database session, and so ends with the process, however the process ends.
var (
	runners = []string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}

	unlockJobs = pg.DefineShared(runners, "background.unlock_jobs", `
		SELECT bool_and(pg_advisory_unlock(`+jobLock("n.name")+`)) FROM unnest($1::text[]) AS n (name)`)
)

// jobLock returns the SQL expression for the number of a job's lock.
func jobLock(name string) string {
	return `hashtextextended('background/' || current_user || '/' || ` + name + `, 0)`
}

// unlockWithin is how long the lock of a job that has ended may wait for others that end with it: one statement
// releases them all.
const unlockWithin = 250 * time.Millisecond

// locks are the locks of the jobs that this replica runs. They share one connection of the pool, which is kept only
// while there is such a job.
type locks struct {
	pool   *pgxpool.Pool
	logger *slog.Logger
	within time.Duration // see unlockWithin

	mu    sync.Mutex
	conn  *pgxpool.Conn // nil while no job runs
	held  map[string]bool
	ended []string    // jobs whose locks are to be released
	later *time.Timer // releases them; nil while there are none
}

// take takes the jobs of a schedule that are due and locks them, by one statement, and returns them with how long to
// sleep until another is due. Jobs that are free may run here: no run of them is under way on any replica.
func (l *locks) take(ctx context.Context, from schedule) ([]dueRow, time.Duration, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		conn, err := l.pool.Acquire(ctx)
		if err != nil {
			return nil, 0, fmt.Errorf("connect: %w", err)
		}
		l.conn = conn
	}
	due, left, err := from.take(ctx, l.conn, slices.AppendSeq([]string{}, maps.Keys(l.held)))
	if err != nil {
		l.drop(ctx) // the session may or may not have the locks
		return nil, 0, err
	}
	for _, job := range due {
		if job.Free {
			l.held[job.Name] = true
		}
	}
	l.releaseIdle()
	return due, left, nil
}

// give releases the lock of a job: at once if no other job runs, and otherwise within unlockWithin, together with the
// locks of jobs that end meanwhile. If the session is gone, so is the lock.
func (l *locks) give(ctx context.Context, job string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	locked := l.held[job]
	delete(l.held, job)
	if !locked || l.conn == nil {
		return
	}
	l.ended = append(l.ended, job)
	if !l.running() {
		l.unlock(ctx)
		return
	}
	if l.later == nil {
		ctx := context.WithoutCancel(ctx)
		l.later = time.AfterFunc(l.within, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.unlock(ctx)
		})
	}
}

// unlock releases the locks of jobs that have ended.
func (l *locks) unlock(ctx context.Context) {
	ended := l.ended
	l.forget()
	if len(ended) == 0 || l.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	if held, err := pg.Value[bool](ctx, l.conn, unlockJobs, ended); err != nil || !held {
		l.logger.WarnContext(ctx, "locks of background work were not given back; their session is closed",
			slog.Any("jobs", ended), obs.Err(err))
		l.drop(ctx)
		return
	}
	l.releaseIdle()
}

// forget empties the list of locks to be released.
func (l *locks) forget() {
	l.ended = nil
	if l.later != nil {
		l.later.Stop()
		l.later = nil
	}
}

// running reports whether a job runs whose lock the session has.
func (l *locks) running() bool {
	for _, locked := range l.held {
		if locked {
			return true
		}
	}
	return false
}

// releaseIdle returns the connection to the pool once its session has no lock.
func (l *locks) releaseIdle() {
	if l.conn != nil && !l.running() && len(l.ended) == 0 {
		l.conn.Release()
		l.conn = nil
	}
}

// drop closes the session, which ends its locks. Jobs that run continue: one of them may then run twice, which is
// harmless because Run is idempotent.
func (l *locks) drop(ctx context.Context) {
	if l.conn == nil {
		return
	}
	conn := l.conn.Hijack()
	l.conn = nil
	l.forget()
	for job := range l.held {
		l.held[job] = false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	if err := conn.Close(ctx); err != nil {
		l.logger.DebugContext(ctx, "close a session", obs.Err(err))
	}
}

// close ends the session even if jobs still run, so that the pool can be closed.
func (l *locks) close(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(ctx)
}
