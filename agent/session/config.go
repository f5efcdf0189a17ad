package session

import (
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// ProtocolVersion is the version that Hello declares. From 2 on an agent answers OutputRequest, from 3 on it stops all
// tasks that a TaskCancel names, from 4 on it follows the lists of task keys and reports which keys it has.
const ProtocolVersion = 4

// Identity is the identity with which sessions are opened. *identity.Store keeps it on disk, *memory.Identity does not.
type Identity interface {
	Node() (identity.Node, bool)
	Certificate() *tls.Certificate
	Other() *tls.Certificate
	JoinState() ([]byte, int64)
	StoreJoinState(generation int64, signed []byte) (bool, error)
	RenewalKey() (crypto.Signer, error)
	DropRenewalKey() error
	StoreIssued(chainPEM []byte, recoveryToken string) error
	Flip() error
	// RecoveryKey returns the key to which recovery tokens are bound, from disk; nil: this identity has no use for tokens.
	RecoveryKey() (crypto.Signer, error)
	// Confirm is called with the certificate of each session that is admitted: the recovery token that came with it
	// counts.
	Confirm(leaf *x509.Certificate) error
	// TaskKeys returns the keys by which tasks are verified; nil: this identity uses no task keys.
	TaskKeys() (*pki.KeySet, error)
	// TakeTaskKeys stores durably the keys that follow from the present ones by a list; see pki.Advance. With an error it
	// returns the previous keys.
	TakeTaskKeys(links []pki.Link) (held *pki.KeySet, unbelieved []string, err error)
}

// Hooks are called with what the stream brings. Each may be nil. Offer, Cancel, Acknowledged and ReportRefused are
// called by the goroutine that reads the stream, one at a time: while one of them blocks nothing is read, and a session
// that reads nothing for long is closed.
type Hooks struct {
	// Hello completes the first frame: versions, ledger, facts, tasks in flight, diagnostics.
	Hello func(*nodev1.Hello)
	// Admitted is called when this session becomes the one that gets work. The hook sends unacknowledged reports again.
	Admitted func(ctx context.Context, generation int64)
	// RunList is called once in each session with lifecycle's list of what may run on this node; nil: the control plane is
	// of an earlier version and sends no list.
	RunList func(ctx context.Context, list *nodev1.RunList)
	// Trust is called after each open that failed while no session is admitted, with whether the server was verified, if
	// that is known. It returns whether Run is to end with a *TrustError, since other trust is needed.
	Trust func(ctx context.Context, verified bool) bool
	// Lost is called when no session is left.
	Lost func()
	// Offer, Cancel, Acknowledged and ReportRefused take a frame about tasks. An error means that the frame was dropped:
	// it is logged, and the session goes on.
	Offer         func(offer *nodev1.TaskOffer) error
	Cancel        func(cancel *nodev1.TaskCancel) error
	Acknowledged  func(ctx context.Context, refs []*nodev1.TaskRef) error
	ReportRefused func(ctx context.Context, refused *nodev1.TaskReportRefused) error
	Policy        func(policy *commonv1.NodePolicy)
	// Output is called with a request for a piece of a workload's output. It must not block: Client.Output queues the
	// reply.
	Output func(ctx context.Context, req *nodev1.OutputRequest)
	// Profile is called with another version of the node's profile. It must not block: Client.AnswerProfile queues the
	// reply.
	Profile func(ctx context.Context, profile *commonv1.Profile)
	// ProfileAnnounced is called with the fingerprint in each answer to a heartbeat: of the profile that the control plane
	// has for the node.
	ProfileAnnounced func(ctx context.Context, fingerprint string)
	// ChangedFacts is called before each heartbeat; nil: nothing changed.
	ChangedFacts func() *commonv1.HostFacts
	// TaskKeys is called with the keys by which tasks are verified from now on, after they are on disk.
	TaskKeys func(set *pki.KeySet)
	// ServiceRoots stores durably the trusted roots of services that follow from a list of the control plane. It is called
	// before Ready, and when the list changes. Its errors are those of identity.Store.TakeServiceRoots.
	ServiceRoots func(ctx context.Context, links []pki.RootLink) error
}

// Diagnostic is the record that is kept before a retry.
type Diagnostic struct {
	Code      commonv1.DiagnosticCode
	Detail    string
	NextRetry time.Duration
}

// Deps are what a Client needs.
type Deps struct {
	Logger   *slog.Logger
	Identity Identity
	Clock    *clock.Clock
	Roots    *pki.Bundle // trusts the node API
	// Endpoint returns host:port of the node API. It is called before each dial.
	Endpoint func() (string, error)
	// Record puts a diagnostic on disk and returns what is kept. It is called before every retry. Nil: none is kept.
	Record func(ctx context.Context, d Diagnostic) (diag.Entry, error)
	Hooks  Hooks
	// Lookup returns the addresses of a host. Nil: the system's resolver; where Dial is set no lookup is made, and Dial
	// gets the endpoint as it is.
	Lookup func(ctx context.Context, host string) ([]string, error)
	// Dial opens the transport. Nil: TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)
}

// Config bounds a Client. Zero fields take their defaults.
type Config struct {
	// OpenTimeout is the time from the dial to Admitted, even if the server goes on sending frames before Admitted.
	// Default 22 s, all phases together and a moment more.
	OpenTimeout time.Duration
	// Backoff is of opens without an answer, of those that were refused, and of lost streams, each counted by itself.
	// Default 1 s to 30 s.
	Backoff     backoff.Policy
	StableAfter time.Duration // a session that stood for this long resets the backoff of losses. Default 30 s
	SlowRetry   time.Duration // cadence where only an operator or the edge can help. Default 60 s
	// TurnedAway is the longest range of a wait after a connection that was closed before TLS: where a replica opens
	// sessions for others first, it will be this agent's turn soon, and to be turned away costs little. Default 10 s.
	TurnedAway   time.Duration
	Drain        time.Duration  // of a replaced session. Default 30 s
	Heartbeat    time.Duration  // until a policy sets another one. Default 15 s
	RenewRetry   backoff.Policy // of a renewal without an answer, or refused. Default 5 s to 5 min
	RenewTimeout time.Duration  // how long the client waits for the reply to a renewal. Default 30 s
	// Linger is how long the report of a delivery or a start waits for the result of its task, which implies both, unless
	// Flush sends it. Default 50 ms
	Linger  time.Duration
	Goodbye time.Duration // how long an orderly end may take. Default 2 s

	// RefusedFor is for how long at least the server refuses certificates that have not expired before Run ends, and
	// RefusedSpread the range of a random time beyond that. Default 30 s, two rounds of the control plane's own check of
	// what the ingress trusts, and 60 s.
	RefusedFor, RefusedSpread time.Duration

	// The phases of an open. One that takes longer ends the open, and the next takes another address; each frame that
	// the server sends before Admitted starts the time of its phase again. After a round of opens that timed out they
	// double, up to OpenTimeout.
	ConnectTimeout   time.Duration // to one address, and of the lookup. Default 3 s
	HandshakeTimeout time.Duration // of TLS. Default 8 s
	WelcomeTimeout   time.Duration // from the handshake to Welcome. Default 5 s
	AdmissionTimeout time.Duration // from Ready to Admitted. Default 5 s

	FramesPerSecond int // sent at most. Default 1000, half of what a server takes

	MaxFrame      int // received, in bytes. Default 1 MiB
	QueueLength   int // frames of each kind that may wait. Default 1024
	QueueBytes    int // of results that may wait. Default 8 MiB
	ReadBuffer    int // of the transport, in bytes. Default 4 KiB
	WriteBuffer   int // of the transport, in bytes. Default 4 KiB
	Draw          func(n int64) int64
	KeepaliveTime time.Duration // default 15 s; an unanswered one ends the connection after 10 s
}

var defaults = Config{
	OpenTimeout: 22 * time.Second, ConnectTimeout: 3 * time.Second, HandshakeTimeout: 8 * time.Second,
	WelcomeTimeout: 5 * time.Second, AdmissionTimeout: 5 * time.Second, StableAfter: 30 * time.Second,
	SlowRetry: time.Minute, TurnedAway: 10 * time.Second, Drain: 30 * time.Second, Heartbeat: 15 * time.Second,
	RenewTimeout: 30 * time.Second,
	RefusedFor:   30 * time.Second, RefusedSpread: time.Minute,
	Goodbye: 2 * time.Second, Linger: 50 * time.Millisecond, KeepaliveTime: 15 * time.Second,
	FramesPerSecond: 1000, MaxFrame: 1 << 20, QueueLength: 1024, QueueBytes: 8 << 20, ReadBuffer: 4 << 10,
	WriteBuffer: 4 << 10,
}

// WithDefaults returns c with the defaults in place of its zero fields.
func (c Config) WithDefaults() Config {
	c = config.Or(c, defaults)
	c.Backoff = cmp.Or(c.Backoff, backoff.Policy{Base: time.Second, Cap: 30 * time.Second})
	c.RenewRetry = cmp.Or(c.RenewRetry, backoff.Policy{Base: 5 * time.Second, Cap: 5 * time.Minute})
	return c
}

func (d Deps) validate() error {
	var problems []error
	for _, part := range []struct {
		name    string
		missing bool
	}{
		{"logger", d.Logger == nil},
		{"identity", d.Identity == nil},
		{"clock", d.Clock == nil},
		{"trust bundle", d.Roots == nil},
		{"endpoint", d.Endpoint == nil},
	} {
		if part.missing {
			problems = append(problems, errors.New("no "+part.name))
		}
	}
	return errors.Join(problems...)
}

// StopError means that the control plane told this agent to stop: the same request will never succeed.
type StopError struct{ Denial *fault.Error }

// Error returns the text of the refusal.
func (e *StopError) Error() string { return "told to stop: " + e.Denial.Error() }

// Unwrap returns the refusal.
func (e *StopError) Unwrap() error { return e.Denial }

// TrustError means that the node API is not verified by the trust that is held, and that Hooks.Trust ended Run for it.
type TrustError struct{ Cause error }

// Error returns the cause as text.
func (e *TrustError) Error() string { return fmt.Sprintf("the node API is not trusted: %v", e.Cause) }

// Unwrap returns the cause.
func (e *TrustError) Unwrap() error { return e.Cause }

// IdentityError means that a session cannot be opened with any certificate of the identity: this host must enrol again
// (Action recover), or an operator must act (rebundle).
type IdentityError struct {
	Action commonv1.Action
	Cause  error
	// Rejected are the serials of the certificates that were refused since a session was admitted.
	Rejected []string
}

// Error returns the cause as text.
func (e *IdentityError) Error() string { return fmt.Sprintf("identity is not accepted: %v", e.Cause) }

// Unwrap returns the cause.
func (e *IdentityError) Unwrap() error { return e.Cause }
