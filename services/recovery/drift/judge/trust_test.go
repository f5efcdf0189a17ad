package judge_test

import (
	"context"
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	beats "github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
)

// preflight writes the row of the preflight.
func (k *kit) preflight(state, summary, incident string) {
	k.t.Helper()
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.ca_preflight
		SET state = $1, summary = $2, incident_id = $3, since = mesh.clock(), version = version + 1`,
		state, summary, incident)
	k.must(err)
}

// publish has a replica of nodeapi publish the issuers that it trusts.
func (k *kit) publish(replica string, fingerprints ...string) {
	k.t.Helper()
	k.must(beats.WriteTrust(k.ctx, k.db.Pool(pg.RoleNodeAPI), replica, beats.Trust{ClientCAs: fingerprints}))
}

// issuer returns the item of the issuer of a node's certificate as it is now.
func (k *kit) issuer(n *machine) *recoveryv1.HealthItem {
	k.t.Helper()
	out, err := judge.NewServer(k.judge).GetNodeHealth(k.ctx, &recoveryv1.GetNodeHealthRequest{NodeId: n.id()})
	k.must(err)
	for _, item := range out.GetHealth().GetChecklist() {
		if item.GetCheck() == recoveryv1.HealthCheck_HEALTH_CHECK_ISSUER_TRUSTED {
			return item
		}
	}
	k.t.Fatalf("no item in %v", out)
	return nil
}

// TestTheItemOfTheIssuerIsWhatTheIngressTrusts checks that the item follows the preflight and what replicas publish,
// and says which of them is missing.
func TestTheItemOfTheIssuerIsWhatTheIngressTrusts(t *testing.T) {
	k := newKit(t)
	n := k.up()
	mine, other := pki.Fingerprint(k.root), strings.Repeat("ab", 32)
	want := func(present bool, detail string) {
		t.Helper()
		if item := k.issuer(n); item.GetPresent() != present || !strings.Contains(item.GetDetail(), detail) {
			t.Errorf("%v, want %t with %q", item, present, detail)
		}
	}
	want(true, "each replica of nodeapi publishes that it trusts "+mine)
	k.preflight("unknown", "", "")
	want(false, "not known: the preflight")
	k.preflight("mismatch", "ingress: replica r does not trust i", ids.New())
	want(false, "ingress: replica r does not trust i")
	k.preflight("ok", "", "")
	k.publish(k.replica, other)
	want(false, "chains to nothing that each replica")
	k.publish(k.replica, other, mine)
	second := ids.New()
	_, err := beats.Write(k.ctx, k.db.Pool(pg.RoleNodeAPI), beats.Beat{ReplicaID: second})
	k.must(err)
	want(true, mine) // a build that publishes nothing
	k.publish(second, other)
	want(false, "chains to nothing")
	_, err = k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.ca_preflight SET trusted_issuer = $1`, mine)
	k.must(err)
	want(true, "the preflight saw the ingress trust its issuer")
}

