package certificates

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// StaleChain is row 3: the mesh has another authority of nodes, and a machine keeps a certificate of the former one.
func StaleChain() kit.Drill {
	return kit.Drill{
		Name: "identity-rejected-after-profile-change", Slow: true,
		Injects: "the authority of nodes gets another root and intermediate, which the ingress trusts beside the former " +
			"ones; while the agent of a machine is killed the ingress drops the former root; the agent is started again with " +
			"its former certificate, while the enrolment listener takes no connections until the refusal is seen",
		Sees: "`identity_rejected` and recovering, the preflight ok; the other machines stay connected, the workload serves",
		Recovers: "by itself: the agent gets a certificate of the present authority with its recovery token, in a bounded " +
			"number of attempts, as the same instance",
		Needs: "its own mesh: it changes the files of its authority and of its ingress",
		Expect: kit.Verdict{
			Reason: "identity_rejected", UserState: "recovering", Owner: "recovery", Next: "enrols again",
		},
		Mutation: rejectionsOver,
		FailsAt:  stage.Detected,
		Scale:    scaleOfReturn,
		Run:      runStaleChain,
	}
}

// attemptsToReturn is how many attempts to recover an agent may make whose certificate is refused: one is enough.
const attemptsToReturn = 2

func runStaleChain(ctx context.Context, r *kit.Run) error {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return err
	}
	s := &chain{absence: absence{run: r, cluster: c}}
	defer r.Finally(ctx, s.putRight)
	if err := s.prepare(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	err = r.Inject(ctx, fmt.Sprintf("the agent of %s, process %d, killed, and the file of the issuers that the ingress "+
		"trusts leads to no root of the certificate in the machine's files", s.held.Machine.Name(), s.pid), s.inject,
		func(context.Context) error { return errors.Join(s.refused(), host.Gone(s.pid, s.process)) })
	if err != nil {
		return err
	}
	if err := s.back(ctx, true); err != nil {
		return stage.At(stage.Injected, err)
	}
	if err := s.detect(ctx); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := errors.Join(mesh.Answers(ctx, s.held.URL), s.trusts(ctx)); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := s.shut(false); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node connected, admitted, normal and proven healthy; the workspace serves",
		func(ctx context.Context) error {
			if err := act.Healthy(ctx, r.Mesh, s.held.Node); err != nil {
				return err
			}
			ws, err := r.Mesh.Workspace(ctx, s.held.ID)
			if err != nil {
				return err
			}
			return r.Mesh.Serving(ctx, s.held.ID, ws.GetEpoch())
		})
	if err != nil {
		return err
	}
	if err := errors.Join(s.recoveredByItself(ctx), s.bounded(ctx)); err != nil {
		return stage.At(stage.Evidence, err)
	}
	if s.refused() == nil {
		return stage.At(stage.Evidence, errors.New("the certificate in the machine's files is still of the former authority"))
	}
	return r.Retire(ctx, s.held.ID)
}

// chain is a machine whose certificate is of an authority that the ingress does not trust any more.
type chain struct {
	absence

	roots    string            // the file of the issuers that the ingress trusts
	before   []byte            // its content before the drill
	present  []byte            // the root of the present authority
	kept     map[string][]byte // the files of the authority before the drill, by path
	issuer   string            // the fingerprint of the issuer before the drill
	attempts int64
}

