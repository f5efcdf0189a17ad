package certificates

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/mesh/cluster"
)

const trustMutation = "the replicas of recovery are started anew with a preflight_confirm of an hour: the check that " +
	"finds the mismatch waits for so long before the one that confirms it; the trust is changed as before"

// unconfirmed has the check that confirms a mismatch made after an hour.
var unconfirmed = act.Restarted(act.Recovery, "GPUAAS_RECOVERY_PREFLIGHT_CONFIRM=1h")

// AuthorityReplaced is row 5: the authority of nodes comes back with other signing material.
func AuthorityReplaced() kit.Drill {
	return kit.Drill{
		Name: "ca-restart-drift",
		Injects: "the replicas of recovery, which hold the authority of nodes, are started again with the key material of " +
			"a new authority, of which the ingress knows nothing; the agent of a machine ends",
		Sees: "`cert_untrusted_by_ingress` with the authority as the failing side, one incident; an enrolment is " +
			"refused with wait; the other machines stay connected, and the workload serves",
		Recovers: "once `ca repair` has the ingress trust the new root beside the old one: by itself, and the agent comes " +
			"back with the certificate that it had",
		Needs: "its own mesh: it changes the files of its authority",
		Expect: kit.Verdict{
			Reason: "cert_untrusted_by_ingress", UserState: "operator_action_required", Owner: "control plane",
			Next: "repair the authority",
		},
		Mutation: trustMutation,
		FailsAt:  stage.Detected,
		Mutate:   unconfirmed,
		Run: func(ctx context.Context, r *kit.Run) error {
			return (&trustRun{Run: r, side: recoveryv1.TrustSide_TRUST_SIDE_AUTHORITY}).run(ctx)
		},
	}
}

// IngressSwapped is row 6: the file of the issuers that the ingress trusts is replaced.
func IngressSwapped() kit.Drill {
	return kit.Drill{
		Name: "ingress-trust-drift", Slow: true, // the detector and its mutation are those of ca-restart-drift
		Injects: "the file of the issuers of nodes that the replicas of nodeapi trust is replaced by that of another " +
			"authority while they run; the agent of a machine ends",
		Sees: "`cert_untrusted_by_ingress` with the ingress as the failing side, one incident; an enrolment is refused " +
			"with wait; the other machines stay connected, and the workload serves",
		Recovers: "once `ca repair` has the ingress trust the root of the authority again, beside the wrong file: by " +
			"itself, and the agent comes back with the certificate that it had",
		Needs: "its own mesh: it changes a file of the ingress",
		Expect: kit.Verdict{
			Reason: "cert_untrusted_by_ingress", UserState: "operator_action_required", Owner: "control plane",
			Next: "repair the ingress",
		},
		Mutation: trustMutation,
		FailsAt:  stage.Detected,
		Mutate:   unconfirmed,
		Run: func(ctx context.Context, r *kit.Run) error {
			return (&trustRun{Run: r, side: recoveryv1.TrustSide_TRUST_SIDE_INGRESS}).run(ctx)
		},
	}
}

// authorityFiles are the files of the authority's key material.
var authorityFiles = []string{"root.pem", "intermediate.pem", "provisioner.pem"}

// trustRun is one run of either drill.
type trustRun struct {
	*kit.Run
	side    recoveryv1.TrustSide
	sent    string // the fingerprint of the root that the repair has sent
	cluster *cluster.Cluster
	held    mesh.Held

	trusted string            // the file of the issuers that the ingress trusts
	changed string            // the file whose content the fault changes
	foreign string            // the directory of another authority
	before  []byte            // content of trusted
	kept    map[string][]byte // content of what the fault changes, by path
	digest  [sha256.Size]byte
}