// TestAnIssuerIsTrustedByItsRoot checks that an issuer counts by the root to which a recorded certificate of it chains,
// by the roots that were read last.
func TestAnIssuerIsTrustedByItsRoot(t *testing.T) {
	k := newKit(t)
	n := k.up()
	root, key := newAuthority(t, nil, nil)
	signed, _ := newAuthority(t, root, key)
	k.root = root
	k.publish(k.replica, pki.Fingerprint(root))
	n.identity.IssuerFingerprint, n.identity.CurrentSerial = pki.Fingerprint(signed), "02"
	k.put(n.identity)
	k.issued(n.id(), "02", pki.Fingerprint(signed), time.Hour)
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.serial SET chain_pem = $2 WHERE serial = $1`, "02",
		pki.EncodeCertificates([]*x509.Certificate{signed}))
	k.must(err)
	if item := k.issuer(n); item.GetPresent() || !strings.Contains(item.GetDetail(), "chains to nothing") {
		t.Errorf("with the roots of another authority: %v", item)
	}
	k.judge.ReadRoots(k.ctx)
	if item := k.issuer(n); !item.GetPresent() || !strings.Contains(item.GetDetail(), pki.Fingerprint(root)) {
		t.Errorf("%v", item)
	}
}

// TestTheAuthorityHoldsUpNoRound checks that neither a round nor a reader asks the authority.
func TestTheAuthorityHoldsUpNoRound(t *testing.T) {
	k := newKit(t)
	n := k.up()
	roots := func(context.Context) ([]*x509.Certificate, error) {
		t.Error("the authority was asked")
		return nil, errors.New("it does not answer")
	}
	judge, err := judge.New(judge.Deps{
		Logger: testkit.Logger(t), Pool: k.db.Pool(pg.RoleRecovery), Policy: policy.Fixed{Set: k.policy}, Roots: roots,
	})
	k.must(err)
	k.judge = judge
	k.enter(n, heldState, "")
	k.round()
	k.wantReasons(n.id(), held)
	if item := k.issuer(n); !item.GetPresent() {
		t.Errorf("%v", item)
	}
}

// TestAPreflightThatComesBack checks that a node which was proven healthy is so again, without another probe, when the
// preflight is ok again after it was judged while that was unknown.
func TestAPreflightThatComesBack(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.recover(n)
	k.preflight("unknown", "", "")
	n.identity.CurrentSerial = "02"
	k.put(n.identity)
	k.back(n)
	k.listen(10 * time.Second)
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil {
		t.Fatalf("healthy: %v", v)
	}
	k.preflight("ok", "", "")
	k.listen(40 * time.Second)
	k.round()
	if v := k.last(n); v.GetHealthySince() == nil || k.lifecycle.queued() != 1 {
		t.Errorf("%d probes, verdict %v", k.lifecycle.queued(), v)
	}
}

// TestAnUntrustedIssuerIsAVerdict checks the verdict on the control plane while the ingress refuses the authority's
// certificates: it names the side that has changed, and follows when that changes. No node gets a verdict.
func TestAnUntrustedIssuerIsAVerdict(t *testing.T) {
	const untrusted = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS
	k := newKit(t)
	n := k.up()
	incident := ids.New()
	k.preflight("mismatch", "ingress: replica r does not trust i", incident)
	k.round()
	v := k.wantReasons(theFleet, untrusted)
	if v.GetSeverity() != commonv1.Severity_SEVERITY_P0 || v.GetOwner() != "control plane" ||
		!strings.HasPrefix(v.GetNextAction(), "repair the ingress") || v.GetCorrelationId() != incident ||
		len(v.GetEvidence()) != 1 || v.GetEvidence()[0].GetPart() != commonv1.DriftPart_DRIFT_PART_AUTHORITY {
		t.Errorf("%v", v)
	}
	if changed := k.round(); changed != 0 {
		t.Errorf("%d verdicts changed though nothing did", changed)
	}
	k.preflight("mismatch", "authority: it signs with another", incident)
	k.round()
	v = k.wantReasons(theFleet, untrusted, untrusted)
	if !strings.HasPrefix(v.GetNextAction(), "repair the authority") {
		t.Errorf("%v", v)
	}
	k.preflight("unknown", "", "")
	k.round()
	k.wantReasons(theFleet, untrusted, untrusted, unspecified)
	k.wantReasons(n.id())
	k.pass(time.Second)
	k.beat()
	k.preflight("mismatch", "ingress: replica r does not trust i", incident)
	k.round()
	k.wantReasons(theFleet, untrusted, untrusted, unspecified, untrusted)
}

// TestAMismatchThatLastsLocksNothing checks that a round while the verdict on the control plane stays does not wait for
// a transaction that has locked it.
func TestAMismatchThatLastsLocksNothing(t *testing.T) {
	k := newKit(t)
	k.preflight("mismatch", "ingress: replica r does not trust i", ids.New())
	k.round()
	k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT FROM recovery.verdict WHERE node_id = $1 FOR UPDATE`, theFleet)
		if err != nil {
			return err
		}
		round, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err = k.judge.RunOnce(round)
		return err
	}))
}

// TestTwoBuildsDoNotTakeTurns checks that a mismatch which a replica of the build before ends in each of its rounds,
// for it does not know the preflight, is a verdict again after a while and not at once.
func TestTwoBuildsDoNotTakeTurns(t *testing.T) {
	const untrusted = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS
	k := newKit(t)
	incident := ids.New()
	k.preflight("mismatch", "ingress: replica r does not trust i", incident)
	k.round()
	k.pass(time.Second)
	k.beat()
	since := `UPDATE recovery.ca_preflight SET state = $1, since = $2`
	var began time.Time
	k.must(k.db.OwnerPool().QueryRow(k.ctx, `SELECT since FROM recovery.ca_preflight`).Scan(&began))
	_, err := k.db.OwnerPool().Exec(k.ctx, since, "unknown", nil) // what the build before sees
	k.must(err)
	k.round()
	_, err = k.db.OwnerPool().Exec(k.ctx, since, "mismatch", began)
	k.must(err)
	for range 6 {
		k.round()
		k.wantReasons(theFleet, untrusted, unspecified)
		k.listen(5*time.Second - time.Millisecond)
	}
	k.pass(time.Second)
	k.beat()
	k.round()
	k.wantReasons(theFleet, untrusted, unspecified, untrusted)
}
