package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/validate"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// ServerConfig describes one port.
type ServerConfig struct {
	// Name of the port in logs and metrics: `internal`, `enrollment`, `console`.
	Name string
	// Addr to listen on. Ignored if Listener is given.
	Addr string
	// Listener replaces the one made for Addr; the server owns it.
	Listener net.Listener
	// TLS is the certificate of the port and the peers that it admits. NextProtos is filled in.
	TLS pki.ServerConfig
	// MaxStreams of one connection; default 100.
	MaxStreams int
	// MaxReadBytes of one message; default 1 MiB.
	MaxReadBytes int
	// HandshakeTimeout of TLS; default 5 s.
	HandshakeTimeout time.Duration
	// MaxHandshakes under way at once; default 512.
	MaxHandshakes int
	// RequestTimeout is how long a request may take to arrive, and twice that to be answered, on a port without streams.
	// Zero: there are streams.
	RequestTimeout time.Duration
	// BodyTimeout is how long the body of a method that takes one message may take to arrive; default 10 s.
	BodyTimeout time.Duration
	// MaxConnections that may be open at once, handshakes included; one more is closed at once. Default 4096.
	MaxConnections int
	// StrangerTimeout is how long a call that needs no token may take, of health or reflection, streams included; default
	// 30 s.
	StrangerTimeout time.Duration
	// MaxStrangers are the calls without a token that are open at once, of health and of reflection each; default 64.
	MaxStrangers int
	// IdleTimeout of a connection without requests; default 2 min.
	IdleTimeout time.Duration
	// DrainTimeout is how long streams and requests get to end after Run's context did; default 10 s.
	DrainTimeout time.Duration
}

func (c ServerConfig) withDefaults() ServerConfig {
	if c.MaxStreams == 0 {
		c.MaxStreams = 100
	}
	if c.MaxReadBytes == 0 {
		c.MaxReadBytes = 1 << 20
	}
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = 5 * time.Second
	}
	if c.BodyTimeout == 0 {
		c.BodyTimeout = 10 * time.Second
	}
	if c.MaxConnections == 0 {
		c.MaxConnections = 4096
	}
	if c.StrangerTimeout == 0 {
		c.StrangerTimeout = 30 * time.Second
	}
	if c.MaxStrangers == 0 {
		c.MaxStrangers = 64
	}
	if c.IdleTimeout == 0 {
		c.IdleTimeout = 2 * time.Minute
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 10 * time.Second
	}
	c.TLS.NextProtos = []string{"h2", "http/1.1"}
	return c
}

// ServerDeps are the dependencies of a server.
type ServerDeps struct {
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: metrics are kept and not exposed
	// Persons verifies assertions; nil on ports whose methods are for no person.
	Persons *PersonVerifier
	// Authenticate returns the person of methods whose callers include `person`; nil elsewhere.
	Authenticate Authenticator
	// OnDenied is called for every request of an authenticated person that was refused for the person's roles, before the
	// refusal is sent. It may be nil.
	OnDenied func(ctx context.Context, d Denial)
	// Translate returns the typed refusal of an error that is none yet, such as one of the database; nil: such errors are
	// internal.
	Translate func(error) error
	// OnReject is called for every refused handshake, beside the log and the counter. It must not block.
	OnReject func(pki.Reject)
	// Wrap wraps all handlers, for the needs of a single port: CORS, headers of static files. It may be nil.
	Wrap func(http.Handler) http.Handler
}

// Server is one port with its services. Mount before Run.
type Server struct {
	deps     ServerDeps
	cfg      ServerConfig
	listener net.Listener
	tls      *tls.Config
	metrics  *metrics
	guard    *guard
	policies PolicySet
	services map[string]http.Handler
	// unchecked names the services that have no policies; checking and reflecting count the places of calls of health and
	// of the others, and resting those of requests whose bodies arrive after their answers.
	unchecked                     map[string]bool
	checking, reflecting, resting *strangerPlaces
	fallback                      http.Handler
	drain                         context.Context //nolint:containedctx // the life of the server's streams, ended by Run.
	endDrain                      context.CancelCauseFunc
}