// prepare replaces the authority; the ingress trusts the former one and the present one.
func (s *chain) prepare(ctx context.Context) error {
	m := s.run.Mesh
	var err error
	if s.held, err = mesh.PlaceOnMachine(ctx, m, s.cluster); err != nil {
		return err
	}
	s.run.About(s.held.ID, s.held.Node)
	if err := s.note(ctx); err != nil {
		return err
	}
	node, err := m.Node(ctx, s.held.Node)
	if err != nil {
		return err
	}
	s.attempts = node.GetSession().GetRecovery().GetAttempts()
	s.pid = s.held.Machine.PID()
	s.process = host.Kernel(s.pid)
	material := s.cluster.Material
	if s.before, err = os.ReadFile(material.NodeRoots()); err != nil { // of our own mesh
		return err
	}
	s.roots = material.NodeRoots()
	foreign, err := os.MkdirTemp("", "gpuaas-drill-ca-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(foreign) }()
	other, err := ca.Open(ca.Config{Dir: foreign, TrustDomain: cluster.TrustDomain})
	if err != nil {
		return err
	}
	if err := other.Close(); err != nil {
		return err
	}
	if s.present, err = os.ReadFile(filepath.Join(foreign, ca.RootsFile)); err != nil {
		return err
	}
	if err := pki.WriteFile(s.roots, append(bytes.Clone(s.before), s.present...)); err != nil {
		return err
	}
	answer, err := m.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
	if err != nil {
		return err
	}
	s.issuer, s.kept = answer.GetTrust().GetAuthority().GetIssuerFingerprint(), map[string][]byte{}
	// The key of the provisioner, with which recovery tokens are signed, stays.
	for _, name := range []string{"root.pem", "intermediate.pem"} {
		data, err := os.ReadFile(filepath.Join(foreign, name))
		if err != nil {
			return err
		}
		path := filepath.Join(material.NodeCADir(), name)
		if s.kept[path], err = os.ReadFile(path); err != nil { // of our own mesh
			return err
		}
		if err := pki.WriteFile(path, data); err != nil {
			return err
		}
	}
	var settings []string
	if s.run.Control == kit.Mutated {
		settings = append(settings, rejectedFresh)
	}
	if err := m.Restart(ctx, s.cluster.Recovery, settings...); err != nil {
		return err
	}
	return await.Until(ctx, "the ingress to trust the present authority", await.Limit, s.trusts)
}

// trusts returns nil if the preflight is ok and each replica of nodeapi trusts the issuer.
func (s *chain) trusts(ctx context.Context) error {
	answer, err := s.run.Mesh.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
	if err != nil {
		return err
	}
	trust := answer.GetTrust()
	if state := trust.GetPreflight().GetState(); state != recoveryv1.PreflightState_PREFLIGHT_STATE_OK {
		return fmt.Errorf("the preflight is %s: %s", names.Of(state), trust.GetPreflight().GetSummary())
	}
	for _, at := range trust.GetIngress() {
		if at.GetReplicaId() != "" && !at.GetIssuerTrusted() {
			return fmt.Errorf("replica %s does not trust the issuer", at.GetReplicaId())
		}
	}
	return nil
}

// inject kills the agent and takes the former root from the ingress, and waits until each replica has dropped it.
func (s *chain) inject(ctx context.Context) error {
	s.held.Machine.LetDie()
	if err := s.held.Machine.Kill9(); err != nil {
		return err
	}
	if err := pki.WriteFile(s.roots, s.present); err != nil {
		return err
	}
	return await.Until(ctx, "the ingress to have dropped the former root", await.Limit, func(ctx context.Context) error {
		if err := s.trusts(ctx); err != nil {
			return err
		}
		answer, err := s.run.Mesh.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
		if err != nil {
			return err
		}
		for _, at := range answer.GetTrust().GetIngress() {
			if n := len(at.GetClientCaFingerprints()); at.GetReplicaId() != "" && n != 1 {
				return fmt.Errorf("replica %s trusts %d issuers", at.GetReplicaId(), n)
			}
		}
		return nil
	})
}

// refused checks that the certificate in the machine's files leads to none of the roots in the ingress' file.
func (s *chain) refused() error {
	data, err := os.ReadFile(s.roots) // of our own mesh
	if err != nil {
		return err
	}
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	roots.AppendCertsFromPEM(data)
	if data, err = os.ReadFile(filepath.Join(s.held.Dir, "etc", "cert.pem")); err != nil {
		return err
	}
	between.AppendCertsFromPEM(data)
	leaf, err := leafOf(data)
	if err != nil {
		return err
	}
	_, err = leaf.Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	if err == nil {
		return errors.New("the ingress' file has the root of the machine's certificate")
	}
	if _, unknown := errors.AsType[x509.UnknownAuthorityError](err); !unknown {
		return err
	}
	return nil
}

// bounded checks how many attempts the agent needed.
func (s *chain) bounded(ctx context.Context) error {
	node, err := s.run.Mesh.Node(ctx, s.held.Node)
	if made := node.GetSession().GetRecovery().GetAttempts() - s.attempts; err == nil &&
		(made < 1 || made > attemptsToReturn) {
		err = fmt.Errorf("the agent made %d attempts to recover", made)
	}
	return err
}
