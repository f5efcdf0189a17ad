package enrol

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

// ErrNoToken means that there is no token to enrol with: an operator must issue a bundle.
var ErrNoToken = errors.New("no enrolment token is held")

// ErrNotPinned means that the bundle which pins the enrolment listener cannot be read.
var ErrNotPinned = errors.New("the pinned trust for enrolment cannot be read")

// StopError means that the control plane told this host to stop, such as an instance whose workspace has a later epoch.
type StopError struct{ Denial *fault.Error }

// Error returns the text of the refusal.
func (e *StopError) Error() string { return "told to stop: " + e.Denial.Error() }

// Unwrap returns the refusal.
func (e *StopError) Unwrap() error { return e.Denial }

// Facts are what a host reports of itself when it enrols.
type Facts struct {
	AgentVersion string
	BootID       string
	Host         *commonv1.HostFacts
	Profile      *commonv1.ProfileFacts
}

// Deps are what an Enroller needs.
type Deps struct {
	Logger *slog.Logger
	Store  *identity.Store
	Clock  *clock.Clock
	Facts  func() Facts
	// Record puts a diagnostic on disk; it is called before every retry.
	Record func(ctx context.Context, code commonv1.DiagnosticCode, detail string, nextRetry time.Duration) error
	// Dial opens the transport. Nil: TCP.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Config bounds an Enroller. Zero fields take their defaults.
type Config struct {
	Backoff   backoff.Policy // default 1 s to 30 s
	SlowRetry time.Duration  // where only an operator can help. Default 60 s
	Timeout   time.Duration  // of one request. Default 15 s
	Draw      func(n int64) int64
}

// Enroller makes this host a node.
type Enroller struct {
	deps  Deps
	cfg   Config
	retry *backoff.Backoff
}

// New checks deps and returns an Enroller. It connects to nothing.
func New(deps Deps, cfg Config) (*Enroller, error) {
	if deps.Logger == nil || deps.Store == nil || deps.Clock == nil || deps.Facts == nil {
		return nil, errors.New("enrol: logger, store, clock and facts are needed")
	}
	if cfg.Backoff == (backoff.Policy{}) {
		cfg.Backoff = backoff.Policy{Base: time.Second, Cap: 30 * time.Second}
	}
	if cfg.SlowRetry <= 0 {
		cfg.SlowRetry = time.Minute
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 15 * time.Second
	}
	if cfg.Draw == nil {
		cfg.Draw = rand.Int64N
	}
	return &Enroller{deps: deps, cfg: cfg, retry: backoff.New(cfg.Backoff).WithDraw(cfg.Draw)}, nil
}

// Run sends requests until this host has a certificate (nil), is told to stop (*StopError), or ctx ends (its cause).
// Without a token it waits for one: an operator may put a bundle in place at any time.
func (e *Enroller) Run(ctx context.Context) error {
	for {
		wait, err := e.Attempt(ctx)
		if err == nil && wait == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
		if err := e.deps.Store.ReloadEnv(); err != nil {
			e.deps.Logger.LogAttrs(ctx, slog.LevelError, "node-agent.env not read again", slog.Any("error", err))
		}
	}
}

// Attempt sends one request. Zero and nil mean that the identity is on disk. A wait means that the request failed, that
// the diagnostic is on disk, and that the next request must not be sent sooner. An error is *StopError or ctx's cause.
func (e *Enroller) Attempt(ctx context.Context) (time.Duration, error) {
	err := e.Once(ctx)
	if err == nil {
		return 0, nil
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if fault.Has(err, commonv1.Reason_REASON_KEY_REUSE) {
		// This machine has the key of another one, perhaps as both were made from one image: the next request has a new key.
		if err := e.deps.Store.DropPendingKey(); err != nil {
			e.deps.Logger.LogAttrs(ctx, slog.LevelError, "pending key not dropped", slog.Any("error", err))
		}
	}
	wait, terminal := e.decide(err)
	e.record(ctx, err, wait)
	if terminal != nil {
		return 0, terminal
	}
	e.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "not enrolled", slog.String("code", names.Of(codeOf(err))),
		slog.Any("error", err),
		slog.Duration("next_retry", wait), slog.Int("attempt", e.retry.Attempts()))
	return max(wait, time.Millisecond), nil
}

// Once sends one request. nil means that the identity is on disk.
func (e *Enroller) Once(ctx context.Context) error {
	store := e.deps.Store
	token := store.Token()
	if token == "" {
		return ErrNoToken
	}
	client, err := e.client()
	if err != nil {
		return err
	}
	key, err := store.PendingKey()
	if err != nil {
		return err
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		return err
	}
	joined, _ := store.JoinState()
	facts := e.deps.Facts()
	if err := failpoint.Hit("agent.enrol.before_send"); err != nil {
		return err
	}
	callCtx, cancel := context.WithTimeout(ctx, e.cfg.Timeout)
	defer cancel()
	sent := time.Now()
	answer, err := client.Enroll(callCtx, &recoveryv1.EnrollRequest{
		Token: token, Csr: csr, AgentVersion: facts.AgentVersion, BootId: facts.BootID, JoinState: joined, Host: facts.Host,
		Profile: facts.Profile,
	})
	if err != nil {
		return understand(err)
	}
	if t := answer.GetServerTime(); t != nil {
		e.deps.Clock.Observe(t.AsTime(), sent)
	}
	if err := failpoint.Hit("agent.enrol.before_fsync"); err != nil {
		return err
	}
	e.keepWhatWorks(ctx, answer)
	if err := store.CommitEnrolment(token, answer); err != nil {
		return fmt.Errorf("keep identity: %w", err)
	}
	e.retry.Reset()
	node, _ := store.Node()
	e.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "enrolled", slog.String("node_id", node.NodeID),
		slog.String("node_instance_id", node.InstanceID))
	return nil
}

