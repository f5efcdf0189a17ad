package pgserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/mesh/devstack/child"
)

// Superuser is the one role that exists after initdb.
const Superuser = "postgres"

// Config describes where and how the server runs. Only Dir is required.
type Config struct {
	// Dir is the directory of everything the server keeps; it is made if absent. As root its parents must be
	// traversable by UID.
	Dir string
	// Port is the TCP port on 127.0.0.1; 0 picks a free one at each Start (Restart keeps it).
	Port int
	// SocketDir is the directory of the unix socket; empty means a private one under /tmp.
	SocketDir string
	// CacheDir is searched for binaries after the system's own.
	CacheDir string
	// UID and GID are those that the server runs with when this process is root; zero means 65534.
	UID, GID int
	// Settings are further server settings; fsync cannot be set.
	Settings map[string]string
	// Statements makes the server count the cost of each statement, if it has the library for that; see
	// Server.CountsStatements.
	Statements bool
	// StartTimeout bounds Start, recovery included; zero means 60 s.
	StartTimeout time.Duration
	// Logger is required.
	Logger *slog.Logger
}

// Server is a Postgres that this process owns.
type Server struct {
	cfg      Config
	bin      Binaries
	password string
	sockets  string
	uid, gid int // -1: no change of identity

	mu    sync.Mutex // guards what follows; held across start and stop, which therefore never overlap
	port  int
	lock  *os.File
	child *child.Process
}

// Start brings a server up: it finds binaries, makes the cluster if there is none, replaces the leftovers of a dead
// owner, and returns once the server answers with fsync on. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.Dir == "" || cfg.Logger == nil {
		return nil, errors.New("embedded postgres needs a directory and a logger")
	}
	if _, ok := cfg.Settings["fsync"]; ok {
		return nil, errors.New("embedded postgres: fsync stays on")
	}
	if cfg.StartTimeout == 0 {
		cfg.StartTimeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.StartTimeout)
	defer cancel()

	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("resolve directory: %w", err)
	}
	cfg.Dir = dir
	s := &Server{cfg: cfg, uid: -1, gid: -1, port: cfg.Port}
	if os.Getuid() == 0 {
		s.uid, s.gid = orNobody(cfg.UID), orNobody(cfg.GID)
	}
	// the server's uid must traverse it; what is inside is 0600 or 0700
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, fmt.Errorf("make postgres directory: %w", err)
	}
	if err := traversable(dir, s.uid); err != nil {
		return nil, err
	}
	if s.bin, err = Find(ctx, cfg.CacheDir, s.uid); err != nil {
		return nil, err
	}
	if s.sockets, err = socketDir(cfg.SocketDir, dir, s.uid, s.gid); err != nil {
		return nil, err
	}
	if s.lock, err = lockDir(dir); err != nil {
		return nil, err
	}
	if err = s.prepare(ctx); err == nil {
		err = s.startLocked(ctx)
	}
	if err != nil {
		_ = os.Remove(s.sockets) // only if empty
		_ = s.lock.Close()
		return nil, err
	}
	return s, nil
}

func orNobody(id int) int {
	if id == 0 {
		return 65534
	}
	return id
}

func (s *Server) dataDir() string { return filepath.Join(s.cfg.Dir, "data") }
func (s *Server) logPath() string { return filepath.Join(s.cfg.Dir, "postgres.log") }

// prepare makes the cluster, in a directory beside its final one: an interrupted initdb leaves no incomplete cluster.
func (s *Server) prepare(ctx context.Context) error {
	var err error
	if s.password, err = loadPassword(filepath.Join(s.cfg.Dir, "superuser.password")); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(s.dataDir(), "PG_VERSION")); err == nil {
		return replaceLeftover(ctx, s.cfg.Logger, s.dataDir(), s.sockets)
	}
	fresh := s.dataDir() + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("remove interrupted cluster: %w", err)
	}
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	pwfile := fresh + ".password"
	if err := writeDurably(pwfile, s.password+"\n"); err != nil {
		return fmt.Errorf("write password for initdb: %w", err)
	}
	defer func() { _ = os.Remove(pwfile) }()
	for _, path := range []string{fresh, pwfile} {
		if err := s.own(path); err != nil {
			return err
		}
	}
	if err := s.initdb(ctx, fresh, pwfile); err != nil {
		return err
	}
	if err := os.Rename(fresh, s.dataDir()); err != nil {
		return fmt.Errorf("put cluster in place: %w", err)
	}
	return syncDir(s.cfg.Dir)
}

func (s *Server) own(path string) error {
	if s.uid < 0 {
		return nil
	}
	if err := os.Lchown(path, s.uid, s.gid); err != nil {
		return fmt.Errorf("hand %s to uid %d: %w", path, s.uid, err)
	}
	return nil
}

func (s *Server) credential() *syscall.Credential {
	if s.uid < 0 {
		return nil
	}
	return &syscall.Credential{Uid: uint32(s.uid), Gid: uint32(s.gid)} // both are checked to be ids
}

