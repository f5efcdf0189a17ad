package recovery

import (
	"cmp"
	"context"
	"fmt"

	"google.golang.org/protobuf/types/known/timestamppb"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

// How an agent is installed where its package says nothing else.
const (
	agentUnit = "gpuaas-node-agent.service"
	agentRoot = "/etc/gpuaas"
)

// bundles implements BundleService.
type bundles struct {
	enroller    *enrol.Enroller
	store       *pki.Store // with the certificate that signs
	trustDomain string
}

// IssueBundle issues a token for a node and returns the archive with it.
func (b *bundles) IssueBundle(ctx context.Context, req *recoveryv1.IssueBundleRequest) (*recoveryv1.IssueBundleResponse,
	error,
) {
	issued, err := b.enroller.IssueBundle(ctx, enrol.BundleRequest{
		NodeID: req.GetNodeId(), Reason: req.GetReason(), Key: req.GetIdempotencyKey(), By: rpc.ActorFrom(ctx),
		Life: req.GetValidFor().AsDuration(),
	})
	if err != nil {
		return nil, shown(err)
	}
	archive, err := b.archive(issued)
	if err != nil {
		// The token was issued and no caller has its text: a repetition with the same key, or another request, replaces it.
		return nil, fmt.Errorf("issue bundle: %w", err)
	}
	return &recoveryv1.IssueBundleResponse{
		Archive: archive, Digest: bundle.DigestOf(archive), TokenId: issued.TokenID,
		ExpiresAt: timestamppb.New(issued.ExpiresAt), NodeId: issued.NodeID, NodeName: issued.Name,
		Profile: issued.Profile.GetName(), Pos: issued.Pos,
	}, nil
}

// archive returns the archive with a token, and with the endpoints and the trust of the node's profile.
func (b *bundles) archive(issued enrol.BundleToken) ([]byte, error) {
	profile := issued.Profile
	env, err := bundle.RenderEnv(
		bundle.Variable{Name: bundle.EnvAPIURL, Value: profile.GetApiUrl()},
		bundle.Variable{Name: bundle.EnvRecoveryURL, Value: cmp.Or(profile.GetRecoveryUrl(), profile.GetApiUrl())},
		bundle.Variable{Name: bundle.EnvRecoveryBundle, Value: bundle.FileRecoveryCA},
		bundle.Variable{Name: bundle.EnvTerminalURL, Value: profile.GetTerminalUrl()},
		bundle.Variable{Name: bundle.EnvTrustDomain, Value: b.trustDomain},
		bundle.Variable{Name: bundle.EnvNodeName, Value: issued.Name},
		bundle.Variable{Name: bundle.EnvToken, Value: issued.Token},
	)
	if err != nil {
		return nil, err
	}
	files := bundle.Files{Env: env, CA: profile.GetCaBundlePem(), RecoveryCA: profile.GetRecoveryCaBundlePem()}
	if len(files.RecoveryCA) == 0 {
		files.RecoveryCA = files.CA
	}
	version, _ := obs.Build()
	return bundle.Write(bundle.Manifest{
		NodeID: issued.NodeID, NodeInstanceID: issued.InstanceID, NodeName: issued.Name, TrustDomain: b.trustDomain,
		Profile: bundle.Profile{
			Name: profile.GetName(), Fingerprint: profile.GetFingerprint(), Version: profile.GetVersion(),
		},
		TokenID: issued.TokenID, IssuedAt: issued.IssuedAt, ExpiresAt: issued.ExpiresAt,
		Package: bundle.Package{AgentVersion: version, Unit: agentUnit, InstallRoot: agentRoot},
	}, files, b.store.Certificate())
}
