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

// SettingsChannel is the Postgres channel on which the database tells of changes of the tables that every process follows: policy and signing keys.
const SettingsChannel = "mesh_settings"

// listeners are the roles that may listen: each. A process of services does so as sequencer.
var listeners = append(slices.Clone(writers), pg.RoleSequencer)

var (
	listen         = pg.DefineShared(listeners, "events.listen", "LISTEN "+Channel)
	listenSettings = pg.DefineShared(listeners, "events.listen_settings", "LISTEN "+SettingsChannel)
)

// Listener passes the notifications of sequencers in other processes on to this process's consumers. It holds one
// connection of its pool. While it does, consumers and other loops that poll do so seldom; see Signal.Period.
type Listener struct {
	pool     *pgxpool.Pool
	numbered *Signal
	settings *Signal
	log      *slog.Logger
}

// NewListener makes a listener; any role may listen. What it hears of events it passes on to numbered, and of settings to settings.
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
	// Taken out of the pool: what has listened must not be handed to somebody else.
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

// Of a connection that nothing comes from it is asked whether it lives: a network that is cut says nothing, and loops poll seldom on its account.
const (
	askEvery   = 30 * time.Second
	askTimeout = 5 * time.Second
)

// wait returns the channel of a notification. Its error is context.DeadlineExceeded if none came for a while, and the connection lives.
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
		return "", fmt.Errorf("the connection does not answer: %s", err.Error()) //nolint:errorlint // its deadline is no deadline of waiting
	}
	return "", context.DeadlineExceeded
}
