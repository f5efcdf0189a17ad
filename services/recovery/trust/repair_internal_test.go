package trust

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/trust/signing"
)

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
	if err := do(root, true); err != nil {
		t.Errorf("what the repair added: %v", err)
	}
	if err := do(root, true); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Errorf("a root of the file that the authority signs under: %v", err)
	}
	if err := do(pki.Fingerprint(r.file[0]), true); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		t.Errorf("a root that is not sent: %v", err)
	}
	if n := r.count(`SELECT count(*)::int FROM events.event WHERE kind = 'audit.recorded'`); n < 1 {
		t.Errorf("%d audit entries", n)
	}
}

// TestRepairOfAnAuthorityWithoutItsIssuer: recovery comes back with a directory that lacks the issuer of the last
// rotation. It repairs nothing and brings no former issuer back, until the directory is restored, or a person gives the
// lost issuer up while no other replica runs.
func TestRepairOfAnAuthorityWithoutItsIssuer(t *testing.T) {
	r := newRotating(t)
	p := r.start()
	if _, err := r.ask(p, &recoveryv1.RotateAuthorityRequest{}); err != nil {
		t.Fatal(err)
	}
	r.enter(p, phaseBoth)
	lost, kept := r.last().Next, r.dir
	r.dir = t.TempDir()
	p = r.start()
	made, err := p.deps.Rotating.Find("")
	if err != nil {
		t.Fatal(err)
	}
	first := pki.Fingerprint(made.Root)
	answer, err := p.GetTrust(t.Context(), &recoveryv1.GetTrustRequest{})
	if problem := answer.GetAuthority().GetProblem(); err != nil || !strings.Contains(problem, lost) ||
		!strings.Contains(problem, p.deps.Replica) || !strings.Contains(problem, "restore") {
		t.Errorf("shown: %v, %v", answer.GetAuthority(), err)
	}
	do := func(p *Preflight, fingerprint string, withdraw bool) error {
		_, err := p.RepairTrust(t.Context(), &recoveryv1.RepairTrustRequest{
			RootFingerprint: fingerprint, Reason: "lost", Withdraw: withdraw,
		})
		return err
	}
	signs := func() string {
		t.Helper()
		is, err := signing.Read(t.Context(), r.db.Pool(pg.RoleRecovery))
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	refused := func(when string) {
		t.Helper()
		f, ok := fault.As(do(p, first, false))
		if !ok || f.Reason != commonv1.Reason_REASON_PRECONDITION_FAILED || !strings.Contains(f.Public, lost) ||
			!strings.Contains(f.Public, p.deps.Replica) || !strings.Contains(f.Remedy, "restore") {
			t.Errorf("%s: %v", when, f)
		}
		if signs() != lost {
			t.Errorf("%s: another issuer signs", when)
		}
	}
	refused("while certificates of both issuers count")
	if err := do(p, lost, true); !fault.Has(err, commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY) {
		t.Errorf("given up while certificates of both issuers count: %v", err)
	}
	r.longAgo()
	r.enter(p, phaseDone)
	refused("after the rotation")
	if _, err := r.db.OwnerPool().Exec(t.Context(), `INSERT INTO mesh.key_replica
		(service, replica_id, takes, holds, problems, seen_at)
		VALUES ('recovery', $1, '{}', '{}', '{}', mesh.clock())`, ids.New()); err != nil {
		t.Fatal(err)
	}
	if err := do(p, lost, true); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) || signs() != lost {
		t.Errorf("given up while another replica runs: %v", err)
	}
	if _, err := r.db.OwnerPool().Exec(t.Context(), `DELETE FROM mesh.key_replica`); err != nil {
		t.Fatal(err)
	}
	empty := r.dir
	r.dir = kept
	restored := r.start()
	if err := do(restored, lost, true); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) || signs() != lost {
		t.Errorf("given up by a replica that has it: %v", err)
	}
	if err := do(restored, pki.Fingerprint(bundleOf(t, r.signer).Roots()[0]), false); err != nil {
		t.Errorf("with the directory restored: %v", err)
	}
	r.dir = empty
	p = r.start()
	if err := do(p, lost, true); err != nil || signs() != "" {
		t.Fatalf("given up: %v", err)
	}
	if err := do(p, first, false); err != nil {
		t.Fatal(err)
	}
	r.sent()
	if _, chain := r.node(); r.accepts(chain) != nil {
		t.Errorf("after the repair: %v", r.accepts(chain))
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