func (s *Server) environ() []string {
	env := []string{"PATH=" + s.bin.Dir + ":/usr/bin:/bin", "LC_ALL=C", "TZ=UTC", "HOME=/", "PGTZ=UTC"}
	if s.bin.Lib != "" {
		env = append(env, "LD_LIBRARY_PATH="+s.bin.Lib, "DYLD_LIBRARY_PATH="+s.bin.Lib)
	}
	return env
}

func (s *Server) initdb(ctx context.Context, dir, pwfile string) error {
	out, err := os.CreateTemp("", "gpuaas-initdb-*.log")
	if err != nil {
		return fmt.Errorf("make initdb log: %w", err)
	}
	defer func() { _ = out.Close(); _ = os.Remove(out.Name()) }()
	p, err := child.Start(child.Spec{
		Path: filepath.Join(s.bin.Dir, "initdb"),
		Args: []string{
			"-D", dir, "-U", Superuser, "--pwfile=" + pwfile, "--auth=scram-sha-256", "-E", "UTF8", "--locale=C",
			"--data-checksums",
		},
		Env: s.environ(), Dir: "/", Output: out, Credential: s.credential(),
	})
	if err != nil {
		return fmt.Errorf("run initdb: %w", err)
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return errors.Join(ctx.Err(), p.Stop(ctx))
	}
	if err := p.Exit(); err != nil {
		text := tail(out.Name(), 0)
		return noSpace(fmt.Errorf("initdb failed: %w: %s", err, text), text)
	}
	return nil
}

// noSpace returns err, wrapped with syscall.ENOSPC if the program's output reports that its file system is full.
func noSpace(err error, text string) error {
	if !strings.Contains(text, "No space left on device") {
		return err
	}
	return fmt.Errorf("%w: %w", syscall.ENOSPC, err)
}

// statementsLibrary counts calls, times and bytes of the write-ahead log by statement. Its extension must be created in
// the database in which the counts are to be read.
const statementsLibrary = "pg_stat_statements"

// CountsStatements reports whether the server was configured to count the cost of each statement and has the library
// for that.
func (s *Server) CountsStatements() bool {
	if !s.cfg.Statements {
		return false
	}
	dir, err := filepath.EvalSymlinks(filepath.Join(s.bin.Dir, "postgres"))
	if err != nil {
		return false
	}
	for _, at := range []string{"lib", "lib/postgresql"} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(dir), "..", at, statementsLibrary+".so")); err == nil {
			return true
		}
	}
	return false
}

func (s *Server) settings() map[string]string {
	set := map[string]string{ //nolint:gosec // the one secret here is the name of a method
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(s.port),
		"unix_socket_directories": s.sockets,
		"max_connections":         "300",
		"shared_buffers":          "128MB",
		"logging_collector":       "off",
		"log_destination":         "stderr",
		"log_min_messages":        "warning",
		"log_line_prefix":         "%m [%p] %q%u@%d ",
		"log_timezone":            "UTC",
		"timezone":                "UTC",
		"password_encryption":     "scram-sha-256",
		// Plans here are short; compiling them costs more than running them.
		"jit": "off",
		// Queue-like tables need a prompt vacuum; each round of it is a few transactions a database, also where nothing
		// happens.
		"autovacuum_naptime": "30s",
		"max_wal_size":       "1GB",
		// The first change of a page after a checkpoint logs the whole page, which is most of what a mesh at rest writes.
		"wal_compression": "on",
		// Full page images repair pages that a crash of the host tore; a database that does not outlive its host needs none.
		"full_page_writes": "on",
	}
	if s.CountsStatements() {
		set["shared_preload_libraries"] = statementsLibrary
	}
	maps.Copy(set, s.cfg.Settings)
	set["fsync"] = "on"
	return set
}

func (s *Server) show(ctx context.Context, setting string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.SocketURL("postgres", Superuser, s.password))
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var value string
	if err := conn.QueryRow(ctx, "SELECT current_setting($1)", setting).Scan(&value); err != nil {
		return "", err
	}
	return value, nil
}

func isPgError(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// URL returns a connection string over loopback TCP, for any process of this machine.
func (s *Server) URL(database, user, password string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(user, password),
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)), Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

// SocketURL returns a connection string over the unix socket: the faster way for processes that share the file system.
func (s *Server) SocketURL(database, user, password string) string {
	q := url.Values{"host": {s.sockets}, "port": {strconv.Itoa(s.port)}}
	u := url.URL{Scheme: "postgres", User: url.UserPassword(user, password), Path: "/" + database, RawQuery: q.Encode()}
	return u.String()
}

// AdminURL returns a connection string of the superuser to the maintenance database over loopback TCP.
func (s *Server) AdminURL() string { return s.AdminURLOf("postgres") }

// AdminURLOf returns the connection string of the superuser to a database.
func (s *Server) AdminURLOf(database string) string { return s.URL(database, Superuser, s.password) }

// Port returns the TCP port on 127.0.0.1.
func (s *Server) Port() int { return s.port }

// LogPath returns the path of the server's log file.
func (s *Server) LogPath() string { return s.logPath() }

// PID returns the process id of the postmaster.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.child.PID()
}

// Done returns a channel that is closed when the present incarnation of the server has ended, for any reason; after
// Restart the caller calls it again.
func (s *Server) Done() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.child.Done()
}
