package rpc

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// HeaderPerson carries the signed assertion of the person.
	HeaderPerson = "Gpuaas-Person-Assertion"
	// AssertionLife is how long an assertion is good for.
	AssertionLife = 60 * time.Second
	// assertionSkew is by how much the clock of an issuer may be ahead of ours.
	assertionSkew = 5 * time.Second
	// assertionDomain begins the signed bytes, so that no other signature of the mesh can be taken for an assertion.
	assertionDomain  = "gpuaas.mesh/person-assertion\x00"
	maxAssertionSize = 8 << 10
	maxNonces        = 1 << 16
)

// assertion is the signed content: the person, and the one request that it is good for.
type assertion struct {
	Subject   string   `json:"subject"`
	TenantID  string   `json:"tenant_id,omitempty"`
	Roles     []string `json:"roles,omitempty"`
	Procedure string   `json:"procedure"`
	Digest    string   `json:"digest"`    // SHA-256 of the request message in deterministic form, hexadecimal
	IssuedAt  int64    `json:"issued_at"` // milliseconds since 1970
	Nonce     string   `json:"nonce"`
}

// Asserter signs the identity of the person on whose behalf a call is made. It is the client interceptor of readmodel:
// calls made in a context with a person (WithPerson) carry an assertion of that person for exactly that request; other
// calls carry none.
type Asserter struct {
	key   *atomic.Pointer[ed25519.PrivateKey]
	guard *atomic.Pointer[func() error]
	now   func() time.Time
}

// NewAsserter makes an asserter. now nil means time.Now.
func NewAsserter(key ed25519.PrivateKey, now func() time.Time) *Asserter {
	if now == nil {
		now = time.Now
	}
	a := &Asserter{key: &atomic.Pointer[ed25519.PrivateKey]{}, guard: &atomic.Pointer[func() error]{}, now: now}
	a.Replace(key)
	return a
}

// Replace makes another key sign all assertions from now on.
func (a *Asserter) Replace(key ed25519.PrivateKey) { a.key.Store(&key) }

// Guard makes the asserter call confirmed before each assertion; an error of confirmed refuses the call.
func (a *Asserter) Guard(confirmed func() error) { a.guard.Store(&confirmed) }

// WithClock returns the same asserter with another clock.
func (a *Asserter) WithClock(now func() time.Time) *Asserter {
	return &Asserter{key: a.key, guard: a.guard, now: now}
}

// KeySet returns the public key, in the form that owners configure.
func (a *Asserter) KeySet() (*pki.KeySet, error) {
	public, _ := a.key.Load().Public().(ed25519.PublicKey)
	return pki.NewKeySet(public)
}

func (a *Asserter) assert(ctx context.Context, procedure string, message any, header http.Header) error {
	person, ok := PersonFrom(ctx)
	if !ok {
		return nil
	}
	if confirmed := a.guard.Load(); confirmed != nil {
		if err := (*confirmed)(); err != nil {
			return err
		}
	}
	digest, err := digestOf(message)
	if err != nil {
		return err
	}
	body, err := json.Marshal(assertion{
		Subject: person.Subject, TenantID: person.TenantID, Roles: person.Roles, Procedure: procedure,
		Digest: digest, IssuedAt: a.now().UnixMilli(), Nonce: rand.Text(),
	})
	if err != nil {
		return fmt.Errorf("encode person assertion: %w", err)
	}
	key := *a.key.Load()
	public, _ := key.Public().(ed25519.PublicKey)
	signature := ed25519.Sign(key, append([]byte(assertionDomain), body...))
	header.Set(HeaderPerson, pki.KeyID(public)+"."+base64.RawURLEncoding.EncodeToString(body)+"."+
		base64.RawURLEncoding.EncodeToString(signature))
	return nil
}

// WrapUnary implements connect.Interceptor.
func (a *Asserter) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if req.Spec().IsClient {
			if err := a.assert(ctx, req.Spec().Procedure, req.Any(), req.Header()); err != nil {
				return nil, err
			}
		}
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor: the assertion is for the first message.
func (a *Asserter) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		return &assertingConn{StreamingClientConn: next(ctx, spec), ctx: ctx, asserter: a}
	}
}

// WrapStreamingHandler implements connect.Interceptor; nothing is asserted on the server side.
func (a *Asserter) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

type assertingConn struct {
	connect.StreamingClientConn

	ctx      context.Context //nolint:containedctx // of the stream that this value is.
	asserter *Asserter
	sent     bool
}

