package enrol

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"time"

	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/diag/cause"
	"github.com/gpuaas/mesh/agent/endpoints"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/recoverykey"
)

// ErrNoToken means that there is no token to enrol with: an operator must issue a bundle.
var ErrNoToken = cause.New(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED,
	"no enrolment token is held")

// ErrNotPinned means that the bundle which pins the enrolment listener cannot be read.
var ErrNotPinned = cause.New(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED,
	"the pinned trust for enrolment cannot be read")

// Facts are what a host reports of itself when it enrols.
type Facts struct {
	AgentVersion string
	BootID       string
	Host         *commonv1.HostFacts
	Profile      *commonv1.ProfileFacts
	// CorrelationID is of the failures that led to the attempt; empty: there were none.
	CorrelationID string
}

// Deps are what an Enroller needs.
type Deps struct {
	Logger *slog.Logger
	Store  *identity.Store
	Clock  *clock.Clock
	Facts  func() Facts
	// Record puts a diagnostic on disk and returns what is kept; it is called before every retry.
	Record func(ctx context.Context, code commonv1.DiagnosticCode, detail string, nextRetry time.Duration) (diag.Entry,
		error)
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
	deps       Deps
	cfg        Config
	retry      *backoff.Backoff
	last       error // of the last attempt that failed, whatever it was
	tokenIndex int   // of the recovery tokens: one that is refused is followed by the other
}

// New checks deps and returns an Enroller. It connects to nothing.
func New(deps Deps, cfg Config) (*Enroller, error) {
	if deps.Logger == nil || deps.Store == nil || deps.Clock == nil || deps.Facts == nil {
		return nil, errors.New("enrol: logger, store, clock and facts are needed")
	}
	cfg.Backoff = cmp.Or(cfg.Backoff, backoff.Policy{Base: time.Second, Cap: 30 * time.Second})
	cfg = config.Or(cfg, Config{SlowRetry: time.Minute, Timeout: 15 * time.Second, Draw: rand.Int64N})
	return &Enroller{deps: deps, cfg: cfg, retry: backoff.New(cfg.Backoff).WithDraw(cfg.Draw)}, nil
}

// EndedError is the error of a Run whose context ended between two attempts. It unwraps to the cause alone: the last
// refusal is not why it ended.
type EndedError struct {
	Cause error
	Last  error // of the last attempt
}

func (e *EndedError) Error() string {
	return e.Cause.Error() + "; the last attempt: " + detailOf(e.Last)
}
func (e *EndedError) Unwrap() error { return e.Cause }

