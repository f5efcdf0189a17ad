package readmodel_test

import (
	"context"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
)

// machines is a fake of the services of recovery that answer people of the operator alone. Each answer names a node.
type machines struct {
	recoveryv1connect.UnimplementedTokenServiceHandler
	recoveryv1connect.UnimplementedTrustServiceHandler
	recoveryv1connect.UnimplementedAuthorityServiceHandler
	recoveryv1connect.UnimplementedHostFactsServiceHandler
	recoveryv1connect.UnimplementedDiagnosticsServiceHandler

	owners *owners
}

// ofMachines are the services of the people's port that are forwarded for people of the operator alone: a person of a
// tenant is refused before anything is looked up.
var ofMachines = map[string]bool{
	"TokenService": true, "TrustService": true, "HostFactsService": true, "DiagnosticsService": true,
	"AuthorityService": true,
}

func (m machines) ListTokens(ctx context.Context,
	r *recoveryv1.ListTokensRequest,
) (*recoveryv1.ListTokensResponse, error) {
	return &recoveryv1.ListTokensResponse{
		Items: []*recoveryv1.RecoveryToken{{NodeId: r.GetNodeId(), NodeName: hiddenNode}},
	}, m.owners.note(ctx, r)
}

func (m machines) RevokeTokens(ctx context.Context,
	r *recoveryv1.RevokeTokensRequest,
) (*recoveryv1.RevokeTokensResponse, error) {
	return &recoveryv1.RevokeTokensResponse{
		Tokens: []*recoveryv1.RecoveryToken{{NodeId: r.GetNodeId(), NodeName: hiddenNode}},
	}, m.owners.note(ctx, r)
}

func (m machines) ExtendTokens(ctx context.Context,
	r *recoveryv1.ExtendTokensRequest,
) (*recoveryv1.ExtendTokensResponse, error) {
	return &recoveryv1.ExtendTokensResponse{
		Extension: &recoveryv1.TokenExtension{Profile: r.GetProfile(), Reason: "for " + hiddenNode},
	}, m.owners.note(ctx, r)
}

func (m machines) GetTrust(ctx context.Context, r *recoveryv1.GetTrustRequest) (*recoveryv1.GetTrustResponse, error) {
	return &recoveryv1.GetTrustResponse{
		Preflight: &recoveryv1.CaPreflight{Summary: hiddenNode + " refuses it"},
	}, m.owners.note(ctx, r)
}

func (m machines) RunPreflight(ctx context.Context,
	r *recoveryv1.RunPreflightRequest,
) (*recoveryv1.RunPreflightResponse, error) {
	return &recoveryv1.RunPreflightResponse{
		Ingress: []*recoveryv1.IngressTrust{{Detail: hiddenNode + " refuses it"}},
	}, m.owners.note(ctx, r)
}

func (m machines) RotateAuthority(ctx context.Context,
	r *recoveryv1.RotateAuthorityRequest,
) (*recoveryv1.RotateAuthorityResponse, error) {
	return &recoveryv1.RotateAuthorityResponse{
		Rotation: &recoveryv1.AuthorityRotation{WaitsFor: hiddenNode},
	}, m.owners.note(ctx, r)
}

func (m machines) RepairTrust(ctx context.Context,
	r *recoveryv1.RepairTrustRequest,
) (*recoveryv1.RepairTrustResponse, error) {
	return &recoveryv1.RepairTrustResponse{
		Issuers: []*recoveryv1.TrustedIssuer{{Name: hiddenNode}},
	}, m.owners.note(ctx, r)
}

func (m machines) AcceptHostFacts(ctx context.Context,
	r *recoveryv1.AcceptHostFactsRequest,
) (*recoveryv1.AcceptHostFactsResponse, error) {
	return &recoveryv1.AcceptHostFactsResponse{Accepted: "the kernel of " + hiddenNode}, m.owners.note(ctx, r)
}

func (m machines) MergeDiagnostics(ctx context.Context,
	r *recoveryv1.MergeDiagnosticsRequest,
) (*recoveryv1.MergeDiagnosticsResponse, error) {
	return &recoveryv1.MergeDiagnosticsResponse{Explains: []string{hiddenNode}}, m.owners.note(ctx, r)
}

func (o *owners) CollectDiagnostics(ctx context.Context,
	r *lifecyclev1.CollectDiagnosticsRequest,
) (*lifecyclev1.CollectDiagnosticsResponse, error) {
	return &lifecyclev1.CollectDiagnosticsResponse{Task: &lifecyclev1.Task{NodeId: r.GetNodeId()}}, o.note(ctx, r)
}

func (o *owners) GetCollectedDiagnostics(ctx context.Context,
	r *lifecyclev1.GetCollectedDiagnosticsRequest,
) (*lifecyclev1.GetCollectedDiagnosticsResponse, error) {
	return &lifecyclev1.GetCollectedDiagnosticsResponse{
		Diagnostics: []*commonv1.Diagnostic{{Detail: "no way out of " + hiddenNode}},
	}, o.note(ctx, r)
}