// keepWhatWorks tests the endpoint and trust of a reply with a real connection where they would replace others. The old
// endpoint and bundle stay only if the new bundle does not verify the server of a handshake: an address that does not
// answer proves nothing.
func (e *Enroller) keepWhatWorks(ctx context.Context, answer *recoveryv1.EnrollResponse) {
	store, profile := e.deps.Store, answer.GetProfile()
	old, err := pki.LoadBundle(store.BundlePath())
	if err != nil || store.Env().Get(identity.EnvAPIURL) == "" || len(profile.GetCaBundlePem()) == 0 ||
		bytes.Equal(old.PEM(), profile.GetCaBundlePem()) {
		return
	}
	address, err := identity.HostPort(profile.GetApiUrl())
	if err != nil {
		return
	}
	certs, err := pki.DecodeCertificates(profile.GetCaBundlePem())
	if err != nil {
		return // CommitEnrolment refuses it
	}
	fresh, err := pki.NewBundle(certs...)
	if err != nil {
		return
	}
	if err := e.shake(ctx, address, fresh); err == nil || (!errors.Is(err, pki.ErrIdentity) && !untrusted(err)) {
		return
	}
	profile.ApiUrl, profile.CaBundlePem = "", nil
	detail := "the trust bundle of the enrolment's answer does not verify " + address +
		": the old endpoint and bundle stay"
	e.deps.Logger.LogAttrs(ctx, slog.LevelError, "new trust not taken", slog.String("detail", detail))
	if e.deps.Record != nil {
		if err := e.deps.Record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENDPOINT_PROFILE_DRIFT, detail, 0); err != nil {
			e.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", err))
		}
	}
}

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
	var verification *tls.CertificateVerificationError
	return errors.As(err, &verification)
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

// RoundTrip returns responses of the control plane's kinds, and an *EdgeError for all others.
func (t edge) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	kind, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
	ours := kind == "application/proto" || kind == "application/json" || kind == "application/connect+proto"
	if ours && response.StatusCode < http.StatusMultipleChoices {
		return response, nil
	}
	if ours && kind == "application/json" { // a Connect error: a 429 of ours carries a Denial
		return response, nil
	}
	out := &EdgeError{Status: response.StatusCode}
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil && seconds > 0 {
		out.RetryAfter = min(time.Duration(seconds)*time.Second, time.Hour)
	}
	_, _ = io.CopyN(io.Discard, response.Body, 4<<10)
	return nil, errors.Join(out, response.Body.Close())
}

// understand returns errors of layers below Connect as they are, and others as faults.
func understand(err error) error {
	var (
		limited   *EdgeError
		untrusted *tls.CertificateVerificationError
		dns       *net.DNSError
	)
	if errors.As(err, &limited) || errors.As(err, &untrusted) || errors.As(err, &dns) || errors.Is(err, pki.ErrIdentity) ||
		errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return fault.FromConnect(err)
}

// decide returns the wait before the next request, or the error that ends Run.
func (e *Enroller) decide(err error) (time.Duration, error) {
	var limited *EdgeError
	if errors.As(err, &limited) {
		return max(limited.RetryAfter, e.slow()), nil
	}
	if errors.Is(err, ErrNoToken) {
		return e.slow(), nil
	}
	f, ok := fault.As(err)
	if !ok {
		return e.retry.Next(0), nil
	}
	if f.Reason == commonv1.Reason_REASON_KEY_REUSE {
		return e.retry.Next(f.RetryAfter), nil // with another key, which this host makes itself
	}
	switch fault.ActionOf(err) { //nolint:exhaustive // everything unknown waits
	case commonv1.Action_ACTION_STOP:
		if f.Reason == commonv1.Reason_REASON_CSR_REFUSED || f.Reason == commonv1.Reason_REASON_INVALID_ARGUMENT {
			return e.slow(), nil // a defect of this build or of its file, no decision about this host
		}
		return 0, &StopError{Denial: f}
	case commonv1.Action_ACTION_RECOVER, commonv1.Action_ACTION_REBUNDLE, commonv1.Action_ACTION_RENEW:
		return max(f.RetryAfter, 0) + e.slow(), nil
	default:
		return e.retry.Next(f.RetryAfter), nil
	}
}

func (e *Enroller) slow() time.Duration {
	return e.cfg.SlowRetry/2 + time.Duration(e.cfg.Draw(int64(e.cfg.SlowRetry/2)))
}

func (e *Enroller) record(ctx context.Context, err error, next time.Duration) {
	if e.deps.Record == nil {
		return
	}
	detail := err.Error()
	if f, ok := fault.As(err); ok {
		detail = names.Of(f.Reason) + ": " + f.Public
	}
	const most = 512
	if err := e.deps.Record(ctx, codeOf(err), detail[:min(len(detail), most)], next); err != nil {
		e.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", err))
	}
}

func codeOf(err error) commonv1.DiagnosticCode {
	var (
		limited   *EdgeError
		untrusted *tls.CertificateVerificationError
		dns       *net.DNSError
	)
	switch {
	case errors.As(err, &limited):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
	case errors.Is(err, ErrNotPinned), errors.As(err, &untrusted), errors.Is(err, pki.ErrIdentity):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
	case errors.As(err, &dns):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED
	case errors.Is(err, syscall.ECONNREFUSED):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED
	case errors.Is(err, ErrNoToken):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED
	}
	f, ok := fault.As(err)
	if !ok {
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED
	}
	switch f.Reason { //nolint:exhaustive // every other refusal is one of enrolment
	case commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INTERNAL:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED
	case commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED, commonv1.Reason_REASON_IDENTITY_RETIRED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED
	default:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED
	}
}
