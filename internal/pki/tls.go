package pki

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/internal/wallclock"
)

// ErrNoCertificate is returned if the client presented no certificate where one is needed.
var ErrNoCertificate = errors.New("peer showed no certificate")

// ErrKind is returned for a peer of another kind than this port serves: a service on the agent port, a node on the
// internal one, or a certificate whose identity is of one kind and whose authority of the other.
var ErrKind = fmt.Errorf("%w: not of a kind that this port serves", ErrIdentity)

// Trust binds a kind of identity to the only authority that may name it.
type Trust struct {
	Kind   Kind
	Bundle *Bundle
}

// ServerConfig describes the server side of a port.
type ServerConfig struct {
	Store       *Store
	TrustDomain string
	// Clients are the kinds of peers served. Empty: the port requests no certificate.
	Clients []Trust
	// Optional lets a client without a certificate in; a client with a bad certificate is still refused. The handler of a
	// request must then check whether there is a peer.
	Optional bool
	// NextProtos are the ALPN protocols, most wanted first.
	NextProtos []string
	// Time returns the time by which certificates are judged; nil: wallclock.Now.
	Time func() time.Time
}

// ServerTLS builds the server side. Every handshake reads the live certificate and the live bundles. There are no
// session tickets: a resumed session would keep the verification of an earlier one.
func ServerTLS(cfg ServerConfig) (*tls.Config, error) {
	if cfg.Store == nil {
		return nil, errors.New("server TLS: no certificate store")
	}
	if !validTrustDomain(cfg.TrustDomain) {
		return nil, fmt.Errorf("server TLS: trust domain %q", cfg.TrustDomain)
	}
	for _, trust := range cfg.Clients {
		if trust.Bundle == nil {
			return nil, fmt.Errorf("server TLS: no trust bundle for kind %q", string(trust.Kind))
		}
	}
	base := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		NextProtos:             cfg.NextProtos,
		Time:                   clockOr(cfg.Time),
		GetCertificate:         cfg.Store.getCertificate,
		ClientAuth:             tls.NoClientCert,
	}
	if len(cfg.Clients) == 0 {
		return base, nil
	}
	base.VerifyConnection = cfg.verifyClient
	// The absence of a certificate is refused by verifyClient, as a distinct error; a certificate that was presented is
	// always verified here.
	base.ClientAuth = tls.VerifyClientCertIfGiven
	base.ClientCAs = clientPool(cfg.Clients)
	live := base.Clone()
	var latest atomic.Pointer[trusting]
	base.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := trustedNow(cfg.Clients)
		if last := latest.Load(); last != nil && slices.Equal(last.bundles, now) {
			return last.config, nil
		}
		fresh := live.Clone()
		fresh.ClientCAs = clientPool(cfg.Clients)
		latest.Store(&trusting{bundles: now, config: fresh})
		return fresh, nil
	}
	return base, nil
}

// clockOr returns a clock, or this host's if it is nil.
func clockOr(now func() time.Time) func() time.Time {
	if now == nil {
		return wallclock.Now
	}
	return now
}

// trusting is the configuration of the connections made while the bundles stay as they are. Each connection keeps its
// configuration for as long as it lives, so all of them share one.
type trusting struct {
	bundles []*bundleState
	config  *tls.Config
}

func trustedNow(clients []Trust) []*bundleState {
	states := make([]*bundleState, 0, len(clients))
	for _, trust := range clients {
		states = append(states, trust.Bundle.current.Load())
	}
	return states
}

// clientPool returns the roots of all clients. The pool is never nil: a nil pool would mean the system's roots.
func clientPool(clients []Trust) *x509.CertPool {
	if len(clients) == 1 {
		return clients[0].Bundle.Pool()
	}
	pool := x509.NewCertPool()
	for _, trust := range clients {
		for _, root := range trust.Bundle.Roots() {
			pool.AddCert(root)
		}
	}
	return pool
}

func (cfg ServerConfig) verifyClient(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		if cfg.Optional {
			return nil
		}
		return ErrNoCertificate
	}
	if err := cfg.checkPeer(state.VerifiedChains); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: state.PeerCertificates, Err: err}
	}
	return nil
}

// checkPeer refuses an identity whose authority is not the one of its kind.
func (cfg ServerConfig) checkPeer(chains [][]*x509.Certificate) error {
	peer, err := PeerFromChain(chains, cfg.TrustDomain, x509.ExtKeyUsageClientAuth)
	if err != nil {
		return err
	}
	for _, trust := range cfg.Clients {
		if trust.Kind == peer.ID.Kind && chainEndsIn(chains, trust.Bundle.Roots()) {
			return nil
		}
	}
	return ErrKind
}

