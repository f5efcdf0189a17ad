package trust

import (
	"bytes"
	"context"
	"crypto/x509"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
	"github.com/gpuaas/mesh/services/recovery/trust/signing"
)

// rotating is a mesh whose authority follows the database.
type rotating struct {
	*kit

	dir    string
	signer *signing.Following
	file   []*x509.Certificate // of the ingress
}

func newRotating(t *testing.T) *rotating {
	t.Helper()
	k := newKit(t)
	r := &rotating{kit: k, dir: t.TempDir()}
	r.start()
	r.trusts = bundleOf(t, r.signer)
	r.file = r.trusts.Roots()
	r.address = r.issuers.ingress(t, r.trusts, refuses)
	r.publish()
	return r
}

// start makes a replica of recovery anew.
func (r *rotating) start() *Preflight {
	r.t.Helper()
	authority, err := ca.Open(ca.Config{Dir: r.dir, TrustDomain: domain, Follows: true})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = authority.Close() })
	r.signer = signing.Follow(r.db.Pool(pg.RoleRecovery), nil, authority)
	p, err := New(Deps{
		Logger: testkit.Logger(r.t), Pool: r.db.Pool(pg.RoleRecovery), Signer: r.signer, Rotating: authority,
		Services: r.issuers.roots, TrustDomain: domain, Replica: ids.New(),
		Address: func() string { return r.address },
	}, Config{Every: time.Nanosecond, Handshake: 1500 * time.Millisecond})
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// sent has the ingress trust what replicas of nodeapi are sent.
func (r *rotating) sent() {
	r.t.Helper()
	list, err := roots.Certificates(r.t.Context(), r.db.Pool(pg.RoleRecovery))
	if err != nil {
		r.t.Fatal(err)
	}
	certs, err := pki.ParseChain(append([][]byte{r.file[0].Raw}, list...))
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.trusts.Set(certs...); err != nil {
		r.t.Fatal(err)
	}
	r.publish()
}

func (r *rotating) ask(p *Preflight, req *recoveryv1.RotateAuthorityRequest) (*recoveryv1.AuthorityRotation, error) {
	if req.GetIdempotencyKey() == "" {
		req.IdempotencyKey = ids.New()
	}
	req.Reason = "test"
	answer, err := p.RotateAuthority(r.t.Context(), req)
	return answer.GetRotation(), err
}

// enter rotates until the rotation is in a phase.
func (r *rotating) enter(p *Preflight, phase string) {
	r.t.Helper()
	for range 6 {
		if _, err := p.Rotate(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		if r.last().Phase == phase {
			return
		}
	}
	r.t.Fatalf("the rotation is %+v, want %s", r.last(), phase)
}

// longAgo has the phase of the rotation begun more than the overlap ago.
func (r *rotating) longAgo() {
	r.t.Helper()
	if _, err := r.db.OwnerPool().Exec(r.t.Context(), `UPDATE recovery.authority_rotation
		SET since = since - make_interval(secs => $1), version = version + 1 WHERE phase = 'both_valid'`,
		2*defaults.Overlap.Seconds()); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rotating) last() rotationRow {
	r.t.Helper()
	row, err := pg.One[rotationRow](r.t.Context(), r.db.Pool(pg.RoleRecovery), readLastRotation)
	if err != nil {
		r.t.Fatal(err)
	}
	return row
}

// node makes a node with a certificate of the issuer that signs, and returns its id and the chain.
func (r *rotating) node() (string, [][]byte) {
	r.t.Helper()
	record := &identity.Record{NodeID: ids.New(), Name: ids.New(), StateBy: "test"}
	key, err := pki.NewKey()
	if err != nil {
		r.t.Fatal(err)
	}
	csr, err := pki.NewCSR(key, pki.NodeID(domain, record.NodeID))
	if err != nil {
		r.t.Fatal(err)
	}
	issued, err := r.signer.Sign(r.t.Context(), ca.SignRequest{CSR: csr, NodeID: record.NodeID, TTL: time.Hour})
	if err != nil {
		r.t.Fatal(err)
	}
	err = pg.InTx(r.t.Context(), r.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		if _, err := identity.Insert(ctx, tx, record); err != nil {
			return err
		}
		record.InstanceID = ids.New()
		if err := identity.Offer(ctx, tx, record, identity.Serial{
			Serial: issued.Serial, KeySHA256: bytes.Repeat([]byte{byte(len(issued.Serial))}, 32), ChainPEM: []byte("x"),
			IssuerFingerprint: pki.FingerprintDER(issued.Chain[1]), NotBefore: issued.NotBefore, NotAfter: issued.NotAfter,
		}); err != nil {
			return err
		}
		_, err := identity.Save(ctx, tx, record)
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return record.NodeID, issued.Chain
}

// accepts reports whether the ingress accepts a certificate by the roots that it trusts.
func (r *rotating) accepts(chain [][]byte) error {
	_, err := pki.VerifyClientChain(chain, pki.Trust{Kind: pki.KindNode, Bundle: r.trusts}, domain, time.Now())
	return err
}