func (t *trustRun) run(ctx context.Context) error {
	if err := t.good(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	t.About(t.held.ID, t.held.Node)
	defer t.Leave(ctx, t.held.ID)
	defer func() { _ = os.RemoveAll(t.foreign) }()
	m := t.Mesh
	before, err := m.Node(ctx, t.held.Node)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer t.Finally(ctx, t.putRight) // it is right, unless the drill failed
	err = t.Inject(ctx, fmt.Sprintf("%s replaced, the agent of %s killed; the digest of the file was %x",
		filepath.Base(t.changed), t.held.Machine.Name(), t.digest[:6]), t.inject, func(context.Context) error {
		now, err := digestOf(t.changed)
		if err == nil && now == t.digest {
			err = errors.New("the file is as it was")
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := t.Detect(ctx, t.verdict); err != nil {
		return err
	}
	if err := t.Check(ctx); err != nil {
		return err
	}
	if err := t.stopped(ctx); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := t.held.Machine.Start(); err != nil {
		return stage.At(stage.Recover, err)
	}
	if err := t.repair(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	if err := t.Recovered(ctx, "the preflight ok, the incident closed, and the node connected with what it had",
		func(ctx context.Context) error {
			if err := t.state(ctx, recoveryv1.PreflightState_PREFLIGHT_STATE_OK); err != nil {
				return err
			}
			return act.Connected(ctx, m, t.held.Node)
		}); err != nil {
		return err
	}
	if err := t.restored(ctx); err != nil {
		return stage.At(stage.Evidence, err)
	}
	after, err := m.Node(ctx, t.held.Node)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	if was, is := before.GetIdentity(), after.GetIdentity(); is.GetNodeInstanceId() != was.GetNodeInstanceId() ||
		is.GetMints() != was.GetMints() {
		return stage.At(stage.Evidence, fmt.Errorf("the identity is %v, was %v", is, was))
	}
	return t.Retire(ctx, t.held.ID)
}

// good brings the mesh to where the fault is injected, and makes another authority.
func (t *trustRun) good(ctx context.Context) error {
	var err error
	if t.cluster, err = t.Mesh.Cluster(); err != nil {
		return err
	}
	if t.held, err = mesh.PlaceOnMachine(ctx, t.Mesh, t.cluster); err != nil {
		return err
	}
	if err := t.awaitState(ctx, recoveryv1.PreflightState_PREFLIGHT_STATE_OK); err != nil {
		return err
	}
	material := t.cluster.Material
	t.trusted, t.changed = material.NodeRoots(), material.NodeRoots()
	if t.side == recoveryv1.TrustSide_TRUST_SIDE_AUTHORITY {
		t.changed = filepath.Join(material.NodeCADir(), "intermediate.pem")
	}
	if t.before, err = os.ReadFile(t.trusted); err != nil { // of our own mesh
		return err
	}
	if t.digest, err = digestOf(t.changed); err != nil {
		return err
	}
	t.kept = map[string][]byte{t.trusted: t.before}
	if t.side == recoveryv1.TrustSide_TRUST_SIDE_AUTHORITY {
		for _, name := range authorityFiles {
			path := filepath.Join(material.NodeCADir(), name)
			if t.kept[path], err = os.ReadFile(path); err != nil { // of our own mesh
				return err
			}
		}
	}
	if t.foreign, err = os.MkdirTemp("", "gpuaas-drill-ca-"); err != nil {
		return err
	}
	other, err := ca.Open(ca.Config{Dir: t.foreign, TrustDomain: cluster.TrustDomain})
	if err != nil {
		return err
	}
	return other.Close()
}

// inject changes one side, and ends the agent, so that it must connect anew.
func (t *trustRun) inject(context.Context) error {
	t.held.Machine.LetDie()
	if t.side == recoveryv1.TrustSide_TRUST_SIDE_INGRESS {
		roots, err := os.ReadFile(filepath.Join(t.foreign, ca.RootsFile))
		if err != nil {
			return err
		}
		return errors.Join(pki.WriteFile(t.trusted, roots), t.held.Machine.Kill9())
	}
	for _, name := range authorityFiles {
		data, err := os.ReadFile(filepath.Join(t.foreign, name))
		if err != nil {
			return err
		}
		if err := pki.WriteFile(filepath.Join(t.cluster.Material.NodeCADir(), name), data); err != nil {
			return err
		}
	}
	errs := []error{t.held.Machine.Kill9()}
	for _, p := range t.cluster.Recovery {
		errs = append(errs, p.Kill9()) // the cluster starts them again
	}
	return errors.Join(errs...)
}

// verdict reads the verdict from the node, whose agent is gone, and compares the failing side.
func (t *trustRun) verdict(ctx context.Context) (kit.Verdict, error) {
	node, err := t.Mesh.Node(ctx, t.held.Node)
	v := kit.Verdict{Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction()}
	if err != nil || v.Reason != t.Drill.Expect.Reason {
		return v, errors.Join(err, fmt.Errorf("the node is connected %t: %q", node.GetConnected(), v.Reason))
	}
	return v, t.state(ctx, recoveryv1.PreflightState_PREFLIGHT_STATE_MISMATCH)
}

// state returns nil if the preflight is in a state, with the side that the fault is on and one open incident if it is a
// mismatch, and without one if it is not.
func (t *trustRun) state(ctx context.Context, want recoveryv1.PreflightState) error {
	answer, err := t.Mesh.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
	if err != nil {
		return err
	}
	is := answer.GetTrust().GetPreflight()
	wrong := want == recoveryv1.PreflightState_PREFLIGHT_STATE_MISMATCH
	if is.GetState() != want || wrong && is.GetFailingSide() != t.side {
		return fmt.Errorf("the preflight is %s, failing side %s: %s", names.Of(is.GetState()),
			names.OfSet(is.GetFailingSide()), is.GetSummary())
	}
	if (is.GetIncidentId() != "") != wrong {
		return fmt.Errorf("the incident is %q", is.GetIncidentId())
	}
	if wrong {
		t.Evidence(is.GetIncidentId())
	}
	return nil
}

func (t *trustRun) awaitState(ctx context.Context, want recoveryv1.PreflightState) error {
	return await.Until(ctx, "the preflight to be "+names.Of(want), await.Limit, func(ctx context.Context) error {
		return t.state(ctx, want)
	})
}

// stopped checks that a machine that enrols is refused and told to wait, and that the workload serves.
func (t *trustRun) stopped(ctx context.Context) error {
	token, err := t.Mesh.Client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: mesh.FreshName("trust")})
	if err != nil {
		return fmt.Errorf("obtain a token: %w", err)
	}
	defer t.Finally(ctx, func(ctx context.Context) {
		_, _ = act.Change(ctx, t.Mesh, token.GetNodeId(), recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE)
	})
	roots, err := pki.LoadBundle(t.cluster.Material.ServiceRoots())
	if err != nil {
		return err
	}
	http, err := calls.HTTPClient(pki.ClientConfig{Roots: roots, Server: pki.ServiceID(cluster.TrustDomain, "recovery")},
		calls.HTTPConfig{})
	if err != nil {
		return err
	}
	defer http.CloseIdleConnections()
	key, err := pki.NewKey()
	if err != nil {
		return err
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		return err
	}
	_, err = recoveryv1connect.NewEnrollmentServiceClient(http, "https://"+t.cluster.Plan.Addresses.Enroll,
		calls.Options(calls.Config{})...).Enroll(ctx, &recoveryv1.EnrollRequest{Token: token.GetToken(), Csr: csr})
	if !fault.Has(err, commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) ||
		fault.ActionOf(err) != commonv1.Action_ACTION_WAIT {
		return fmt.Errorf("a machine that enrols was answered %w", errors.Join(err, errors.New("not refused with wait")))
	}
	t.Note("an enrolment was refused: %v", err)
	return mesh.Answers(ctx, t.held.URL)
}

// repair does what the security role would do: it compares the root that the authority signs under with the authority's
// own record, and has the ingress trust it. The file of the ingress stays as the fault left it.
func (t *trustRun) repair(ctx context.Context) error {
	record := t.before
	if t.side == recoveryv1.TrustSide_TRUST_SIDE_AUTHORITY {
		var err error
		if record, err = os.ReadFile(filepath.Join(t.foreign, ca.RootsFile)); err != nil {
			return err
		}
	}
	roots, err := pki.DecodeCertificates(record)
	if err != nil {
		return err
	}
	return await.Until(ctx, "the repair", await.Limit, func(ctx context.Context) error {
		answer, err := t.Mesh.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
		if err != nil {
			return err
		}
		shown := answer.GetTrust().GetAuthority().GetRootFingerprints()
		at := slices.IndexFunc(roots, func(root *x509.Certificate) bool {
			return slices.Contains(shown, pki.Fingerprint(root))
		})
		if at < 0 {
			return fmt.Errorf("the authority shows the roots %v, and its record has none of them", shown)
		}
		_, err = t.Mesh.Client.Authority.RepairTrust(ctx, &readmodelv1.RepairTrustRequest{
			RootFingerprint: pki.Fingerprint(roots[at]), Reason: "drill",
		})
		if err == nil {
			t.sent = pki.Fingerprint(roots[at])
		}
		return err
	})
}

// files puts back what the fault has changed: the file of the ingress, or the authority's own material.
func (t *trustRun) files() error {
	var errs []error
	for path, data := range t.kept {
		errs = append(errs, pki.WriteFile(path, data))
	}
	if t.side == recoveryv1.TrustSide_TRUST_SIDE_AUTHORITY {
		for _, p := range t.cluster.Recovery {
			errs = append(errs, p.Kill9()) // the cluster starts them again
		}
	}
	return errors.Join(errs...)
}

// restored puts back what the fault has changed, and waits until both sides agree on the root from before.
func (t *trustRun) restored(ctx context.Context) error {
	if err := t.files(); err != nil {
		return err
	}
	roots, err := pki.DecodeCertificates(t.before)
	if err != nil {
		return err
	}
	return await.Until(ctx, "the material from before", await.Limit, func(ctx context.Context) error {
		answer, err := t.Mesh.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
		if err != nil {
			return err
		}
		shown := answer.GetTrust().GetAuthority().GetRootFingerprints()
		if !slices.ContainsFunc(roots, func(root *x509.Certificate) bool {
			return slices.Contains(shown, pki.Fingerprint(root))
		}) {
			return fmt.Errorf("the authority shows the roots %v", shown)
		}
		return t.state(ctx, recoveryv1.PreflightState_PREFLIGHT_STATE_OK)
	})
}

// putRight leaves the mesh with both sides in agreement, however far the drill came.
func (t *trustRun) putRight(ctx context.Context) {
	if now, err := digestOf(t.changed); err == nil && now != t.digest {
		_ = t.files()
	}
	if t.sent != "" {
		// A later drill begins from the files alone.
		_, _ = t.Mesh.Client.Authority.RepairTrust(ctx, &readmodelv1.RepairTrustRequest{
			RootFingerprint: t.sent, Reason: "drill", Withdraw: true,
		})
	}
	_ = t.Mesh.StartMachine(ctx, t.held.Machine) // it runs, unless the drill failed
}

func digestOf(path string) ([sha256.Size]byte, error) {
	data, err := os.ReadFile(path) // of our own mesh
	return sha256.Sum256(data), err
}
