package certificates

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/gpuaas/mesh/drill/kit/await"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// putRight gives the mesh its authority of before the drill again, however far the drill came. A later drill would be
// accused of nodes with certificates of another authority, and of an ingress that trusts two.
func (s *chain) putRight(ctx context.Context) {
	_ = s.shut(false)
	if s.kept != nil {
		s.run.Left("the authority of nodes", s.restore(ctx))
	}
	if s.held.Machine == nil {
		return
	}
	_ = s.run.Mesh.StartMachine(ctx, s.held.Machine) // it runs, unless the drill failed
	s.run.Leave(ctx, s.held.ID)
}

// restore puts the former authority in its place, has each machine that needs one get a certificate of it, and has the
// ingress trust that authority alone. The ingress trusts both until then.
func (s *chain) restore(ctx context.Context) error {
	m := s.run.Mesh
	if err := pki.WriteFile(s.roots, append(bytes.Clone(s.before), s.present...)); err != nil {
		return err
	}
	for path, data := range s.kept {
		if err := pki.WriteFile(path, data); err != nil {
			return err
		}
	}
	if err := m.Restart(ctx, s.cluster.Recovery); err != nil {
		return err
	}
	if err := await.Until(ctx, "the former authority to sign", await.Limit, s.signs); err != nil {
		return err
	}
	for _, machine := range s.cluster.Nodes {
		node, err := m.Node(ctx, machine.Name())
		if err != nil {
			return err
		}
		if node.GetIdentity().GetIssuerFingerprint() == s.issuer {
			continue
		}
		if _, err := reissue(ctx, m, s.cluster, machine); err != nil {
			return err
		}
	}
	if err := pki.WriteFile(s.roots, s.before); err != nil {
		return err
	}
	if s.certified(ctx) != nil {
		// An instance that had to connect meanwhile has a certificate of the other authority, and its stream stands. Once it
		// must connect again it is refused, and gets another by itself.
		if err := m.Restart(ctx, s.cluster.NodeAPI); err != nil {
			return err
		}
	}
	return await.Until(ctx, "each node to have a certificate of the former authority", await.Limit,
		func(ctx context.Context) error { return errors.Join(s.signs(ctx), s.certified(ctx)) })
}

// signs returns nil if the former authority signs, and each replica of nodeapi trusts it.
func (s *chain) signs(ctx context.Context) error {
	answer, err := s.run.Mesh.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
	if err != nil {
		return err
	}
	if now := answer.GetTrust().GetAuthority().GetIssuerFingerprint(); now != s.issuer {
		return fmt.Errorf("the issuer is %s, was %s", now, s.issuer)
	}
	return s.trusts(ctx)
}

// certified returns nil if each active node has a certificate of the former authority.
func (s *chain) certified(ctx context.Context) error {
	resp, err := s.run.Mesh.Client.Query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: 500})
	if err != nil {
		return err
	}
	for _, node := range resp.GetItems() {
		is := node.GetIdentity()
		active := is.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
		if active && is.GetIssuerFingerprint() != s.issuer {
			return fmt.Errorf("the certificate of %s is of the issuer %s, not %s", node.GetName(),
				is.GetIssuerFingerprint(), s.issuer)
		}
	}
	return nil
}
