// Package stores brings up the Postgres and the Redis of a mesh on one machine, or uses those that it is given, and
// prepares them.
//
// It owns child processes and nothing in the databases: package schema makes roles and tables. It trusts only
// the settings that the server itself reports. Guarantees: fsync is on in a server of ours, and its setting in another
// server is reported; a store of ours that dies is started again on the same address.
package stores

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/devstack/redisserver"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/mesh/material"
)

// Config describes the stores.
type Config struct {
	Dir         string // of our Postgres
	RedisDir    string // of our Redis, made anew at each start; empty: a temporary one
	SocketDir   string // of our Postgres' socket; empty, or too long for a socket: a private one elsewhere
	CacheDir    string // searched for Postgres' binaries after the system's
	Statements  bool   // our Postgres counts what each statement costs, if it can
	DatabaseURL string // of an external server, as an administrator; empty: our own
	// IdleConns is for how long pools of connections to our Postgres keep one that is not used; zero: their default.
	IdleConns time.Duration
	RedisURL  string // of an external one; empty: our own; "embedded": our own, in this process; "-": none
}

// EmbeddedRedis as the URL of Redis selects the imitation in this process, whether or not there is a redis-server.
const EmbeddedRedis = "embedded"

// Stores are the two running stores.
type Stores struct {
	cfg      Config
	logger   *slog.Logger
	material *material.Material
	Postgres *pgserver.Server    // nil if it is external
	Redis    *redisserver.Server // nil if it is external, or none
	Facts    Facts
}

// Facts describes the stores to a person.
type Facts struct {
	PostgresVersion string
	Fsync           string
	Migrated        int // files applied now
}

// mostSocketDir is the longest directory in which the name of a socket fits into the address of one.
const mostSocketDir = 80

// Start brings the stores up, makes roles and schema, and writes the files of connection strings.
func Start(ctx context.Context, logger *slog.Logger, m *material.Material, cfg Config) (*Stores, error) {
	if len(cfg.SocketDir) > mostSocketDir {
		cfg.SocketDir = ""
	}
	s := &Stores{cfg: cfg, logger: logger, material: m}
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(err, s.Stop(context.WithoutCancel(ctx)))
	}
	return s, nil
}

// noSpace returns err, or the refusal that names the directory and what to do if its file system is full.
func noSpace(dir string, err error) error {
	if !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the file system of "+dir+" is full: Postgres cannot start",
		fault.Remedy("free space there and start again: what was acknowledged is kept"), fault.Cause(err))
}

func (s *Stores) start(ctx context.Context) error {
	admin := s.cfg.DatabaseURL
	db := material.Database{URL: admin}
	if admin == "" {
		var err error
		s.Postgres, err = pgserver.Start(ctx, pgserver.Config{
			Dir: s.cfg.Dir, CacheDir: s.cfg.CacheDir, SocketDir: s.cfg.SocketDir, Statements: s.cfg.Statements, Logger: s.logger,
		})
		if err != nil {
			return noSpace(s.cfg.Dir, err)
		}
		admin = s.Postgres.AdminURL()
		db = material.Database{URL: s.Postgres.SocketURL("postgres", "", ""), Tenants: s.Postgres.URL("postgres", "", "")}
		if db.URL, err = keepingIdle(db.URL, s.cfg.IdleConns); err != nil {
			return err
		}
	}
	if s.cfg.RedisURL == "" || s.cfg.RedisURL == EmbeddedRedis {
		var err error
		s.Redis, err = redisserver.Start(ctx, redisserver.Config{
			Dir: s.cfg.RedisDir, Logger: s.logger, ImitationOnly: s.cfg.RedisURL == EmbeddedRedis,
		})
		if err != nil {
			return err
		}
		s.cfg.RedisURL = s.Redis.URL()
	}
	if s.cfg.RedisURL != "-" {
		if err := material.Keep(s.material.RedisURLFile(), s.cfg.RedisURL+"\n"); err != nil {
			return err
		}
	}
	if err := s.material.Connect(db); err != nil {
		return err
	}
	if err := s.check(ctx, admin); err != nil {
		return err
	}
	if err := schema.Provision(ctx, admin,
		schema.Provisioning{Passwords: s.material.Passwords, Exclusive: s.Postgres != nil}); err != nil {
		return err
	}
	owner, err := pg.WithUser(admin, pg.RoleOwner, s.material.Passwords[pg.RoleOwner], pg.DatabaseMesh)
	if err != nil {
		return err
	}
	applied, err := schema.Migrate(ctx, owner, schema.MigrateOptions{Logger: s.logger})
	if err != nil {
		return err
	}
	s.Facts.Migrated = len(applied.Versions)
	return nil
}

