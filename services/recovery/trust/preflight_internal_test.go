package trust

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/trust/absence"
	"github.com/gpuaas/mesh/services/recovery/trust/canary"
)

// moving is an authority that may be replaced by another, or be down.
type moving struct {
	mu   sync.Mutex
	is   ca.Signer
	down bool
}

func (m *moving) now() (ca.Signer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return nil, fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "it is down")
	}
	return m.is, nil
}

func (m *moving) become(is ca.Signer, down bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.is, m.down = is, down
}

func (m *moving) ProvisionerKey() crypto.Signer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.is.ProvisionerKey()
}

func (m *moving) Sign(ctx context.Context, req ca.SignRequest) (ca.Issued, error) {
	is, err := m.now()
	if err != nil {
		return ca.Issued{}, err
	}
	return is.Sign(ctx, req)
}

func (m *moving) Roots(ctx context.Context) ([]*x509.Certificate, error) {
	is, err := m.now()
	if err != nil {
		return nil, err
	}
	return is.Roots(ctx)
}

func (m *moving) Intermediates(ctx context.Context) ([]*x509.Certificate, error) {
	is, err := m.now()
	if err != nil {
		return nil, err
	}
	return is.Intermediates(ctx)
}

func (m *moving) SigningFingerprint(context.Context) (string, error) {
	return "", errors.New("not used")
}

func (m *moving) Close() error { return nil }

// kit is a database, an authority, and one replica of the ingress.
type kit struct {
	t         *testing.T
	db        *testkit.Database
	issuers   *issuers
	authority *moving
	trusts    *pki.Bundle // of the ingress
	address   string
	replica   string
	mu        sync.Mutex
	stops     []Stop
	absences  []absence.Stop
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{t: t, db: testkit.DB(t), issuers: newIssuers(t), replica: ids.New()}
	k.authority = &moving{is: k.issuers.nodes}
	k.trusts = bundleOf(t, k.issuers.nodes)
	k.address = k.issuers.ingress(t, k.trusts, refuses)
	testkit.Beat(k.db, k.replica, "", time.Hour, false)
	k.publish()
	return k
}

// publish writes what the ingress trusts, as its replica does.
func (k *kit) publish() {
	k.t.Helper()
	if _, err := k.db.OwnerPool().Exec(k.t.Context(),
		`UPDATE mesh.replica SET agent_address = $2, client_cas = $3 WHERE replica_id = $1`, k.replica, k.address,
		k.trusts.Fingerprints()); err != nil {
		k.t.Fatal(err)
	}
}

// swap has the ingress trust another authority.
func (k *kit) swap(to ca.Signer) {
	k.t.Helper()
	if err := k.trusts.Set(bundleOf(k.t, to).Roots()...); err != nil {
		k.t.Fatal(err)
	}
}

// preflight returns a replica of recovery that makes a check in each round.
func (k *kit) preflight() *Preflight {
	k.t.Helper()
	p, err := New(Deps{
		Logger: testkit.Logger(k.t), Pool: k.db.Pool(pg.RoleRecovery), Signer: k.authority, Services: k.issuers.roots,
		TrustDomain: domain, Replica: ids.New(), Address: func() string { return k.address },
		Stopped: func(_ context.Context, _ pgx.Tx, s Stop) error {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.stops = append(k.stops, s)
			return nil
		},
		Unanswered: func(_ context.Context, _ pgx.Tx, s absence.Stop) error {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.absences = append(k.absences, s)
			return nil
		},
	}, Config{Every: time.Nanosecond, Handshake: 1500 * time.Millisecond})
	if err != nil {
		k.t.Fatal(err)
	}
	return p
}

// round makes rounds, each of which must check.
func (k *kit) round(p *Preflight, count int) {
	k.t.Helper()
	for range count {
		if out, err := p.RunOnce(k.t.Context()); err != nil || !out.Checked {
			k.t.Fatalf("round: %+v, %v", out, err)
		}
	}
}

func (k *kit) row() preflightRow {
	k.t.Helper()
	row, err := readPreflight(k.t.Context(), k.db.Pool(pg.RoleRecovery))
	if err != nil {
		k.t.Fatal(err)
	}
	return row
}

