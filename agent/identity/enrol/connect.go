package enrol

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/pki"
)

// shake makes one TLS connection to the node API, closes it, and returns the handshake's error.
func (e *Enroller) shake(ctx context.Context, address string, roots *pki.Bundle) error {
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	dial := e.deps.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	raw, err := dial(ctx, "tcp", address)
	if err != nil {
		return err
	}
	conn := tls.Client(raw, &tls.Config{
		MinVersion: tls.VersionTLS13, Time: e.deps.Clock.Now, NextProtos: []string{"h2"},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies chain, usage and identity
		VerifyConnection: func(state tls.ConnectionState) error {
			return verify(state, roots, "", "nodeapi", e.deps.Clock.Now)
		},
	})
	return errors.Join(conn.HandshakeContext(ctx), raw.Close())
}

func untrusted(err error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

func (e *Enroller) client() (recoveryv1connect.EnrollmentServiceClient, error) {
	store := e.deps.Store
	address, err := identity.HostPort(store.Env().RecoveryURL())
	if err != nil {
		return nil, fmt.Errorf("enrolment address: %w", err)
	}
	roots, err := pki.LoadBundle(store.RecoveryBundlePath())
	if err != nil {
		return nil, errors.Join(ErrNotPinned, err)
	}
	trustDomain := store.Env().Get(identity.EnvTrustDomain)
	if node, ok := store.Node(); ok && trustDomain == "" {
		trustDomain = node.TrustDomain
	}
	transport := &http.Transport{
		DialContext: e.deps.Dial, DisableKeepAlives: true, ForceAttemptHTTP2: true, ResponseHeaderTimeout: e.cfg.Timeout,
		MaxResponseHeaderBytes: 16 << 10, TLSHandshakeTimeout: 5 * time.Second,
		TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS13, Time: e.deps.Clock.Now,
			//nolint:gosec // VerifyConnection verifies chain, usage and identity; a host name proves nothing here
			InsecureSkipVerify: true,
			VerifyConnection: func(state tls.ConnectionState) error {
				return verify(state, roots, trustDomain, "recovery", e.deps.Clock.Now)
			},
		},
	}
	return recoveryv1connect.NewEnrollmentServiceClient(&http.Client{
		Transport:     edge{transport},
		CheckRedirect: noRedirect,
	}, "https://"+address,
		connect.WithReadMaxBytes(1<<20)), nil
}

func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// verify returns an error unless the server has the certificate of service under the pinned roots. A host that does not
// have its trust domain yet takes the server's: the pinned roots sign for one mesh only.
func verify(state tls.ConnectionState, roots *pki.Bundle, trustDomain, service string, now func() time.Time) error {
	if trustDomain == "" && len(state.PeerCertificates) > 0 && len(state.PeerCertificates[0].URIs) == 1 {
		id, err := pki.ParseID(state.PeerCertificates[0].URIs[0].String())
		if err != nil {
			return errors.Join(pki.ErrIdentity, err)
		}
		trustDomain = id.TrustDomain
	}
	_, err := pki.ClientConfig{Roots: roots, Server: pki.ServiceID(trustDomain, service), Time: now}.VerifyServer(state)
	return err
}

// edge refuses responses that are not the control plane's: a rate limit, or a page for browsers.
type edge struct{ next http.RoundTripper }

// EdgeError is a response that did not come from the control plane.
type EdgeError struct {
	Status     int
	RetryAfter time.Duration
}

// Error returns a text with the status.
func (e *EdgeError) Error() string {
	return fmt.Sprintf("an edge answered with status %d, not the control plane", e.Status)
}

// DiagnosticCode returns the code under which the error is recorded.
func (*EdgeError) DiagnosticCode() commonv1.DiagnosticCode {
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
}

// RoundTrip returns responses of the control plane's kinds, and an *EdgeError for all others.
func (t edge) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	kind, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
	ok := response.StatusCode < http.StatusMultipleChoices
	if ok && (kind == "application/proto" || kind == "application/connect+proto") ||
		kind == "application/json" { // also a Connect error: a 429 of ours carries a Denial
		return response, nil
	}
	out := &EdgeError{Status: response.StatusCode}
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil && seconds > 0 {
		out.RetryAfter = min(time.Duration(seconds)*time.Second, time.Hour)
	}
	_, _ = io.CopyN(io.Discard, response.Body, 4<<10)
	return nil, errors.Join(out, response.Body.Close())
}
