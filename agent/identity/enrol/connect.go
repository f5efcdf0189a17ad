package enrol

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/agent/endpoints"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/pki"
)

func (e *Enroller) client() (recoveryv1connect.EnrollmentServiceClient, error) {
	store := e.deps.Store
	address, err := envfile.HostPort(store.Env().RecoveryURL())
	if err != nil {
		return nil, fmt.Errorf("enrolment address: %w", err)
	}
	roots, err := pki.LoadBundle(store.RecoveryBundlePath())
	if err != nil {
		return nil, errors.Join(ErrNotPinned, err)
	}
	trustDomain := store.Env().Get(envfile.TrustDomain)
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
				_, err := endpoints.VerifyServer(state, roots, trustDomain, "recovery", e.deps.Clock.Now)
				return err
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