func (c *assertingConn) Send(message any) error {
	if !c.sent {
		c.sent = true
		if err := c.asserter.assert(c.ctx, c.Spec().Procedure, message, c.RequestHeader()); err != nil {
			return err
		}
	}
	return c.StreamingClientConn.Send(message)
}

// PersonVerifier verifies assertions for the owner of a method. It is safe for concurrent use.
type PersonVerifier struct {
	keys atomic.Pointer[pki.KeySet]
	now  func() time.Time

	mu   sync.Mutex
	seen map[string]time.Time // nonce → when it may be deleted
}

// NewPersonVerifier verifies by readmodel's public keys. now nil means time.Now.
func NewPersonVerifier(keys *pki.KeySet, now func() time.Time) *PersonVerifier {
	if now == nil {
		now = time.Now
	}
	v := &PersonVerifier{now: now, seen: map[string]time.Time{}}
	v.Replace(keys)
	return v
}

// Replace makes the verifier use another set of public keys from now on.
func (v *PersonVerifier) Replace(keys *pki.KeySet) { v.keys.Store(keys) }

// verify checks everything but the digest, which needs the message: the caller compares it (checkDigest) before the
// message is used. Only then is the nonce spent (spend), so that a captured header cannot be burnt by sending it with
// another message.
func (v *PersonVerifier) verify(header, procedure string) (assertion, error) {
	if v == nil || v.keys.Load() == nil {
		return assertion{}, refuseAssertion("no keys are configured")
	}
	if len(header) > maxAssertionSize {
		return assertion{}, refuseAssertion("too large")
	}
	parts := strings.Split(header, ".")
	if len(parts) != 3 {
		return assertion{}, refuseAssertion("malformed")
	}
	key, ok := v.keys.Load().Key(parts[0])
	if !ok {
		return assertion{}, refuseAssertion("unknown key")
	}
	body, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return assertion{}, refuseAssertion("malformed")
	}
	signature, err := base64.RawURLEncoding.DecodeString(parts[2])
	if err != nil || !ed25519.Verify(key, append([]byte(assertionDomain), body...), signature) {
		return assertion{}, refuseAssertion("the signature does not verify")
	}
	var out assertion
	if err := json.Unmarshal(body, &out); err != nil {
		return assertion{}, refuseAssertion("malformed")
	}
	age := v.now().Sub(time.UnixMilli(out.IssuedAt))
	switch {
	case out.Procedure != procedure:
		return assertion{}, refuseAssertion("it is for another method")
	case age > AssertionLife:
		return assertion{}, refuseAssertion("it is too old")
	case age < -assertionSkew:
		return assertion{}, refuseAssertion("it comes from the future")
	case out.Subject == "" || out.Nonce == "":
		return assertion{}, refuseAssertion("it names nobody")
	}
	return out, nil
}

// spend refuses a nonce that was used before. Memory is bounded: beyond that, assertions are refused.
func (v *PersonVerifier) spend(a assertion) error {
	now := v.now()
	v.mu.Lock()
	defer v.mu.Unlock()
	if until, used := v.seen[a.Nonce]; used && now.Before(until) {
		return refuseAssertion("it was used before")
	}
	if len(v.seen) >= maxNonces {
		for nonce, until := range v.seen {
			if !now.Before(until) {
				delete(v.seen, nonce)
			}
		}
		if len(v.seen) >= maxNonces {
			return fault.New(commonv1.Reason_REASON_OVERLOADED, "")
		}
	}
	v.seen[a.Nonce] = time.UnixMilli(a.IssuedAt).Add(AssertionLife + assertionSkew)
	return nil
}

func (a assertion) person() Person {
	return Person{Subject: a.Subject, TenantID: a.TenantID, Roles: a.Roles}
}

func (a assertion) checkDigest(message any) error {
	digest, err := digestOf(message)
	if err != nil {
		return err
	}
	if subtle.ConstantTimeCompare([]byte(digest), []byte(a.Digest)) != 1 {
		return refuseAssertion("it is for another request")
	}
	return nil
}

// digestOf hashes a message in deterministic form. Both sides must have the same fields: an owner is upgraded before
// readmodel sends it new ones.
func digestOf(message any) (string, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return "", fmt.Errorf("digest request: %T is no message", message)
	}
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("digest request: %w", err)
	}
	sum := sha256.Sum256(encoded)
	return hex.EncodeToString(sum[:]), nil
}

// refuseAssertion returns the fault of a refused assertion; the reason goes to logs alone.
func refuseAssertion(why string) error {
	return fault.New(commonv1.Reason_REASON_ASSERTION_INVALID, "", fault.Cause(errors.New(why)))
}
