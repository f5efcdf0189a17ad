package trust

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// rotating is a mesh whose authority follows the database.
type rotating struct {
	*kit

	dir    string
	signer *Following
	file   []*x509.Certificate // of the ingress
}

func newRotating(t *testing.T) *rotating {
	t.Helper()
	k := newKit(t)
	r := &rotating{kit: k, dir: t.TempDir()}
	r.start()
	r.trusts = bundleOf(t, r.signer)
	r.file = r.trusts.Roots()
	r.address = r.issuers.ingress(t, r.trusts, speaks)
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
	r.signer = Follow(r.db.Pool(pg.RoleRecovery), authority)
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
	list, err := Certificates(r.t.Context(), r.db.Pool(pg.RoleRecovery))
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
		2*overlap.Seconds()); err != nil {
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

// TestRotation: the next issuer signs once the ingress trusts it, and the rotation is done once no certificate of the
// former one counts. Until the ingress has the next root the former issuer goes on signing.
func TestRotation(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	r.round(p, 2)
	asked, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true, IdempotencyKey: "one"})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true, IdempotencyKey: "one"}); err != nil ||
		again.GetRotationId() != asked.GetRotationId() {
		t.Errorf("the same key again: %v, %v", again, err)
	}
	for range 3 {
		if _, err := p.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if row := r.last(); row.Phase != phaseAnnounced || !strings.Contains(row.WaitsFor, r.replica) {
		t.Fatalf("while a replica lacks the next issuer: %+v", row)
	}
	version := r.last().Version
	if changed, err := p.Rotate(t.Context()); err != nil || changed || r.last().Version != version {
		t.Errorf("the same wait was written again: %t, %v", changed, err)
	}
	node, former := r.node()
	if pki.FingerprintDER(former[1]) != asked.GetFormerFingerprint() {
		t.Fatal("the next issuer signs before the ingress trusts it")
	}
	r.round(p, 1)
	r.is("announced", "ok", "")
	r.sent()
	r.enter(p, phaseBoth)
	_, next := r.node()
	if row := r.last(); pki.FingerprintDER(next[1]) != row.Next || row.Next == row.Former || row.NextRoot == row.FormerRoot {
		t.Fatalf("the issuer that signs is not the next one of %+v", row)
	}
	if err := errors.Join(r.accepts(former), r.accepts(next)); err != nil {
		t.Fatalf("the ingress: %v", err)
	}
	// A replica of nodeapi that was away has its file alone.
	if err := r.trusts.Set(r.file...); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.accepts(former), r.accepts(next)); err != nil {
		t.Errorf("an ingress that was away: %v", err)
	}
	r.sent()
	r.round(p, 2)
	r.is("the next issuer signs", "ok", "")
	r.longAgo()
	if changed, err := p.Rotate(t.Context()); err != nil || changed {
		t.Errorf("retired while a certificate counts: %t, %v", changed, err)
	}
	answer, err := p.GetTrust(t.Context(), &recoveryv1.GetTrustRequest{})
	if err != nil || !strings.Contains(answer.GetRotation().GetWaitsFor(), "ends at") || len(answer.GetIssuers()) != 1 {
		t.Errorf("shown: %v, %v", answer, err)
	}
	_, err = r.ask(p, &recoveryv1.RotateAuthorityRequest{})
	if !fault.Has(err, commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY) {
		t.Errorf("another rotation meanwhile: %v", err)
	}
	if _, err = r.ask(p, &recoveryv1.RotateAuthorityRequest{Cancel: true}); !fault.Has(err,
		commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY) {
		t.Errorf("cancelled while both are valid: %v", err)
	}
	if _, err := r.db.OwnerPool().Exec(t.Context(), `UPDATE recovery.serial SET state = 'superseded' WHERE node_id = $1`,
		node); err != nil {
		t.Fatal(err)
	}
	r.enter(p, phaseDone)
	// The next rotation retires the root that the ingress was sent.
	second := r.last()
	if _, err = r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.sent()
	r.enter(p, phaseBoth)
	r.longAgo()
	if _, err := r.db.OwnerPool().Exec(t.Context(), `UPDATE recovery.serial SET not_after = mesh.clock()`); err != nil {
		t.Fatal(err)
	}
	r.enter(p, phaseDone)
	list, err := Certificates(t.Context(), r.db.Pool(pg.RoleRecovery))
	if err != nil || len(list) != 1 || pki.FingerprintDER(list[0]) == second.NextRoot {
		t.Errorf("the ingress is sent %d roots: %v", len(list), err)
	}
}

