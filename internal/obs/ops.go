package obs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"
)

// OpsDeps is what the ops listener serves.
type OpsDeps struct {
	Logger   *slog.Logger
	Registry *Registry
	Health   *Health
	// Extra adds handlers by pattern, such as failpoint control. They are served on a loopback listener only.
	Extra map[string]http.Handler
}

// OpsServer serves /metrics, /livez, /readyz and, on a loopback address only, /debug/pprof/ and the extras.
type OpsServer struct {
	listener net.Listener
	server   *http.Server
}

// NewOpsServer listens on addr (host:port; port 0 picks one).
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
	if loopback(listener.Addr()) {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
		for pattern, handler := range deps.Extra {
			mux.Handle(pattern, handler)
		}
	}
	return &OpsServer{listener: listener, server: &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(deps.Logger.Handler(), slog.LevelDebug),
	}}, nil
}

// Addr answers the address it listens on.
func (s *OpsServer) Addr() string { return s.listener.Addr().String() }

// Run serves until ctx ends.
func (s *OpsServer) Run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- s.server.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve ops: %w", err)
	case <-ctx.Done():
	}
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := s.server.Shutdown(stopCtx); err != nil {
		_ = s.server.Close() //nolint:errcheck // the listener is closed; a request that hangs is cut
	}
	<-served
	return nil
}

// Close gives the listener back if Run is never called.
func (s *OpsServer) Close() error { return s.server.Close() }

func loopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
