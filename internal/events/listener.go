package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

// SettingsChannel is the Postgres channel on which the database notifies changes of the tables that every process
// follows: policy and signing keys.
const SettingsChannel = "mesh_settings"

// listeners are the roles that may listen, which are all roles. A process of services listens as sequencer.
var listeners = append(slices.Clone(writers), pg.RoleSequencer)

var (
	listen         = pg.DefineShared(listeners, "events.listen", "LISTEN "+Channel)
	listenSettings = pg.DefineShared(listeners, "events.listen_settings", "LISTEN "+SettingsChannel)
)

// Listener passes the notifications of sequencers in other processes on to this process's consumers. It holds one
// connection of its pool. While it is connected, consumers and other loops poll rarely; see Signal.Period.
type Listener struct {
	pool     *pgxpool.Pool
	numbered *Signal
	settings *Signal
	log      *slog.Logger
}

// NewListener returns a listener; any role may listen. It passes notifications of events on to numbered, and those of
// settings to settings.
func NewListener(pool *pgxpool.Pool, numbered, settings *Signal, log *slog.Logger) (*Listener, error) {
	if pool == nil || numbered == nil || settings == nil || log == nil {
		return nil, errors.New("listener needs a pool, signals and a logger")
	}
	return &Listener{pool: pool, numbered: numbered, settings: settings, log: log}, nil
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
	// Taken out of the pool: a connection that has listened must not be given to another user of the pool.
	conn := pooled.Hijack()
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, channel := range []*pg.Statement{listen, listenSettings} {
		if _, err := pg.Exec(ctx, conn, channel); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
	}
	failing.reset()
	defer l.numbered.listen()()
	defer l.settings.listen()()
	for {
		channel, err := l.wait(ctx, conn)
		switch {
		case err == nil && channel == SettingsChannel:
			l.settings.Notify()
		case err == nil:
			l.numbered.Notify()
		case !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil:
			return fmt.Errorf("wait for notification: %w", err)
		}
	}
}

// The listener checks that a connection is alive if no notification has come for askEvery: a cut network gives no sign,
// and while the listener is connected loops poll rarely.
const (
	askEvery   = 30 * time.Second
	askTimeout = 5 * time.Second
)

// wait returns the channel of a notification. Its error is context.DeadlineExceeded if none came for askEvery and the
// connection is alive.
func (l *Listener) wait(ctx context.Context, conn *pgx.Conn) (string, error) {
	call, cancel := context.WithTimeout(ctx, askEvery)
	heard, err := conn.WaitForNotification(call)
	cancel()
	if err == nil {
		return heard.Channel, nil
	}
	if ctx.Err() != nil || !pgconn.Timeout(err) || conn.IsClosed() {
		return "", err
	}
	call, cancel = context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := conn.Ping(call); err != nil {
		// its deadline is no deadline of waiting
		return "", fmt.Errorf("the connection does not answer: %s", err.Error())
	}
	return "", context.DeadlineExceeded
}