// Run sends requests until this host has a certificate (nil), is told to stop (*StopError), or ctx ends (its cause).
// Without a token it waits for one: an operator may put a bundle in place at any time.
func (e *Enroller) Run(ctx context.Context) error {
	for {
		wait, err := e.Attempt(ctx)
		if err != nil || wait == 0 {
			return err
		}
		if !app.Sleep(ctx, wait) {
			return &EndedError{Cause: context.Cause(ctx), Last: e.last}
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
	e.last = err
	if fault.Has(err, commonv1.Reason_REASON_KEY_REUSE) || fault.Has(err, commonv1.Reason_REASON_CSR_REFUSED) {
		// This machine has the key of another one, perhaps as both were made from one image, or the key was certified before,
		// for a renewal whose reply was lost: the next request has a new key.
		if err := e.deps.Store.DropPendingKey(); err != nil {
			e.deps.Logger.LogAttrs(ctx, slog.LevelError, "pending key not dropped", slog.Any("error", err))
		}
	}
	wait, terminal := e.decide(err)
	code := e.codeOf(err)
	recorded := e.record(ctx, code, detailOf(err), wait)
	if terminal != nil {
		return 0, terminal
	}
	e.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "not enrolled", append([]slog.Attr{
		slog.String("code", names.Of(code)), slog.Any("error", err), slog.Duration("next_retry", wait),
		slog.Int("attempt", e.retry.Attempts()),
	}, recorded.Attrs()...)...)
	return max(wait, time.Millisecond), nil
}

// Once sends one request with the operator's token. nil means that the identity is on disk.
func (e *Enroller) Once(ctx context.Context) error {
	store := e.deps.Store
	token := store.Token()
	if token == "" {
		return ErrNoToken
	}
	key, err := store.PendingKey()
	if err != nil {
		return err
	}
	recovery, err := store.RecoveryKey()
	if err != nil {
		return err
	}
	return e.send(ctx, credential{token: token, key: key, recovery: recovery})
}

// credential is with what a request is sent.
type credential struct {
	token    string
	key      crypto.Signer // of the certificate request
	recovery crypto.Signer // to which the next recovery token is to be bound
	prove    bool          // that the token is bound to recovery
	// trusted is set once the reply has brought other trust for the node API, which the one held does not verify; nil: it
	// is not to bring any.
	trusted *bool
}

func (c credential) request() (*recoveryv1.EnrollRequest, error) {
	csr, err := pki.NewAnonymousCSR(c.key)
	if err != nil {
		return nil, err
	}
	public, err := recoverykey.Public(c.recovery)
	if err != nil {
		return nil, err
	}
	out := &recoveryv1.EnrollRequest{Token: c.token, Csr: csr, RecoveryPublicKey: public}
	if c.prove {
		if out.RecoveryProof, err = recoverykey.Sign(c.recovery, c.token, csr); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// send sends one request and stores the reply. nil means that the identity is on disk.
func (e *Enroller) send(ctx context.Context, with credential) error {
	store := e.deps.Store
	client, err := e.client()
	if err != nil {
		return err
	}
	request, err := with.request()
	if err != nil {
		return err
	}
	facts := e.deps.Facts()
	request.JoinState, _ = store.JoinState()
	request.AgentVersion, request.BootId, request.Host = facts.AgentVersion, facts.BootID, facts.Host
	request.Profile, request.CorrelationId = facts.Profile, facts.CorrelationID
	if err := failpoint.Hit("agent.enrol.before_send"); err != nil {
		return err
	}
	callCtx, cancel := context.WithTimeout(ctx, e.cfg.Timeout)
	defer cancel()
	sent := time.Now()
	answer, err := client.Enroll(callCtx, request)
	if err != nil {
		return understand(err)
	}
	if t := answer.GetServerTime(); t != nil {
		e.deps.Clock.Observe(t.AsTime(), sent)
	}
	if err := failpoint.Hit("agent.enrol.before_fsync"); err != nil {
		return err
	}
	if with.trusted != nil {
		*with.trusted = e.takeVerified(ctx, answer)
	} else {
		e.keepWhatWorks(ctx, answer)
	}
	if err := store.CommitEnrolment(with.token, answer); err != nil {
		return fmt.Errorf("keep identity: %w", err)
	}
	e.retry.Reset()
	node, _ := store.Node()
	e.deps.Logger.LogAttrs(ctx, slog.LevelInfo, "enrolled", slog.String("node_id", node.NodeID),
		slog.String("node_instance_id", node.InstanceID), slog.Bool("recovered", with.prove))
	return nil
}

// keepWhatWorks tests the endpoint and trust of a reply with a real connection where they would replace others. The old
// endpoint and bundle stay if the new bundle does not verify the server of a handshake. An address that does not answer
// proves nothing by itself: the old ones stay if theirs does.
func (e *Enroller) keepWhatWorks(ctx context.Context, answer *recoveryv1.EnrollResponse) {
	store, profile := e.deps.Store, answer.GetProfile()
	old, err := pki.LoadBundle(store.BundlePath())
	if err != nil || store.Env().Get(envfile.APIURL) == "" || len(profile.GetCaBundlePem()) == 0 {
		return
	}
	held, unread := envfile.HostPort(store.Env().Get(envfile.APIURL))
	address, err := envfile.HostPort(profile.GetApiUrl())
	if err != nil || address == held && bytes.Equal(old.PEM(), profile.GetCaBundlePem()) {
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
	options := endpoints.Options{Now: e.deps.Clock.Now, Dial: e.deps.Dial}
	_, err = endpoints.Shake(ctx, address, "nodeapi", fresh, options)
	if err == nil {
		return
	}
	detail := "the trust bundle of the enrolment's answer does not verify " + address +
		": the old endpoint and bundle stay"
	if !errors.Is(err, pki.ErrIdentity) && !endpoints.Untrusts(err) {
		if unread != nil || address == held {
			return
		}
		if _, err := endpoints.Shake(ctx, held, "nodeapi", old, options); err != nil {
			return
		}
		detail = "the node API of the enrolment's answer, " + address + ", does not answer, and " + held +
			" does: the old endpoint and bundle stay"
	}
	answer.Profile = nil // all of it or nothing
	e.deps.Logger.LogAttrs(ctx, slog.LevelError, "new trust not taken", slog.String("detail", detail))
	e.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENDPOINT_PROFILE_DRIFT, detail, 0)
}

// takeVerified leaves the profile of a reply out unless a connection to each of its endpoints verifies it: the trust
// that the reply brings takes the place of one that failed, and one that fails too is of no use. It reports whether the
// profile is there still.
func (e *Enroller) takeVerified(ctx context.Context, answer *recoveryv1.EnrollResponse) bool {
	profile, err := e.deps.Store.Replacing(answer.GetProfile())
	if err == nil {
		node, _ := e.deps.Store.Node()
		err = endpoints.Verify(ctx, profile, endpoints.Options{
			TrustDomain: node.TrustDomain, Now: e.deps.Clock.Now, Dial: e.deps.Dial,
		})
	}
	if err == nil {
		return true
	}
	answer.Profile = nil
	detail := "the profile of the enrolment's answer was not taken: " + err.Error()
	e.deps.Logger.LogAttrs(ctx, slog.LevelError, "new trust not taken", slog.String("detail", detail))
	e.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED, detail, 0)
	return false
}