// TestTwoRotationsAtOnce: of requests with keys of their own one begins a rotation.
func TestTwoRotationsAtOnce(t *testing.T) {
	r := newRotating(t)
	first, second := r.start(), r.start()
	var all sync.WaitGroup
	var mu sync.Mutex
	var begun, refused int
	for i := range 16 {
		p := first
		if i%2 == 1 {
			p = second
		}
		all.Go(func() {
			_, err := p.RotateAuthority(t.Context(),
				&recoveryv1.RotateAuthorityRequest{Reason: "test", IdempotencyKey: fmt.Sprintf("key-%d", i)})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				begun++
			case fault.Has(err, commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY):
				refused++
			default:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if begun != 1 || refused != 15 {
		t.Errorf("%d rotations began, %d were refused", begun, refused)
	}
	// Both replicas carry it out at once.
	for range 8 {
		var group sync.WaitGroup
		for _, p := range []*Preflight{first, second} {
			group.Go(func() {
				if _, err := p.Rotate(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
	}
	if row := r.last(); row.Phase != phaseBoth {
		t.Errorf("carried out by two: %+v", row)
	}
}

// TestCancelledRotation: a rotation that is announced is given up, and the ingress is not sent its root any more.
func TestCancelledRotation(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{Cancel: true}); !fault.Has(err,
		commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Errorf("nothing to cancel: %v", err)
	}
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true, DryRun: true}); err != nil ||
		r.count(`SELECT count(*)::int FROM recovery.authority_rotation`) != 0 {
		t.Errorf("a dry run: %v", err)
	}
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	got, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{Cancel: true})
	if err != nil || got.GetPhase() != recoveryv1.RotationPhase_ROTATION_PHASE_CANCELLED ||
		r.count(`SELECT count(*)::int FROM recovery.trusted_issuer`) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := r.db.Pool(pg.RoleRecovery).Exec(t.Context(), `UPDATE recovery.authority_rotation
		SET phase = 'announced', version = version + 1`); err == nil {
		t.Error("the database takes a rotation back to a former phase")
	}
}

// TestForcedRetirement: certificates of the former issuer are revoked in batches, and the rotation ends.
func TestForcedRetirement(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	old, _ := r.node()
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{}); err != nil {
		t.Fatal(err)
	}
	r.enter(p, phaseBoth)
	fresh, _ := r.node()
	force := func(fingerprint string) error {
		_, err := p.RepairTrust(t.Context(), &recoveryv1.RepairTrustRequest{
			RootFingerprint: fingerprint, Reason: "its key is known", Withdraw: true,
		})
		return err
	}
	if err := force(r.last().FormerRoot); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Errorf("the root of both issuers was withdrawn: %v", err)
	}
	if err := force(r.last().Former); err != nil {
		t.Fatal(err)
	}
	r.longAgo()
	r.enter(p, phaseDone)
	serials := func(node string) string {
		var is string
		if err := r.db.Pool(pg.RoleRecovery).QueryRow(t.Context(), `SELECT i.next_serial || ' ' || s.state
			FROM recovery.identity i JOIN recovery.serial s USING (node_id) WHERE i.node_id = $1`, node).Scan(&is); err != nil {
			t.Fatal(err)
		}
		return is
	}
	if got := serials(old); got != " revoked" {
		t.Errorf("the node of the former issuer: %q", got)
	}
	if got := serials(fresh); !strings.HasSuffix(got, " next") || got == " next" {
		t.Errorf("the node of the next issuer: %q", got)
	}
}

// TestRepair: the ingress is sent the root that the authority signs under, and no other one.
func TestRepair(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	r.round(p, 2)
	r.is("agreed", "ok", "")
	r.file = bundleOf(t, newAuthority(t)).Roots()
	r.sent()
	r.round(p, 2)
	r.is("the ingress has other issuers", "mismatch", "ingress")
	if row := r.row(); !strings.Contains(row.NextAction, "gpuaas ca repair") {
		t.Errorf("next action: %s", row.NextAction)
	}
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{}); fault.ActionOf(err) != commonv1.Action_ACTION_WAIT {
		t.Errorf("a rotation while they differ: %v", err)
	}
	do := func(fingerprint string, withdraw bool) error {
		_, err := p.RepairTrust(t.Context(), &recoveryv1.RepairTrustRequest{
			RootFingerprint: fingerprint, Reason: "swapped", Withdraw: withdraw,
		})
		return err
	}
	if err := do(pki.Fingerprint(r.file[0]), false); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Errorf("a root of another authority: %v", err)
	}
	root := pki.Fingerprint(bundleOf(t, r.signer).Roots()[0])
	if err := do(root, false); err != nil {
		t.Fatal(err)
	}
	r.sent()
	r.round(p, 2)
	r.is("repaired", "ok", "")
	if err := do(root, true); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Errorf("the root that the authority signs under was withdrawn: %v", err)
	}
	if err := do(pki.Fingerprint(r.file[0]), true); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		t.Errorf("a root that is not sent: %v", err)
	}
	if n := r.count(`SELECT count(*)::int FROM events.event WHERE kind = 'audit.recorded'`); n < 1 {
		t.Errorf("%d audit entries", n)
	}
}