// is checks the state and, of a mismatch, the side.
func (k *kit) is(when, state, side string) {
	k.t.Helper()
	row := k.row()
	if row.State != state || row.Side != side {
		k.t.Fatalf("%s: %s %s (%s), want %s %s", when, row.State, row.Side, row.Summary, state, side)
	}
	err := Refuse(k.t.Context(), k.db.Pool(pg.RoleRecovery))
	if stopped := state == stateMismatch; stopped != (err != nil) ||
		stopped && (fault.ActionOf(err) != commonv1.Action_ACTION_WAIT || fault.RetryAfterOf(err) <= 0) {
		k.t.Fatalf("%s: issuance is answered %v", when, err)
	}
}

func (k *kit) count(sql string) int {
	k.t.Helper()
	var n int
	if err := k.db.Pool(pg.RoleRecovery).QueryRow(k.t.Context(), sql).Scan(&n); err != nil {
		k.t.Fatal(err)
	}
	return n
}

const (
	changes = `SELECT count(*)::int FROM events.event WHERE kind = 'ca_preflight.changed'`
	open    = `SELECT count(*)::int FROM recovery.incident WHERE kind = 'issuer_untrusted' AND severity = 'p0'
		AND closed_at IS NULL`
)

// TestIngressSwapped: two refusals in a row begin the mismatch, two acceptances end it, and nothing between is written.
func TestIngressSwapped(t *testing.T) {
	k := newKit(t)
	p := k.preflight()
	k.round(p, 1)
	k.is("one check", "unknown", "")
	k.round(p, 3)
	k.is("trusted", "ok", "")
	k.swap(newAuthority(t))
	k.round(p, 1)
	k.is("refused once", "ok", "")
	k.round(p, 1)
	k.is("refused twice", "mismatch", "ingress")
	row := k.row()
	if !strings.HasPrefix(row.Summary, "ingress: ") || !strings.Contains(row.Summary, k.replica) ||
		!strings.Contains(row.NextAction, "repair the ingress") || !slices.Equal(row.RefusedBy, []string{k.address}) {
		t.Errorf("%+v", row)
	}
	if fault.ReasonOf(p.Health(t.Context())) == 0 {
		t.Error("the status shows nothing")
	}
	k.round(p, 3)
	if n := k.count(changes); n != 2 {
		t.Errorf("%d events, want that of ok and that of the mismatch", n)
	}
	if n := k.count(open); n != 1 {
		t.Errorf("%d incidents are open", n)
	}
	k.swap(k.issuers.nodes)
	k.round(p, 1)
	k.is("accepted once", "mismatch", "ingress")
	k.round(p, 1)
	k.is("accepted twice", "ok", "")
	if n := k.count(open); n != 0 || k.row().IncidentID != "" {
		t.Errorf("%d incidents are open", n)
	}
	if len(k.stops) != 2 || !k.stops[0].Until.IsZero() || !k.stops[1].From.Equal(k.stops[0].From) ||
		!k.stops[1].Until.After(k.stops[1].From) {
		t.Errorf("issuance was stopped %+v", k.stops)
	}
}

// TestAuthorityReplaced: the authority comes back with other signing material.
func TestAuthorityReplaced(t *testing.T) {
	k := newKit(t)
	p := k.preflight()
	k.round(p, 2)
	k.is("trusted", "ok", "")
	other := newAuthority(t)
	k.authority.become(other, false)
	k.round(p, 2)
	k.is("another issuer", "mismatch", "authority")
	if row := k.row(); !strings.HasPrefix(row.Summary, "authority: ") || row.Issuer == row.TrustedIssuer {
		t.Errorf("%+v", row)
	}
	k.swap(other)
	k.round(p, 2)
	k.is("the ingress trusts it", "ok", "")
	if row := k.row(); row.Issuer != row.TrustedIssuer {
		t.Errorf("%+v", row)
	}
}

// TestNeverAgreed: of a mesh that began with a mismatch no side is known to have changed.
func TestNeverAgreed(t *testing.T) {
	k := newKit(t)
	k.swap(newAuthority(t))
	k.round(k.preflight(), 2)
	k.is("from the start", "mismatch", "")
}

