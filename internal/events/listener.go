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

// AppendedChannel is the Postgres channel on which programs without a sequencer notify that they have appended events.
const AppendedChannel = "mesh_appended"

// listeners are the roles that may listen, which are all roles. A process of services listens as sequencer.
var listeners = append(slices.Clone(writers), pg.RoleSequencer)

var (
	listen         = pg.DefineShared(listeners, "events.listen", "LISTEN "+Channel)
	listenSettings = pg.DefineShared(listeners, "events.listen_settings", "LISTEN "+SettingsChannel)
	listenAppended = pg.DefineShared(listeners, "events.listen_appended", "LISTEN "+AppendedChannel)
	notifyAppended = pg.DefineShared(writers, "events.notify_appended", "NOTIFY "+AppendedChannel)
)

// NotifyAppended wakes the sequencers of all processes that listen. A program without a sequencer calls it after a
// commit that appended events, which would otherwise be numbered at the next poll of a sequencer (Signal.Period).
func NotifyAppended(ctx context.Context, q pg.Querier) error {
	if _, err := pg.Exec(ctx, q, notifyAppended); err != nil {
		return fmt.Errorf("notify sequencers: %w", err)
	}
	return nil
}

// ListenerDeps holds the dependencies of a listener. Any role may listen. Settings and Wake may be nil.
type ListenerDeps struct {
	Pool *pgxpool.Pool
	// Numbered is notified when another process has numbered events.
	Numbered *Signal
	// Settings is notified when the policy or the signing keys were changed.
	Settings *Signal
	// Wake is notified when a process without a sequencer has appended events.
	Wake   *Signal
	Logger *slog.Logger
}

// Listener passes the notifications of other processes on to the loops of this one. It holds one connection of its
// pool. While it is connected, consumers and other loops poll rarely; see Signal.Period.
type Listener struct{ deps ListenerDeps }

// NewListener checks its dependencies; it does not touch the database.
func NewListener(deps ListenerDeps) (*Listener, error) {
	if deps.Pool == nil || deps.Numbered == nil || deps.Logger == nil {
		return nil, errors.New("listener needs a pool, a signal and a logger")
	}
	return &Listener{deps: deps}, nil
}

// Run listens until ctx ends and reconnects whenever the connection is lost.
func (l *Listener) Run(ctx context.Context) error {
	var failing backoff
	for {
		err := l.listen(ctx, &failing)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // asked to stop
		}
		if !sleep(ctx, failing.next(ctx, l.deps.Logger, "listening for events", err), nil) {
			return nil
		}
	}
}

func (l *Listener) listen(ctx context.Context, failing *backoff) error {
	pooled, err := l.deps.Pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	// Taken out of the pool: a connection that has listened must not be given to another user of the pool.
	conn := pooled.Hijack()
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, channel := range []*pg.Statement{listen, listenSettings, listenAppended} {
		if _, err := pg.Exec(ctx, conn, channel); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
	}
	failing.reset()
	defer l.deps.Numbered.listen()()
	if l.deps.Settings != nil {
		defer l.deps.Settings.listen()()
	}
	for {
		channel, err := l.wait(ctx, conn)
		switch {
		case err == nil && channel == SettingsChannel:
			l.deps.Settings.Notify()
		case err == nil && channel == AppendedChannel:
			l.deps.Wake.Notify()
		case err == nil:
			l.deps.Numbered.Notify()
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
