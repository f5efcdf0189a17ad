package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

var listen = pg.DefineShared(writers, "events.listen", "LISTEN "+Channel)

// Listener passes the notifications of sequencers in other processes on to this process's consumers. It holds one
// connection of its pool. Without it consumers poll.
type Listener struct {
	pool     *pgxpool.Pool
	numbered *Signal
	log      *slog.Logger
}

// NewListener makes a listener; any service role may listen.
func NewListener(pool *pgxpool.Pool, numbered *Signal, log *slog.Logger) (*Listener, error) {
	if pool == nil || numbered == nil || log == nil {
		return nil, errors.New("listener needs a pool, a signal and a logger")
	}
	return &Listener{pool: pool, numbered: numbered, log: log}, nil
}

// Run listens until ctx ends and reconnects whenever the connection is lost.
func (l *Listener) Run(ctx context.Context) error {
	var failing backoff
	for {
		err := l.listen(ctx, &failing)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		if !sleep(ctx, failing.next(ctx, l.log, "listening for events", err), nil) {
			return nil
		}
	}
}

func (l *Listener) listen(ctx context.Context, failing *backoff) error {
	pooled, err := l.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	// Taken out of the pool: what has listened must not be handed to somebody else.
	conn := pooled.Hijack()
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := pg.Exec(ctx, conn, listen); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	failing.reset()
	l.numbered.Notify() // whatever was notified while nobody listened
	for {
		if _, err := conn.WaitForNotification(ctx); err != nil {
			return fmt.Errorf("wait for notification: %w", err)
		}
		l.numbered.Notify()
	}
}
