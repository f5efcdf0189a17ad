package assertion

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
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/wallclock"
)

const (
	// Header carries the signed assertion of the person.
	Header = "Gpuaas-Person-Assertion"
	// Life is how long an assertion is good for.
	Life = 60 * time.Second
	// skew is by how much the clock of an issuer may be ahead of ours.
	skew = 5 * time.Second
	// domain begins the signed bytes, so that no other signature of the mesh can be taken for an assertion.
	domain    = "gpuaas.mesh/person-assertion\x00"
	maxSize   = 8 << 10
	maxNonces = 1 << 16
)

// Assertion is the signed content: the person, and the one request that it is good for.
type Assertion struct {
	Subject   string   `json:"subject"`
	TenantID  string   `json:"tenant_id,omitempty"`
	Roles     []string `json:"roles,omitempty"`
	Procedure string   `json:"procedure"`
	Digest    string   `json:"digest"`    // SHA-256 of the request message in deterministic form, hexadecimal
	IssuedAt  int64    `json:"issued_at"` // milliseconds since 1970
	Nonce     string   `json:"nonce"`
}

// Signer signs the identity of the person on whose behalf a call is made. It is the client interceptor of readmodel:
// calls made in a context with a person (rpc.WithPerson) carry an assertion of that person for exactly that request;
// other calls carry none.
type Signer struct {
	key   *atomic.Pointer[ed25519.PrivateKey]
	guard *atomic.Pointer[func() error]
	now   func() time.Time
}

// NewSigner makes a signer. now nil means wallclock.Now.
func NewSigner(key ed25519.PrivateKey, now func() time.Time) *Signer {
	if now == nil {
		now = wallclock.Now
	}
	a := &Signer{key: &atomic.Pointer[ed25519.PrivateKey]{}, guard: &atomic.Pointer[func() error]{}, now: now}
	a.Replace(key)
	return a
}

// Replace makes another key sign all assertions from now on.
func (a *Signer) Replace(key ed25519.PrivateKey) { a.key.Store(&key) }

// Guard makes the signer call confirmed before each assertion; an error of confirmed refuses the call.
func (a *Signer) Guard(confirmed func() error) { a.guard.Store(&confirmed) }

// KeySet returns the public key, in the form that owners configure.
func (a *Signer) KeySet() (*pki.KeySet, error) {
	public, _ := a.key.Load().Public().(ed25519.PublicKey)
	return pki.NewKeySet(public)
}

func (a *Signer) assert(ctx context.Context, procedure string, message any, header http.Header) error {
	person, ok := rpc.PersonFrom(ctx)
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
	body, err := json.Marshal(Assertion{
		Subject: person.Subject, TenantID: person.TenantID, Roles: person.Roles, Procedure: procedure,
		Digest: digest, IssuedAt: a.now().UnixMilli(), Nonce: rand.Text(),
	})
	if err != nil {
		return fmt.Errorf("encode person assertion: %w", err)
	}
	key := *a.key.Load()
	public, _ := key.Public().(ed25519.PublicKey)
	signature := ed25519.Sign(key, append([]byte(domain), body...))
	header.Set(Header, pki.KeyID(public)+"."+base64.RawURLEncoding.EncodeToString(body)+"."+
		base64.RawURLEncoding.EncodeToString(signature))
	return nil
}

// WrapUnary implements connect.Interceptor.
func (a *Signer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
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
func (a *Signer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		return &assertingConn{StreamingClientConn: next(ctx, spec), ctx: ctx, signer: a}
	}
}

// WrapStreamingHandler implements connect.Interceptor; nothing is asserted on the server side.
func (a *Signer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

type assertingConn struct {
	connect.StreamingClientConn

	ctx    context.Context //nolint:containedctx // of the stream that this value is.
	signer *Signer
	sent   bool
}

func (c *assertingConn) Send(message any) error {
	if !c.sent {
		c.sent = true
		if err := c.signer.assert(c.ctx, c.Spec().Procedure, message, c.RequestHeader()); err != nil {
			return err
		}
	}
	return c.StreamingClientConn.Send(message)
}

// Verifier verifies assertions for the owner of a method. It is safe for concurrent use.
type Verifier struct {
	keys atomic.Pointer[pki.KeySet]
	now  func() time.Time

	mu   sync.Mutex
	seen map[string]time.Time // nonce → when it may be deleted
}

// NewVerifier verifies by readmodel's public keys. now nil means wallclock.Now.
func NewVerifier(keys *pki.KeySet, now func() time.Time) *Verifier {
	if now == nil {
		now = wallclock.Now
	}
	v := &Verifier{now: now, seen: map[string]time.Time{}}
	v.Replace(keys)
	return v
}

// Replace makes the verifier use another set of public keys from now on.
func (v *Verifier) Replace(keys *pki.KeySet) { v.keys.Store(keys) }

// Verify checks everything but the digest, which needs the message: the caller compares it (CheckDigest) before the
// message is used. Only then is the nonce spent (Spend), so that a captured header cannot be burnt by sending it with
// another message.
func (v *Verifier) Verify(header, procedure string) (Assertion, error) {
	if v == nil || v.keys.Load() == nil {
		return Assertion{}, Refuse("no keys are configured")
	}
	if len(header) > maxSize {
		return Assertion{}, Refuse("too large")
	}
	parts := strings.Split(header, ".")
	if len(parts) != 3 {
		return Assertion{}, Refuse("malformed")
	}
	key, ok := v.keys.Load().Key(parts[0])
	if !ok {
		return Assertion{}, Refuse("unknown key")
	}
	body, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return Assertion{}, Refuse("malformed")
	}
	signature, err := base64.RawURLEncoding.DecodeString(parts[2])
	if err != nil || !ed25519.Verify(key, append([]byte(domain), body...), signature) {
		return Assertion{}, Refuse("the signature does not verify")
	}
	var out Assertion
	if err := json.Unmarshal(body, &out); err != nil {
		return Assertion{}, Refuse("malformed")
	}
	age := v.now().Sub(time.UnixMilli(out.IssuedAt))
	switch {
	case out.Procedure != procedure:
		return Assertion{}, Refuse("it is for another method")
	case age > Life:
		return Assertion{}, Refuse("it is too old")
	case age < -skew:
		return Assertion{}, Refuse("it comes from the future")
	case out.Subject == "" || out.Nonce == "":
		return Assertion{}, Refuse("it names no person")
	}
	return out, nil
}

// Spend refuses a nonce that was used before. Memory is bounded: beyond that, assertions are refused.
func (v *Verifier) Spend(a Assertion) error {
	now := v.now()
	v.mu.Lock()
	defer v.mu.Unlock()
	if until, used := v.seen[a.Nonce]; used && now.Before(until) {
		return Refuse("it was used before")
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
	v.seen[a.Nonce] = time.UnixMilli(a.IssuedAt).Add(Life + skew)
	return nil
}

// Person returns the person that an assertion names.
func (a Assertion) Person() rpc.Person {
	return rpc.Person{Subject: a.Subject, TenantID: a.TenantID, Roles: a.Roles}
}

// CheckDigest refuses a message other than the one that was asserted.
func (a Assertion) CheckDigest(message any) error {
	digest, err := digestOf(message)
	if err != nil {
		return err
	}
	if subtle.ConstantTimeCompare([]byte(digest), []byte(a.Digest)) != 1 {
		return Refuse("it is for another request")
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

// Refuse returns the fault of a refused assertion; the reason goes to logs alone.
func Refuse(why string) error {
	return fault.New(commonv1.Reason_REASON_ASSERTION_INVALID, "", fault.Cause(errors.New(why)))
}
