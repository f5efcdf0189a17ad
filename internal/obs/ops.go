package obs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"time"
)

// OpsDeps holds what the ops listener serves and where.
type OpsDeps struct {
	Logger   *slog.Logger
	Registry *Registry
	Health   *Health
	// DebugSocket is the path of a unix socket, for the process's own user alone, that serves /debug/pprof/. Empty:
	// profiles are not served. They are never served on addr: the workloads of tenants may run on the same loopback.
	DebugSocket string
}

// OpsServer serves /metrics, /livez and /readyz on an address, and profiles on a unix socket.
type OpsServer struct {
	listener, debug       net.Listener // debug is nil without a socket
	server, profileServer *http.Server
}

// maxSocketPath is the longest path of a unix socket that is accepted, in bytes, a little below the kernel's limit.
const maxSocketPath = 100

// NewOpsServer listens on addr (host:port; port 0 picks one), and on the socket if there is one.
func NewOpsServer(ctx context.Context, deps OpsDeps, addr string) (*OpsServer, error) {
	if deps.Logger == nil || deps.Registry == nil || deps.Health == nil {
		return nil, errors.New("ops server: logger, registry and health are needed")
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for ops on %s: %w", addr, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", deps.Registry.Handler())
	mux.Handle("GET /livez", deps.Health.LiveHandler())
	mux.Handle("GET /readyz", deps.Health.ReadyHandler())
	out := &OpsServer{listener: listener, server: opsHTTP(deps, mux)}
	if deps.DebugSocket == "" {
		return out, nil
	}
	if out.debug, err = listenDebug(ctx, deps.DebugSocket); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	profiles := http.NewServeMux()
	profiles.HandleFunc("/debug/pprof/", pprof.Index)
	profiles.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	profiles.HandleFunc("/debug/pprof/profile", pprof.Profile)
	profiles.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	profiles.HandleFunc("/debug/pprof/trace", pprof.Trace)
	out.profileServer = opsHTTP(deps, profiles)
	return out, nil
}

func opsHTTP(deps OpsDeps, handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(deps.Logger.Handler(), slog.LevelDebug),
	}
}

// listenDebug makes the socket. It replaces a socket that a dead process left at the path; if a process answers at the
// path, it returns an error.
func listenDebug(ctx context.Context, path string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("listen for profiles: the path of the socket is longer than %d bytes", maxSocketPath)
	}
	if conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path); err == nil {
		return nil, errors.Join(fmt.Errorf("listen for profiles: %s is in use", path), conn.Close())
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != os.ModeSocket {
		return nil, fmt.Errorf("listen for profiles: %s is not a socket", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen for profiles: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for profiles: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for profiles: %w", err), listener.Close())
	}
	return listener, nil
}

// Addr returns the address that the server listens on.
func (s *OpsServer) Addr() string { return s.listener.Addr().String() }

// Run serves until ctx ends.
func (s *OpsServer) Run(ctx context.Context) error {
	served := make(chan error, 2)
	running := 1
	go func() { served <- s.server.Serve(s.listener) }()
	if s.debug != nil {
		running++
		go func() { served <- s.profileServer.Serve(s.debug) }()
	}
	var failed error
	select {
	case err := <-served:
		running--
		failed = fmt.Errorf("serve ops: %w", err)
	case <-ctx.Done():
	}
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	for _, server := range []*http.Server{s.server, s.profileServer} {
		if server == nil {
			continue
		}
		if err := server.Shutdown(stopCtx); err != nil {
			_ = server.Close() // the listener is closed; a request that hangs is cut
		}
	}
	for range running {
		<-served
	}
	return failed
}

// Close closes the listeners; it is for a caller that never calls Run.
func (s *OpsServer) Close() error {
	err := s.listener.Close()
	if s.debug != nil {
		err = errors.Join(err, s.debug.Close())
	}
	return err
}
