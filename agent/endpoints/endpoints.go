// Package endpoints tests the endpoints of a profile with real connections, before the profile takes the place of
// another one.
//
// It owns how the identity of a server of the control plane is verified where no session is opened: the chain under
// the given roots, the usage, and the SPIFFE identity of the service. Host names prove nothing here.
//
// It sends no request and no certificate of the node, changes nothing on the host, and decides nothing: callers do.
package endpoints

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
)

// Names of the endpoints of a profile, as errors have them.
const (
	API      = "node API"
	Recovery = "enrolment"
	Terminal = "terminal"
)

// The services that answer at the endpoints.
const (
	serviceAPI      = "nodeapi"
	serviceRecovery = "recovery"
)

// Cause is why an endpoint was not verified.
type Cause string

// The causes. Their text stands in errors.
const (
	Malformed     Cause = "malformed"                    // the profile has no usable address or no usable trust for it
	Unreachable   Cause = "unreachable"                  // no TLS connection was made
	Untrusted     Cause = "untrusted"                    // the profile's trust does not verify the server's certificate
	OtherIdentity Cause = "another server than expected" // trusted, and not the service that belongs there
)

// Error is an endpoint that was not verified. It has no text from the profile but the address.
type Error struct {
	Endpoint string // API, Recovery or Terminal
	Address  string // host:port; empty: it could not be read
	Cause    Cause
	Err      error
}

// Error returns the endpoint, the address and the cause as text.
func (e *Error) Error() string {
	return fmt.Sprintf("the %s endpoint %s is %s: %v", e.Endpoint, cmp.Or(e.Address, "of the profile"), e.Cause, e.Err)
}

// Unwrap returns the error of the connection or of its verification.
func (e *Error) Unwrap() error { return e.Err }

// DiagnosticCode returns the code under which the error is recorded.
func (*Error) DiagnosticCode() commonv1.DiagnosticCode {
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED
}

// Options are how connections are made. The zero value uses TCP, the host's clock and the default timeout.
type Options struct {
	// TrustDomain is that of the mesh. Empty: that of the first server, which all others must share.
	TrustDomain string
	Now         func() time.Time
	Dial        func(ctx context.Context, network, address string) (net.Conn, error)
	Timeout     time.Duration // of each endpoint. Default 5 s
}

const defaultTimeout = 5 * time.Second

// Bounds of what a profile may bring.
const (
	maxAddress = 512
	maxBundle  = 256 << 10
)

// Verify makes a TLS connection to each endpoint of a profile with the trust that the profile brings, and closes it. It
// returns the *Error of the first endpoint that is not verified, in the order API, Recovery, Terminal. The node API and
// the enrolment listener are needed; a profile without a terminal endpoint has none.
func Verify(ctx context.Context, profile *commonv1.Profile, opts Options) error {
	api, err := bundle(API, profile.GetCaBundlePem())
	if err != nil {
		return err
	}
	recovery := api
	if len(profile.GetRecoveryCaBundlePem()) > 0 {
		if recovery, err = bundle(Recovery, profile.GetRecoveryCaBundlePem()); err != nil {
			return err
		}
	}
	for _, one := range []struct {
		name, service, url string
		roots              *pki.Bundle
	}{
		{API, serviceAPI, profile.GetApiUrl(), api},
		{Recovery, serviceRecovery, profile.GetRecoveryUrl(), recovery},
		{Terminal, serviceAPI, profile.GetTerminalUrl(), api},
	} {
		if one.url == "" && one.name == Terminal {
			continue
		}
		address, err := hostPort(one.url)
		if err != nil {
			return &Error{Endpoint: one.name, Cause: Malformed, Err: err}
		}
		peer, err := Shake(ctx, address, one.service, one.roots, opts)
		if err != nil {
			return &Error{Endpoint: one.name, Address: address, Cause: causeOf(err), Err: err}
		}
		opts.TrustDomain = peer.TrustDomain
	}
	return nil
}

func hostPort(url string) (string, error) {
	if url == "" {
		return "", errors.New("no address")
	}
	if len(url) > maxAddress {
		return "", fmt.Errorf("an address of %d bytes", len(url))
	}
	return config.HostPort(url)
}

func bundle(name string, content []byte) (*pki.Bundle, error) {
	refused := func(err error) error { return &Error{Endpoint: name, Cause: Malformed, Err: err} }
	if len(content) == 0 {
		return nil, refused(errors.New("no trust bundle"))
	}
	if len(content) > maxBundle {
		return nil, refused(fmt.Errorf("a trust bundle of %d bytes", len(content)))
	}
	certs, err := pki.DecodeCertificates(content)
	if err != nil {
		return nil, refused(fmt.Errorf("trust bundle: %w", err))
	}
	out, err := pki.NewBundle(certs...)
	if err != nil {
		return nil, refused(fmt.Errorf("trust bundle: %w", err))
	}
	return out, nil
}

func causeOf(err error) Cause {
	switch {
	case Untrusts(err):
		return Untrusted
	case errors.Is(err, pki.ErrIdentity):
		return OtherIdentity
	default:
		return Unreachable
	}
}

// Untrusts reports whether an error means that the roots did not verify a server's certificate.
func Untrusts(err error) bool {
	_, unverified := errors.AsType[*tls.CertificateVerificationError](err)
	_, unknown := errors.AsType[x509.UnknownAuthorityError](err)
	return unverified || unknown
}

// Shake makes one TLS connection to a service, closes it, and returns the identity that the server proved.
func Shake(ctx context.Context, address, service string, roots *pki.Bundle, opts Options) (pki.ID, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(opts.Timeout, defaultTimeout))
	defer cancel()
	dial := opts.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	raw, err := dial(ctx, "tcp", address)
	if err != nil {
		return pki.ID{}, err
	}
	var peer pki.ID
	conn := tls.Client(raw, &tls.Config{
		MinVersion: tls.VersionTLS13, Time: opts.Now, NextProtos: []string{"h2"},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies chain, usage and identity
		VerifyConnection: func(state tls.ConnectionState) error {
			var err error
			peer, err = VerifyServer(state, roots, opts.TrustDomain, service, opts.Now)
			return err
		},
	})
	if err := errors.Join(conn.HandshakeContext(ctx), raw.Close()); err != nil {
		return pki.ID{}, err
	}
	return peer, nil
}

// VerifyServer returns the identity of a server, and an error unless its certificate is that of service under roots. A
// host that does not have its trust domain yet takes the server's: the roots sign for one mesh only.
func VerifyServer(
	state tls.ConnectionState, roots *pki.Bundle, trustDomain, service string, now func() time.Time,
) (pki.ID, error) {
	if trustDomain == "" && len(state.PeerCertificates) > 0 && len(state.PeerCertificates[0].URIs) == 1 {
		id, err := pki.ParseID(state.PeerCertificates[0].URIs[0].String())
		if err != nil {
			return pki.ID{}, errors.Join(pki.ErrIdentity, err)
		}
		trustDomain = id.TrustDomain
	}
	peer, err := pki.ClientConfig{
		Roots: roots, Server: pki.ServiceID(trustDomain, service), Time: now,
	}.VerifyServer(state)
	return peer.ID, err
}