// NewServer listens and prepares; no request is answered before Run.
func NewServer(ctx context.Context, deps ServerDeps, cfg ServerConfig) (*Server, error) {
	cfg = cfg.withDefaults()
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
	m, err := newMetrics(deps.Registerer)
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
		policies: PolicySet{}, services: map[string]http.Handler{}, fallback: http.NotFoundHandler(),
		unchecked: map[string]bool{}, checking: newStrangerPlaces(cfg.MaxStrangers, 0),
		reflecting: newStrangerPlaces(cfg.MaxStrangers, max(1, cfg.MaxStrangers/reflectionShare)),
		resting:    newStrangerPlaces(cfg.MaxStrangers, 0),
	}
	s.guard = &guard{
		policies: s.policy, persons: deps.Persons, authenticate: deps.Authenticate, onDenied: deps.OnDenied,
		translate: deps.Translate, logger: deps.Logger.With(slog.String("port", cfg.Name)), metrics: m,
	}
	s.drain, s.endDrain = context.WithCancelCause(context.WithoutCancel(ctx))
	return s, nil
}

// Addr returns the address on which the server listens.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// URL returns the server's base URL by its address.
func (s *Server) URL() string { return "https://" + s.listener.Addr().String() }

// HandlerOptions returns the options of every generated handler of this server: limits, the guard, validation.
func (s *Server) HandlerOptions() []connect.HandlerOption {
	options := []connect.HandlerOption{
		connect.WithReadMaxBytes(s.cfg.MaxReadBytes),
		// A small message costs more to compress than to send.
		connect.WithCompressMinBytes(16 << 10),
		connect.WithInterceptors(
			s.guard,
			validate.NewInterceptor(),
		),
	}
	// On a port for people, other people read the names that they give.
	return append(options, codecs(textRules{names: s.deps.Authenticate != nil})...)
}

// Mount adds a service by the path and handler that its generated constructor returned. A service with a method that
// has no policy, or a policy that this server could admit no caller by, is an error.
func (s *Server) Mount(path string, handler http.Handler) error {
	name, ok := serviceOfPath(path)
	if !ok {
		return fmt.Errorf("mount %q: not the path of a service", path)
	}
	descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	if err != nil {
		return fmt.Errorf("mount %q: %w", path, err)
	}
	service, ok := descriptor.(protoreflect.ServiceDescriptor)
	if !ok {
		return fmt.Errorf("mount %q: not a service", path)
	}
	set, err := ServicePolicies(service)
	if err != nil {
		return fmt.Errorf("mount %q: %w", path, err)
	}
	for procedure, policy := range set {
		if err := s.servable(policy); err != nil {
			return fmt.Errorf("mount %s: %w", procedure, err)
		}
		s.policies[procedure] = policy
	}
	s.services[name] = handler
	return nil
}

// servable returns an error if the port lacks something that a method's policy needs.
func (s *Server) servable(policy Policy) error {
	if policy.Allows(CallerPerson) && s.deps.Authenticate == nil {
		return errors.New("persons may call it, and this port cannot authenticate them")
	}
	person := policy.Person == commonv1.Person_PERSON_REQUIRED && !policy.Allows(CallerPerson)
	if person && s.deps.Persons == nil {
		return errors.New("it needs a person, and this port has no keys to verify one")
	}
	return nil
}

// MountFallback sets the handler of all paths that are no service's: static files. No policy applies to it, and its
// peers are not checked.
func (s *Server) MountFallback(handler http.Handler) { s.fallback = handler }

// MountUnchecked adds a handler for one service's path without policies: health and reflection, which are no services
// of ours. A service of gpuaas is refused.
func (s *Server) MountUnchecked(path string, handler http.Handler) error {
	name, ok := serviceOfPath(path)
	if !ok || isOurs(name) {
		return fmt.Errorf("mount %q without a policy: refused", path)
	}
	s.services[name], s.unchecked[name] = handler, true
	return nil
}

// Services returns the names of the services that are mounted with policies.
func (s *Server) Services() []string {
	seen := map[string]bool{}
	var out []string
	for procedure := range s.policies {
		name, _ := serviceOfPath(procedure)
		if !seen[name] {
			seen[name] = true
			out = append(out, name)
		}
	}
	return out
}

func (s *Server) policy(procedure string) (Policy, bool) {
	policy, ok := s.policies[procedure]
	return policy, ok
}