// keepingIdle returns a connection string whose pools keep connections that are not used for that long; zero: as long
// as by default.
func keepingIdle(raw string, idle time.Duration) (string, error) {
	if idle == 0 {
		return raw, nil
	}
	u, err := url.Parse(raw)
	if err != nil {
		return "", fmt.Errorf("parse database url: %w", err)
	}
	query := u.Query()
	query.Set("pool_max_conn_idle_time", idle.String())
	query.Set("pool_health_check_period", "1s")
	u.RawQuery = query.Encode()
	return u.String(), nil
}

type serverSettings struct {
	Version string `db:"version"`
	Fsync   string `db:"fsync"`
}

// readServerSettings is run as the administrator of the server, whose name is configured; any role may run it.
var readServerSettings = pg.Define(pg.RoleOwner, "stores.read_server_settings", `
	SELECT split_part(current_setting('server_version'), ' ', 1) AS version, current_setting('fsync') AS fsync`)

func (s *Stores) check(ctx context.Context, admin string) error {
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	about, err := pg.One[serverSettings](ctx, conn, readServerSettings)
	if err != nil {
		return fmt.Errorf("ask the database about itself: %w", err)
	}
	s.Facts.PostgresVersion, s.Facts.Fsync = about.Version, about.Fsync
	return nil
}

// RedisKind returns the kind of the lock store.
func (s *Stores) RedisKind() string {
	switch {
	case s.cfg.RedisURL == "-":
		return "none"
	case s.Redis == nil:
		return "given"
	case s.Redis.Real():
		return "redis-server"
	default:
		return "in-process imitation"
	}
}

// Keep starts our stores again when they die, until ctx ends.
func (s *Stores) Keep(ctx context.Context) error {
	tasks := []app.Task{{Name: "wait", Run: func(ctx context.Context) error { <-ctx.Done(); return nil }}}
	if s.Postgres != nil {
		tasks = append(tasks, app.Task{Name: "postgres", Run: func(ctx context.Context) error {
			return s.revive(ctx, "postgres", s.Postgres.Done, s.Postgres.Restart)
		}})
	}
	if s.Redis != nil {
		tasks = append(tasks, app.Task{Name: "redis", Run: func(ctx context.Context) error {
			return s.revive(ctx, "redis", s.Redis.Done, s.Redis.Restart)
		}})
	}
	return app.Run(ctx, s.logger, tasks...)
}

func (s *Stores) revive(ctx context.Context, name string, done func() <-chan struct{},
	restart func(context.Context) error,
) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-done():
		}
		select {
		case <-done(): // of the present incarnation: a caller may have stopped it and started it again
		default:
			continue
		}
		s.logger.WarnContext(ctx, "store died and is started again", slog.String("store", name))
		if err := restart(ctx); err != nil && ctx.Err() == nil {
			s.logger.ErrorContext(ctx, "store does not start", slog.String("store", name), slog.Any("error", err))
		}
		if !app.Sleep(ctx, 500*time.Millisecond) {
			return nil
		}
	}
}

// Stop ends our own stores.
func (s *Stores) Stop(ctx context.Context) error {
	var err error
	if s.Redis != nil {
		err = s.Redis.Stop(ctx)
	}
	if s.Postgres != nil {
		err = errors.Join(err, s.Postgres.Stop(ctx))
	}
	return err
}