// ClientConfig describes the client side of a connection to one service.
type ClientConfig struct {
	// Store is the certificate that the client presents; nil: none (an enrolment authenticates by token).
	Store *Store
	// Roots are the pinned roots of the service authority.
	Roots *Bundle
	// Server is the identity that the server must prove.
	Server ID
	// NextProtos are the ALPN protocols. http.Transport and grpc-go add their own.
	NextProtos []string
	// Time returns the time by which certificates are judged; nil: wallclock.Now.
	Time func() time.Time
}

// ClientTLS builds the client side. The server is identified by its SPIFFE id, verified against the live pinned roots;
// its host name is not verified, since services move between hosts. There is no session cache: every connection is a
// full handshake.
func ClientTLS(cfg ClientConfig) (*tls.Config, error) {
	if cfg.Roots == nil {
		return nil, errors.New("client TLS: no trust bundle")
	}
	if err := cfg.Server.Validate(); err != nil {
		return nil, fmt.Errorf("client TLS: expected server: %w", err)
	}
	out := &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: cfg.NextProtos,
		Time:       clockOr(cfg.Time),
		// crypto/tls would verify against a pool fixed now, and against the host name. verifyServer does the whole
		// verification, against the live pool and the expected identity.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection below verifies chain, usage and identity.
		VerifyConnection:   cfg.verifyServer,
	}
	if cfg.Store != nil {
		out.GetClientCertificate = cfg.Store.getClientCertificate
	}
	return out, nil
}

func (cfg ClientConfig) verifyServer(state tls.ConnectionState) error {
	_, err := cfg.VerifyServer(state)
	return err
}

// VerifyServer verifies the certificate that a server presented, and returns its identity. Errors are those of x509
// (wrapped in *tls.CertificateVerificationError) or wrap ErrIdentity.
func (cfg ClientConfig) VerifyServer(state tls.ConnectionState) (Peer, error) {
	if len(state.PeerCertificates) == 0 {
		return Peer{}, ErrNoCertificate
	}
	opts := x509.VerifyOptions{
		Roots:         cfg.Roots.Pool(),
		Intermediates: x509.NewCertPool(),
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		CurrentTime:   clockOr(cfg.Time)(),
	}
	for _, cert := range state.PeerCertificates[1:] {
		opts.Intermediates.AddCert(cert)
	}
	chains, err := state.PeerCertificates[0].Verify(opts)
	if err != nil {
		return Peer{}, &tls.CertificateVerificationError{UnverifiedCertificates: state.PeerCertificates, Err: err}
	}
	peer, err := PeerFromChain(chains, cfg.Server.TrustDomain, x509.ExtKeyUsageServerAuth)
	if err != nil {
		return Peer{}, err
	}
	if peer.ID != cfg.Server {
		return Peer{}, &WrongServerError{Got: peer.ID, Want: cfg.Server}
	}
	return peer, nil
}

// WrongServerError is the refusal of a server of the same trust domain that is another than the expected one. It wraps
// ErrIdentity.
type WrongServerError struct{ Got, Want ID }

func (e *WrongServerError) Error() string {
	return fmt.Sprintf("%v: the server is %s, not %s", ErrIdentity, e.Got, e.Want)
}

// Unwrap returns ErrIdentity.
func (e *WrongServerError) Unwrap() error { return ErrIdentity }

// VerifyClientChain verifies DER certificates (leaf first) as a server with the given trust would, without a
// connection: for certificates that travel in messages, and to check whether a fresh certificate would be accepted
// before it replaces a working one. Tests check so what the authority issues.
func VerifyClientChain(chain [][]byte, trust Trust, trustDomain string, now time.Time) (Peer, error) {
	certs, err := ParseChain(chain)
	if err != nil {
		return Peer{}, err
	}
	opts := x509.VerifyOptions{
		Roots: trust.Bundle.Pool(), Intermediates: x509.NewCertPool(), CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, cert := range certs[1:] {
		opts.Intermediates.AddCert(cert)
	}
	chains, err := certs[0].Verify(opts)
	if err != nil {
		return Peer{}, &tls.CertificateVerificationError{UnverifiedCertificates: certs, Err: err}
	}
	peer, err := PeerFromChain(chains, trustDomain, x509.ExtKeyUsageClientAuth)
	if err != nil {
		return Peer{}, err
	}
	if peer.ID.Kind != trust.Kind {
		return Peer{}, ErrKind
	}
	return peer, nil
}
