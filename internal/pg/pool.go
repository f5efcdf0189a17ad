package pg

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Config describes how to reach the database. Only URL is required.
type Config struct {
	// URL is a connection string; it carries the role and its password.
	URL string
	// ApplicationName is the name of the sessions in pg_stat_activity.
	ApplicationName string
	// MaxConns bounds the pool; zero means 10. Every service and replica has its share of the server's connections.
	MaxConns int32
	// MinConns are kept open; zero dials on first use only.
	MinConns int32
	// ConnectTimeout bounds one dial, zero means 5 s.
	ConnectTimeout time.Duration
	// StatementTimeout is the server's bound on one statement; zero means 30 s, negative none.
	StatementTimeout time.Duration
	// IdleInTxTimeout ends a session that forgot its transaction; zero means 30 s, negative none. A paused process
	// must not hold row locks for ever.
	IdleInTxTimeout time.Duration
	// LockTimeout bounds the wait for one lock; zero means none.
	LockTimeout time.Duration
	// Exhaustion records that the server refused something for want of disk, memory or connections. Nil: no record is
	// kept.
	Exhaustion *Exhaustion
	// Settings are further settings of the sessions, such as plan_cache_mode.
	Settings map[string]string
}

// IdleInTxTimeout is what every login role has as idle_in_transaction_session_timeout, as Postgres spells it.
const IdleInTxTimeout = "30s"

// FormatSetting is the setting by which the database learns which forms of stored events a session reads, and Format is
// its value for this build: bodies in the bytes of protobuf (the migration event_bodies), and uuids (event_ids).
const (
	FormatSetting = "events.format"
	Format        = "protobuf, uuids"
)

// WriterSetting is the setting by which triggers know the sessions of the product, whose value is WriterProduct, from
// those of a person: rows that were written in another session were changed by hand.
const (
	WriterSetting = "gpuaas.writer"
	WriterProduct = "product"
)

// Querier is what pools, connections and transactions have in common.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// What pgxpool.ParseConfig returns for a connection string without pool_max_conn_idle_time and
// pool_health_check_period. Other values of these two are taken from the connection string; all other parameters of the
// pool are this package's.
const (
	unsetIdleTime    = 30 * time.Minute
	unsetHealthCheck = time.Minute
)

// Open makes a pool. It does not dial: a database that is down fails the first use, not the start of a service. The
// caller closes it.
func Open(ctx context.Context, cfg Config) (*pgxpool.Pool, error) {
	pc, err := pgxpool.ParseConfig(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("parse database url: %w", err)
	}
	pc.MaxConns = 10
	if cfg.MaxConns > 0 {
		pc.MaxConns = cfg.MaxConns
	}
	pc.MinConns = cfg.MinConns
	if pc.MaxConnIdleTime == unsetIdleTime {
		pc.MaxConnIdleTime = time.Minute // the connection that was used last is used next, so those that a burst needed go
	}
	pc.MaxConnLifetime = time.Hour
	pc.MaxConnLifetimeJitter = 10 * time.Minute
	if pc.HealthCheckPeriod == unsetHealthCheck {
		pc.HealthCheckPeriod = 15 * time.Second
	}
	pc.ShouldPing = shouldPing
	pc.ConnConfig.ConnectTimeout = orDefault(cfg.ConnectTimeout, 5*time.Second)
	keep := pc.ConnConfig.OnPgError
	pc.ConnConfig.OnPgError = func(conn *pgconn.PgConn, refusal *pgconn.PgError) bool {
		cfg.Exhaustion.note(refusal.Code)
		return keep(conn, refusal)
	}
	set := pc.ConnConfig.RuntimeParams
	if cfg.ApplicationName != "" {
		set["application_name"] = cfg.ApplicationName
	}
	set["timezone"] = "UTC"
	// The sessions of a host that vanished hold their locks for half a minute, and not for the two hours of the system's
	// defaults.
	set["tcp_keepalives_idle"], set["tcp_keepalives_interval"], set["tcp_keepalives_count"] = "15", "5", "3"
	set[FormatSetting] = Format
	set[WriterSetting] = WriterProduct
	setMillis(set, "statement_timeout", orDefault(cfg.StatementTimeout, 30*time.Second))
	setMillis(set, "idle_in_transaction_session_timeout", orDefault(cfg.IdleInTxTimeout, 30*time.Second))
	setMillis(set, "lock_timeout", cfg.LockTimeout)
	// Compiling the long statements of sweeps and counts takes longer than running them, and a session compiles anew for
	// each call.
	set["jit"] = "off"
	maps.Copy(set, cfg.Settings)
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("make database pool: %w", err)
	}
	return pool, nil
}

// pingAfter is how long a connection may have been idle and still be used without a ping.
const pingAfter = time.Minute

// shouldPing reports whether a connection is pinged before its use. A ping is a transaction for the server, and most
// polls use a connection that was idle for a second or more: each poll would cost two. So a connection whose server has
// gone is found by the state of its socket, without a ping.
func shouldPing(_ context.Context, p pgxpool.ShouldPingParams) bool {
	switch {
	case p.IdleDuration < time.Second:
		return false
	case p.IdleDuration >= pingAfter:
		return true
	}
	return p.Conn.PgConn().CheckConn() != nil //nolint:staticcheck // Ping, its replacement, is what is to be saved
}

func orDefault(d, fallback time.Duration) time.Duration {
	if d == 0 {
		return fallback
	}
	return d
}

func setMillis(set map[string]string, key string, d time.Duration) {
	if d > 0 {
		set[key] = strconv.FormatInt(d.Milliseconds(), 10)
	}
}

// Era returns the era of the database.
func Era(ctx context.Context, q Querier) (int64, error) {
	var era int64
	if err := q.QueryRow(ctx, "SELECT era FROM mesh.era").Scan(&era); err != nil {
		return 0, fmt.Errorf("read era: %w", err)
	}
	return era, nil
}