// rotationEnv is set in the process in which one point of a rotation fails.
const rotationEnv = "GPUAAS_TEST_ROTATION"

// TestARotationThatIsCutAtEachPoint runs TestCutRotation in a process for each point.
func TestARotationThatIsCutAtEachPoint(t *testing.T) {
	testkit.IO(t)
	for _, point := range []string{
		"recovery.rotation.after_prepare", "recovery.rotation.after_announce", "recovery.rotation.before_sign",
		"recovery.rotation.after_sign", "recovery.rotation.after_revoke", "recovery.rotation.after_retire",
	} {
		t.Run(point, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCutRotation$", "-test.v")
			cmd.Env = append(os.Environ(), rotationEnv+"="+point, "GPUAAS_FAILPOINTS="+point+"=error")
			out, err := cmd.CombinedOutput()
			if err != nil || !bytes.Contains(out, []byte("cut at "+point)) {
				t.Fatalf("%v\n%s", err, out)
			}
		})
	}
}

// TestCutRotation is the process of one point, and does nothing in any other. A replica that starts anew continues.
func TestCutRotation(t *testing.T) {
	point := os.Getenv(rotationEnv)
	if point == "" {
		return
	}
	r := newRotating(t)
	p := r.start()
	r.node()
	asked, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{WithRoot: true})
	if err != nil {
		t.Fatal(err)
	}
	var issuers []string
	for range 24 {
		_, err := p.Rotate(t.Context())
		switch {
		case errors.Is(err, failpoint.ErrInjected):
			t.Log("cut at " + point)
			p = r.start()
		case err != nil:
			t.Fatal(err)
		}
		r.sent()
		if row := r.last(); row.Next != "" && !slices.Contains(issuers, row.Next) {
			issuers = append(issuers, row.Next)
		}
		if row := r.last(); row.Phase == phaseBoth && !row.Forced {
			if _, err := p.RepairTrust(t.Context(), &recoveryv1.RepairTrustRequest{
				RootFingerprint: row.FormerRoot, Reason: "test", Withdraw: true,
			}); err != nil {
				t.Fatal(err)
			}
			r.longAgo()
		}
		if _, err := r.signer.Intermediates(t.Context()); err != nil {
			t.Fatalf("issuance stops: %v", err)
		}
	}
	row := r.last()
	if row.ID != asked.GetRotationId() || row.Phase != phaseDone || len(issuers) != 1 {
		t.Fatalf("the rotation is %+v; issuers %v", row, issuers)
	}
	if signing, err := r.signer.SigningFingerprint(t.Context()); err != nil || signing != row.Next {
		t.Errorf("it signs with %s: %v", signing, err)
	}
}
