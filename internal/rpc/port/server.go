package port

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/guard"
)

// Server is one port with its services. Mount before Run.
type Server struct {
	deps     Deps
	cfg      Config
	listener net.Listener
	tls      *tls.Config
	metrics  *guard.Metrics
	guard    *guard.Guard
	policies rpc.PolicySet
	services map[string]http.Handler
	// unchecked names the services that have no policies; checking and reflecting count the places of calls of health and
	// of the others, and resting those of requests whose bodies arrive after their answers.
	unchecked                     map[string]bool
	checking, reflecting, resting *strangerPlaces
	drain                         context.Context //nolint:containedctx // the life of the server's streams, ended by Run.
	endDrain                      context.CancelCauseFunc
}

// New listens and prepares; no request is answered before Run.
func New(ctx context.Context, deps Deps, cfg Config) (*Server, error) {
	cfg = config.Or(cfg, defaults)
	cfg.TLS.NextProtos = []string{"h2", "http/1.1"}
	if deps.Logger == nil {
		return nil, errors.New("rpc server: no logger")
	}
	if cfg.Name == "" {
		return nil, errors.New("rpc server: no name")
	}
	tlsConfig, err := pki.ServerTLS(cfg.TLS)
	if err != nil {
		return nil, fmt.Errorf("rpc server %s: %w", cfg.Name, err)
	}
	m, err := guard.NewMetrics(deps.Registerer)
	if err != nil {
		return nil, err
	}
	listener := cfg.Listener
	if listener == nil {
		if listener, err = new(net.ListenConfig).Listen(ctx, "tcp", cfg.Addr); err != nil {
			return nil, fmt.Errorf("rpc server %s: %w", cfg.Name, err)
		}
	}
	s := &Server{
		deps: deps, cfg: cfg, listener: listener, tls: tlsConfig, metrics: m,
		policies: rpc.PolicySet{}, services: map[string]http.Handler{},
		unchecked: map[string]bool{}, checking: newStrangerPlaces(cfg.MaxStrangers, 0),
		reflecting: newStrangerPlaces(cfg.MaxStrangers, max(1, cfg.MaxStrangers/reflectionShare)),
		resting:    newStrangerPlaces(cfg.MaxStrangers, 0),
	}
	s.guard = &guard.Guard{
		Policies: s.policy, Persons: deps.Persons, Authenticate: deps.Authenticate, OnDenied: deps.OnDenied,
		Translate: deps.Translate, Logger: deps.Logger.With(slog.String("port", cfg.Name)), Metrics: m,
	}
	s.drain, s.endDrain = context.WithCancelCause(context.WithoutCancel(ctx))
	return s, nil
}

// Addr returns the address on which the server listens.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// URL returns the server's base URL by its address.
func (s *Server) URL() string { return "https://" + s.listener.Addr().String() }

// Run serves until ctx ends, then drains: no new connections, streams end with server_draining, requests under way
// finish, and after DrainTimeout the remaining connections are cut. It returns nil after a drain that the end of ctx
// began.
func (s *Server) Run(ctx context.Context) error {
	tlsListener, err := pki.NewListener(ctx, s.listener, pki.ListenerConfig{
		TLS: s.tls, HandshakeTimeout: s.cfg.HandshakeTimeout, MaxHandshakes: s.cfg.MaxHandshakes,
		MaxConnections: s.cfg.MaxConnections, OnReject: s.onReject(ctx),
		OnHandshake: func() { s.metrics.Handshake(s.cfg.Name) },
	})
	if err != nil {
		return err
	}
	server := s.httpServer(ctx)
	served := make(chan error, 1)
	go func() { served <- server.Serve(tlsListener) }()

	select {
	case err := <-served:
		s.endDrain(errDraining())
		return errors.Join(fmt.Errorf("serve %s: %w", s.cfg.Name, err), tlsListener.Close(), server.Close())
	case <-ctx.Done():
	}
	s.endDrain(errDraining())
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.DrainTimeout)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		s.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "drain took too long, connections cut", slog.String("port", s.cfg.Name))
		if err := server.Close(); err != nil {
			return fmt.Errorf("close %s: %w", s.cfg.Name, err)
		}
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", s.cfg.Name, err)
	}
	return nil
}

// Close stops listening, for a server that never ran.
func (s *Server) Close() error {
	s.endDrain(errDraining())
	if err := s.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close %s: %w", s.cfg.Name, err)
	}
	return nil
}

func (s *Server) httpServer(ctx context.Context) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	handler := http.Handler(http.HandlerFunc(s.serve))
	if s.deps.Wrap != nil {
		handler = s.deps.Wrap(handler)
	}
	handler = s.readingRest(handler)
	// Requests outlive ctx by the drain.
	base := context.WithoutCancel(ctx)
	return &http.Server{
		Handler:           handler,
		BaseContext:       func(net.Listener) context.Context { return base },
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       s.cfg.RequestTimeout,
		WriteTimeout:      2 * s.cfg.RequestTimeout,
		IdleTimeout:       s.cfg.IdleTimeout,
		MaxHeaderBytes:    32 << 10,
		Protocols:         protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: s.cfg.MaxStreams,
			SendPingTimeout:      15 * time.Second,
			PingTimeout:          10 * time.Second,
		},
		ErrorLog: slog.NewLogLogger(s.deps.Logger.Handler(), slog.LevelDebug),
	}
}

func (s *Server) onReject(ctx context.Context) func(pki.Reject) {
	return func(r pki.Reject) {
		s.metrics.Reject(s.cfg.Name, r.Reason)
		s.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "tls handshake refused",
			slog.String("port", s.cfg.Name), slog.String("reason", string(r.Reason)), slog.String("remote", r.Remote),
			slog.String("claimed_unverified", r.Claimed.SAN), slog.String("serial_unverified", r.Claimed.Serial),
			slog.Any("error", r.Err))
		if s.deps.OnReject != nil {
			s.deps.OnReject(r)
		}
	}
}

func errDraining() error { return fault.New(commonv1.Reason_REASON_SERVER_DRAINING, "") }
