package enrol_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/instance"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// authority wraps the real authority, counts its signings, and may fail after a signing.
type authority struct {
	ca.Signer

	signed atomic.Int64
	mu     sync.Mutex
	after  func(ca.Issued) error // called between the signing and its answer
}

func (a *authority) Sign(ctx context.Context, req ca.SignRequest) (ca.Issued, error) {
	out, err := a.Signer.Sign(ctx, req)
	if err != nil {
		return out, err
	}
	a.signed.Add(1)
	a.mu.Lock()
	after := a.after
	a.mu.Unlock()
	if after != nil {
		if err := after(out); err != nil {
			return ca.Issued{}, err
		}
	}
	return out, nil
}

func (a *authority) afterSigning(fn func(ca.Issued) error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.after = fn
}

type kit struct {
	t         *testing.T
	ctx       context.Context
	db        *testkit.Database
	pool      *pgxpool.Pool
	ca        *authority
	enroller  *enrol.Enroller
	instances *instance.Instances
	keys      *joinstate.Keys
	policy    *policyOf
}

// policyOf is a policy that a test changes.
type policyOf struct{ set atomic.Pointer[policy.Set] }

// Current returns the policy that was set last.
func (p *policyOf) Current() policy.Set {
	if set := p.set.Load(); set != nil {
		return *set
	}
	return policy.Defaults()
}

// setPolicy changes the policy.
func (k *kit) setPolicy(values map[string]string) {
	k.t.Helper()
	set, err := policy.NewSet(values)
	if err != nil {
		k.t.Fatal(err)
	}
	k.policy.set.Store(&set)
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	embedded, err := ca.Open(ca.Config{Dir: t.TempDir(), TrustDomain: "mesh.test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = embedded.Close() })
	k := &kit{t: t, ctx: testkit.Context(t), db: testkit.DB(t), ca: &authority{Signer: embedded}}
	k.pool = k.db.Pool(pg.RoleRecovery)
	if k.keys, err = joinstate.LoadOrCreateKeys(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	k.policy = &policyOf{}
	k.enroller = k.replica()
	k.instances, err = instance.New(instance.Deps{Logger: testkit.Logger(t), Pool: k.pool}, instance.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// replica returns another replica's Enroller over the same database and authority.
func (k *kit) replica() *enrol.Enroller {
	k.t.Helper()
	e, err := enrol.New(enrol.Deps{
		Logger: testkit.Logger(k.t), Pool: k.pool, Signer: k.ca, Policy: k.policy, Profiles: twoProfiles{},
		TaskKeys: func() (string, error) { return "k:AAAA", nil }, JoinStates: k.keys,
	}, enrol.Config{
		TrustDomain: "mesh.test", PerToken: 10000, PerTokenBurst: 10000, PerSecond: 10000, Burst: 10000,
		PerAddress: 10000, PerAddressBurst: 10000,
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return e
}

// csr returns a certificate request for a new key.
func (k *kit) csr() []byte {
	k.t.Helper()
	_, csr := k.key()
	return csr
}

func (k *kit) key() (crypto.Signer, []byte) {
	k.t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		k.t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		k.t.Fatal(err)
	}
	return key, csr
}

func (k *kit) bootstrap(name string) enrol.Bundle {
	k.t.Helper()
	b, err := k.enroller.IssueBootstrap(k.ctx, name, "", 0, "", "ada")
	if err != nil {
		k.t.Fatal(err)
	}
	return b
}

func (k *kit) enroll(token string, csr []byte) (*recoveryv1.EnrollResponse, error) {
	k.t.Helper()
	return k.enroller.Enroll(k.ctx, "192.0.2.1", &recoveryv1.EnrollRequest{Token: token, Csr: csr})
}

func (k *kit) mustEnroll(token string, csr []byte) *recoveryv1.EnrollResponse {
	k.t.Helper()
	resp, err := k.enroll(token, csr)
	if err != nil {
		k.t.Fatal(err)
	}
	return resp
}

func (k *kit) refused(err error, want commonv1.Reason) {
	k.t.Helper()
	if got := fault.ReasonOf(err); got != want {
		k.t.Fatalf("got %v (%v), want %v", got, err, want)
	}
}

func (k *kit) record(nodeID string) *identity.Record {
	k.t.Helper()
	var r *identity.Record
	err := pg.InTx(k.ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		r, err = identity.LockOne(ctx, tx, nodeID)
		return err
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return r
}

func (k *kit) serialOf(resp *recoveryv1.EnrollResponse) string {
	k.t.Helper()
	return pki.SerialString(k.leaf(resp.GetCertificateChainPem()).SerialNumber)
}

func (k *kit) leaf(chainPEM []byte) *x509.Certificate {
	k.t.Helper()
	certs, err := pki.DecodeCertificates(chainPEM)
	if err != nil {
		k.t.Fatal(err)
	}
	return certs[0]
}

func (k *kit) count(sql string, args ...any) int {
	k.t.Helper()
	var n int
	if err := k.pool.QueryRow(k.ctx, sql, args...).Scan(&n); err != nil {
		k.t.Fatal(err)
	}
	return n
}

func (k *kit) exec(sql string, args ...any) {
	k.t.Helper()
	if _, err := k.pool.Exec(k.ctx, sql, args...); err != nil {
		k.t.Fatal(err)
	}
}

// launched is a prepared instance with its launch secret.
type launched struct{ instance, workspace, node, secret string }

func newSecret(instance string) (string, []byte) {
	raw := make([]byte, 32)
	_, _ = rand.Read(raw)
	text := "gls_" + strings.ReplaceAll(instance, "-", "") + "_" + base64.RawURLEncoding.EncodeToString(raw)
	sum := sha256.Sum256([]byte(text))
	return text, sum[:]
}

func (k *kit) prepare(workspace string, epoch int64) launched {
	k.t.Helper()
	b := launched{instance: ids.New(), workspace: workspace}
	var hash []byte
	b.secret, hash = newSecret(b.instance)
	var err error
	b.node, err = k.instances.Prepare(k.ctx, &recoveryv1.PrepareInstanceRequest{
		WorkspaceId: workspace, TenantId: ids.New(), Epoch: epoch, InstanceId: b.instance, SecretSha256: hash,
		NodeName: "box",
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return b
}

// snapshot returns, as text, all rows that an attempt without a proof must not change.
func (k *kit) snapshot() string {
	k.t.Helper()
	var out string
	err := k.pool.QueryRow(k.ctx, `SELECT
		(SELECT COALESCE(jsonb_agg(to_jsonb(t) ORDER BY t.token_id), '[]')::text FROM recovery.token t) ||
		(SELECT COALESCE(jsonb_agg(to_jsonb(i) ORDER BY i.node_id), '[]')::text FROM recovery.identity i) ||
		(SELECT count(*)::text FROM recovery.enrollment) || (SELECT count(*)::text FROM events.event)`).Scan(&out)
	if err != nil {
		k.t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(out))
	return hex.EncodeToString(sum[:])
}

// twoProfiles has the profiles default and other.
type twoProfiles struct{}

// Name returns default for an empty name.
func (twoProfiles) Name(name string) string { return cmp.Or(name, "default") }

// Active returns a profile with the name alone.
func (o twoProfiles) Active(_ context.Context, name string) (*commonv1.Profile, error) {
	if name = o.Name(name); name != "default" && name != "other" {
		return nil, fault.New(commonv1.Reason_REASON_PROFILE_UNKNOWN, "")
	}
	return &commonv1.Profile{Name: name}, nil
}
