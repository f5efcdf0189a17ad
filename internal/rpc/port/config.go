package port

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/guard"
)

// Config describes one port.
type Config struct {
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

var defaults = Config{
	MaxStreams: 100, MaxReadBytes: 1 << 20, HandshakeTimeout: 5 * time.Second, BodyTimeout: 10 * time.Second,
	MaxConnections: 4096, StrangerTimeout: 30 * time.Second, MaxStrangers: 64, IdleTimeout: 2 * time.Minute,
	DrainTimeout: 10 * time.Second,
}

// Deps are the dependencies of a server.
type Deps struct {
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: metrics are kept and not exposed
	// Persons verifies assertions; nil on ports whose methods are for no person.
	Persons *assertion.Verifier
	// Authenticate returns the person of methods whose callers include `person`; nil elsewhere.
	Authenticate guard.Authenticator
	// OnDenied is called for every request of an authenticated person that was refused for the person's roles, before the
	// refusal is sent. It may be nil.
	OnDenied func(ctx context.Context, d guard.Denial)
	// Translate returns the typed refusal of an error that is none yet, such as one of the database; nil: such errors are
	// internal.
	Translate func(error) error
	// OnReject is called for every refused handshake, beside the log and the counter. It must not block.
	OnReject func(pki.Reject)
	// Wrap wraps all handlers, for the needs of a single port: CORS, headers of static files. It may be nil.
	Wrap func(http.Handler) http.Handler
}
