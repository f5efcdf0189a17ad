package redisserver

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/devstack/child"
	"github.com/gpuaas/mesh/internal/ports"
)

// Config sets where and how the server runs. Only Logger is required.
type Config struct {
	// Port is the TCP port on 127.0.0.1; 0 picks a free one at Start.
	Port int
	// Password is required of every client, since workloads run on the same host; empty generates one.
	Password string
	// UID and GID are those that redis-server runs with when this process is root; zero means 65534.
	UID, GID int
	// ImitationOnly serves the imitation even if there is a redis-server on PATH.
	ImitationOnly bool
	// Dir is the directory of the server's files, which is made at each start and removed at its end; empty: a
	// temporary one.
	Dir string
	// StartTimeout bounds Start; zero means 10 s.
	StartTimeout time.Duration
	// Logger is required.
	Logger *slog.Logger
}

// backend is a running server, of either kind.
type backend interface {
	stop(ctx context.Context) error
	kill() error
	done() <-chan struct{}
}

// Server is a Redis that this process owns.
type Server struct {
	cfg  Config
	path string // of redis-server; empty for the imitation

	mu   sync.Mutex // held across start and stop, which therefore never overlap
	port int
	run  backend
}

// Start starts a server and returns once it answers. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.Logger == nil {
		return nil, errors.New("embedded redis needs a logger")
	}
	if cfg.StartTimeout == 0 {
		cfg.StartTimeout = 10 * time.Second
	}
	if cfg.Password == "" {
		cfg.Password = rand.Text()
	}
	s := &Server{cfg: cfg, port: cfg.Port}
	if !cfg.ImitationOnly {
		if path, err := exec.LookPath("redis-server"); err == nil {
			s.path = path
		} else {
			cfg.Logger.InfoContext(ctx, "no redis-server found, serving the built-in imitation")
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.startLocked(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

var errPortTaken = errors.New("port is in use")

func (s *Server) startLocked(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.StartTimeout)
	defer cancel()
	for {
		if s.port == 0 {
			port, err := ports.Pick(ctx, "127.0.0.1")
			if err != nil {
				return err
			}
			s.port = port
		}
		run, err := s.launch(ctx)
		if err == nil {
			s.run = run
			return nil
		}
		taken := errors.Is(err, errPortTaken)
		if taken && s.cfg.Port != 0 && s.run == nil {
			return fmt.Errorf("redis port %d is in use on 127.0.0.1: %w", s.cfg.Port, err)
		}
		if !taken || ctx.Err() != nil {
			return err
		}
		if s.run == nil {
			s.port = 0 // no caller knows the number yet; a restart has to wait for its own
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *Server) launch(ctx context.Context) (backend, error) {
	if s.path == "" {
		return startImitation(s.addr(), s.cfg.Password)
	}
	return s.startProcess(ctx)
}

// process is a real redis-server.
type process struct {
	child *child.Process
	dir   string
}

// startProcess passes the configuration in a file that only the server's uid may read, because every user can read
// arguments.
func (s *Server) startProcess(ctx context.Context) (backend, error) {
	dir, err := s.makeDir()
	if err != nil {
		return nil, fmt.Errorf("make redis directory: %w", err)
	}
	p, err := s.spawn(dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	run := &process{child: p, dir: dir}
	if err := s.await(ctx, p); err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "log")) // only decorates the error
		if strings.Contains(string(log), "Address already in use") {
			err = fmt.Errorf("%w: %w", errPortTaken, err)
		}
		return nil, errors.Join(fmt.Errorf("start redis: %w: %s", err, strings.TrimSpace(string(log))), run.kill())
	}
	return run, nil
}

// makeDir makes an empty directory. At a fixed path it may have to remove the files that a killed server has left.
func (s *Server) makeDir() (string, error) {
	if s.cfg.Dir == "" {
		return os.MkdirTemp("", "gpuaas-redis-")
	}
	return s.cfg.Dir, errors.Join(os.RemoveAll(s.cfg.Dir), os.Mkdir(s.cfg.Dir, 0o700))
}

func (s *Server) spawn(dir string) (*child.Process, error) {
	conf := filepath.Join(dir, "redis.conf")
	lines := []string{
		"bind 127.0.0.1", "port " + strconv.Itoa(s.port), "protected-mode yes", "daemonize no", `save ""`, "appendonly no",
		"requirepass " + strconv.Quote(s.cfg.Password), "maxmemory 64mb", "maxmemory-policy noeviction", "databases 16",
		"dir " + strconv.Quote(dir), "logfile \"\"",
	}
	if err := os.WriteFile(conf, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return nil, fmt.Errorf("write redis configuration: %w", err)
	}
	var cred *syscall.Credential
	if os.Getuid() == 0 {
		uid, gid := orNobody(s.cfg.UID), orNobody(s.cfg.GID)
		cred = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		for _, path := range []string{dir, conf} {
			if err := os.Lchown(path, uid, gid); err != nil {
				return nil, fmt.Errorf("hand redis directory to uid %d: %w", uid, err)
			}
		}
	}
	// our own directory
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open redis log: %w", err)
	}
	defer func() { _ = log.Close() }()
	return child.Start(child.Spec{
		Path: s.path, Args: []string{conf}, Env: []string{"PATH=/usr/bin:/bin", "LC_ALL=C"}, Dir: "/", Output: log,
		Credential:  cred,
		DeathSignal: syscall.SIGKILL, // nothing to save
	})
}

func orNobody(id int) int {
	if id == 0 {
		return 65534
	}
	return id
}

// await returns once the server accepts our password, which another server on the same port would not. It writes the
// few commands itself: a client library logs and backs off at every refused dial, and the first dials are always
// refused.
func (s *Server) await(ctx context.Context, p *child.Process) error {
	for {
		// Checked first: if the address is in use the process ends, and another server answers in its place.
		select {
		case <-p.Done():
			return fmt.Errorf("redis-server ended: %w", p.Exit())
		default:
		}
		err := s.ping(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("redis-server ended: %w", p.Exit())
		case <-ctx.Done():
			return fmt.Errorf("wait for redis: %w: %w", ctx.Err(), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (s *Server) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", s.addr())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(conn, "*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n", len(s.cfg.Password), s.cfg.Password); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	if answer != "+OK\r\n" {
		return fmt.Errorf("unexpected answer %q", answer)
	}
	return nil
}

func (p *process) done() <-chan struct{} { return p.child.Done() }

func (p *process) stop(ctx context.Context) error {
	err := p.child.Stop(ctx, child.Step{Signal: syscall.SIGTERM, Wait: 3 * time.Second})
	return errors.Join(err, os.RemoveAll(p.dir))
}

func (p *process) kill() error {
	if err := p.child.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.child.Done()
	return os.RemoveAll(p.dir)
}

func (s *Server) addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// URL returns the redis:// connection string, password included.
func (s *Server) URL() string {
	u := url.URL{Scheme: "redis", User: url.UserPassword("", s.cfg.Password), Host: s.addr(), Path: "/0"}
	return u.String()
}

// Real reports whether a redis-server runs, rather than the imitation.
func (s *Server) Real() bool { return s.path != "" }

// PID returns the process id of redis-server, zero for the imitation.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p, ok := s.run.(*process); ok {
		return p.child.PID()
	}
	return 0
}

// Done returns a channel that is closed when the present server process has ended, for any reason; after Restart call
// Done again.
func (s *Server) Done() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.run.done()
}

// Stop ends the server. It may be called more than once.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.run.stop(ctx)
}

// Kill9 kills the server at once, for drills; its data is gone, as after Stop.
func (s *Server) Kill9() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.run.kill()
}

// Restart stops the server if it runs and starts an empty one on the same address.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.run.stop(ctx); err != nil {
		return fmt.Errorf("restart redis: %w", err)
	}
	return s.startLocked(ctx)
}