// TestNothingProven: an ingress that cannot be reached, and an authority that cannot be asked, begin and end nothing.
func TestNothingProven(t *testing.T) {
	k := newKit(t)
	p := k.preflight()
	k.round(p, 2)
	good := k.address
	for name, address := range map[string]string{
		"nothing listens": "127.0.0.1:1",
		"it closes":       k.issuers.ingress(t, k.trusts, closes),
		"it is slow":      listen(t, func(conn net.Conn) { keeps(conn) }),
	} {
		k.address = address
		k.publish()
		k.round(p, 1)
		k.is(name+", once", "ok", "")
		k.round(p, 2)
		k.is(name, "unknown", "")
		k.address = good
		k.publish()
		k.round(p, 2)
		k.is("back", "ok", "")
	}
	k.authority.become(nil, true)
	k.round(p, 3)
	k.is("the authority is down", "unknown", "")
	k.authority.become(k.issuers.nodes, false)
	k.round(p, 2)
	k.swap(newAuthority(t))
	k.round(p, 2)
	k.is("refused", "mismatch", "ingress")
	k.authority.become(nil, true)
	k.round(p, 3)
	k.is("refused, and then the authority is down", "mismatch", "ingress")
}

// TestTwoReplicas: one of two replicas checks, they make one state, and the other goes on soon after the first has
// ended without a word.
func TestTwoReplicas(t *testing.T) {
	k := newKit(t)
	first, second := k.preflight(), k.preflight()
	k.round(first, 2)
	k.round(second, 1) // one that starts takes the lease over
	if out, err := first.RunOnce(t.Context()); err != nil || out.Held || out.Checked {
		t.Fatalf("the first checks beside the second: %+v, %v", out, err)
	}
	k.swap(newAuthority(t))
	k.round(second, 1)
	testkit.SetClockOffset(k.db, 16*time.Second)
	k.round(first, 1)
	k.is("each has seen one refusal", "ok", "")
	if out, err := second.RunOnce(t.Context()); err != nil || out.Held {
		t.Fatalf("the second holds the lease beside the first: %+v, %v", out, err)
	}
	k.round(first, 1)
	k.is("two in a row by one holder", "mismatch", "ingress")
	if n := k.count(changes); n != 2 {
		t.Errorf("%d events", n)
	}
	// A restart in the middle: the stop goes on, and one good check of the new process does not end it.
	third := k.preflight()
	k.swap(k.issuers.nodes)
	k.round(third, 1)
	k.is("one good check after a restart", "mismatch", "ingress")
	k.round(third, 1)
	k.is("two", "ok", "")
}

// TestLostLease: a replica that was paused in the middle of a check, and has lost the lease, writes nothing.
func TestLostLease(t *testing.T) {
	k := newKit(t)
	first, second := k.preflight(), k.preflight()
	k.round(first, 2)
	k.swap(newAuthority(t))
	k.round(first, 1)
	k.round(second, 1)
	c := &check{authority: first.authority, targets: []*target{{address: k.address, outcome: canary.Refused}}}
	first.streaks.add(c)
	if changed, err := first.conclude(t.Context(), c); err != nil || changed {
		t.Errorf("it has written: %v", err)
	}
	k.is("after it", "ok", "")
}

// TestVerbs: what the authority signs with and what the ingress trusts is shown, and one check is made, which changes
// nothing.
func TestVerbs(t *testing.T) {
	k := newKit(t)
	p := k.preflight()
	k.round(p, 2)
	got, err := p.GetTrust(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	issuer := got.GetAuthority().GetIssuerFingerprint()
	if got.GetPreflight().GetState() != agree || issuer == "" || issuer != got.GetPreflight().GetIssuerFingerprint() ||
		len(got.GetIngress()) != 1 || !got.GetIngress()[0].GetIssuerTrusted() {
		t.Errorf("%v", got)
	}
	k.swap(newAuthority(t))
	k.publish()
	ran, err := p.RunPreflight(t.Context(), nil)
	if err != nil || ran.GetResult() != mismatch || ran.GetPreflight().GetState() != agree ||
		ran.GetIngress()[0].GetHandshake() != recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_REFUSED ||
		ran.GetIngress()[0].GetIssuerTrusted() {
		t.Errorf("%v, %v", ran, err)
	}
	k.is("after one check by a person", "ok", "")
}