// Run serves until ctx ends, then drains: no new connections, streams end with server_draining, requests under way
// finish, and after DrainTimeout the remaining connections are cut. It returns nil after a drain that the end of ctx
// began.
func (s *Server) Run(ctx context.Context) error {
	tlsListener, err := pki.NewListener(ctx, s.listener, pki.ListenerConfig{
		TLS: s.tls, HandshakeTimeout: s.cfg.HandshakeTimeout, MaxHandshakes: s.cfg.MaxHandshakes,
		MaxConnections: s.cfg.MaxConnections, OnReject: s.onReject(ctx),
		OnHandshake: func() { s.metrics.handshake(s.cfg.Name) },
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
		s.metrics.reject(s.cfg.Name, r.Reason)
		s.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "tls handshake refused",
			slog.String("port", s.cfg.Name), slog.String("reason", string(r.Reason)), slog.String("remote", r.Remote),
			slog.String("claimed_unverified", r.ClaimedUnverified), slog.String("serial_unverified", r.Serial),
			slog.Any("error", r.Err))
		if s.deps.OnReject != nil {
			s.deps.OnReject(r)
		}
	}
}

// serve routes by exact procedure: one spelling, one method. Nothing is cleaned or redirected, so that no other
// spelling of a path can pass a check that its canonical one would not.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	name, ok := serviceOfPath(r.URL.Path)
	service, known := s.services[name]
	if !ok || !known {
		s.fallback.ServeHTTP(w, r)
		return
	}
	if r.Method != http.MethodPost {
		// Reads by GET would put requests into URLs, caches and cross-site links.
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	ctx, cancel := s.requestContext(w, r)
	defer cancel(nil)
	if s.unchecked[name] {
		s.serveUnchecked(name, service, w, r.WithContext(ctx)) //nolint:contextcheck // as below
		return
	}
	if r = s.intake(w, r.WithContext(ctx)); r != nil { //nolint:contextcheck // ctx is made from the request's.
		service.ServeHTTP(w, r)
	}
}

// requestContext puts the verified peer into the context, and gives streams the life that they may have: until the
// server drains, and until the certificate that opened them expires. A connection that is already open would outlive
// both.
func (s *Server) requestContext(w http.ResponseWriter, r *http.Request) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(r.Context())
	var left time.Duration
	if peer, err := pki.PeerFromState(r.TLS, s.cfg.TLS.TrustDomain); err == nil && len(s.cfg.TLS.Clients) > 0 {
		left = peer.NotAfter.Sub(s.now())
		if left < time.Minute {
			// The peer should reconnect with the new certificate that it must have by now.
			w.Header().Set("Connection", "close")
		}
		if left > 0 {
			ctx = WithPeer(ctx, peer)
		}
	}
	policy, ok := s.policies[r.URL.Path]
	name, _ := serviceOfPath(r.URL.Path)
	switch {
	case s.unchecked[name]:
		// Any call, unary or not, ends as a stream does, and soon.
		if left <= 0 || left > s.cfg.StrangerTimeout {
			left = s.cfg.StrangerTimeout
		}
	case !ok || (!policy.StreamsRequests() && !policy.StreamsAnswers()):
		return ctx, cancel
	}
	stopDrain := context.AfterFunc(s.drain, func() { cancel(context.Cause(s.drain)) })
	stopExpiry := func() bool { return true }
	if left > 0 {
		why := commonv1.Reason_REASON_CERTIFICATE_EXPIRED
		if s.unchecked[name] {
			why = commonv1.Reason_REASON_DEADLINE_EXCEEDED
		}
		stopExpiry = time.AfterFunc(left, func() { cancel(fault.New(why, "")) }).Stop
	}
	// A method that waits for the next message does not check its context: the deadlines end the wait too.
	controller := http.NewResponseController(w)
	ended := make(chan struct{})
	stopRead := context.AfterFunc(ctx, func() {
		defer close(ended)
		_ = controller.SetReadDeadline(time.Now()) // not supported, or over already: then there is nothing to end
	})
	return ctx, func(cause error) {
		stopDrain()
		stopExpiry()
		if !stopRead() {
			<-ended // the response must not be touched once its handler has returned
		}
		cancel(cause)
	}
}

func (s *Server) now() time.Time {
	if s.cfg.TLS.Time != nil {
		return s.cfg.TLS.Time()
	}
	return time.Now()
}

func errDraining() error { return fault.New(commonv1.Reason_REASON_SERVER_DRAINING, "") }

func isOurs(service string) bool { return len(service) > 7 && service[:7] == "gpuaas." }
