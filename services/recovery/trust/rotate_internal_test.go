package trust

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
)

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
	if row := r.last(); pki.FingerprintDER(next[1]) != row.Next || row.Next == row.Former ||
		row.NextRoot == row.FormerRoot {
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
	list, err := roots.Certificates(t.Context(), r.db.Pool(pg.RoleRecovery))
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
	// A replica of recovery without the file keeps the next issuer from signing, and not the former one.
	elsewhere := ids.New()
	if _, err := r.db.OwnerPool().Exec(t.Context(), `INSERT INTO mesh.key_replica
		(service, replica_id, takes, holds, problems, seen_at)
		VALUES ('recovery', $1, '{}', '{}', '{}', mesh.clock())`, elsewhere); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if _, err := first.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if row := r.last(); row.Phase != phaseAnnounced || !strings.Contains(row.WaitsFor, elsewhere) {
		t.Errorf("while a replica of recovery lacks the issuer: %+v", row)
	}
	shown := func() string {
		t.Helper()
		answer, err := first.GetTrust(t.Context(), &recoveryv1.GetTrustRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetRotation().GetWaitsFor()
	}
	if text := shown(); !strings.HasSuffix(text, elsewhere) {
		t.Errorf("shown while the replica is there: %s", text)
	}
	r.node()
	if _, err := r.db.OwnerPool().Exec(t.Context(), `DELETE FROM mesh.key_replica`); err != nil {
		t.Fatal(err)
	}
	if text := shown(); !strings.Contains(text, elsewhere+" (gone") {
		t.Errorf("shown after the replica went: %s", text)
	}
	if err := second.NoteIssuer(t.Context()); err != nil ||
		r.count(`SELECT count(*)::int FROM recovery.authority_holder`) != 2 {
		t.Errorf("the second replica is not noted: %v", err)
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
