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
	recoveryv1connect.UnimplementedProfileServiceHandler
	recoveryv1connect.UnimplementedBundleServiceHandler
	recoveryv1connect.UnimplementedAuthorityServiceHandler
	recoveryv1connect.UnimplementedHostFactsServiceHandler
	recoveryv1connect.UnimplementedDiagnosticsServiceHandler
	recoveryv1connect.UnimplementedActionServiceHandler

	owners *owners
}

// ofMachines are the services of the people's port that are forwarded for people of the operator alone: a person of a
// tenant is refused before anything is looked up.
var ofMachines = map[string]bool{
	"TokenService": true, "TrustService": true, "HostFactsService": true, "DiagnosticsService": true,
	"ActionService":    true,
	"ProfileService":   true,
	"BundleService":    true,
	"AuthorityService": true,
}

func (m machines) ListTokens(ctx context.Context,
	r *recoveryv1.ListTokensRequest,
) (*recoveryv1.ListTokensResponse, error) {
	return &recoveryv1.ListTokensResponse{
		Items: []*recoveryv1.RecoveryToken{{NodeId: r.GetNodeId(), NodeName: hiddenNode}},
	}, m.owners.note(ctx, r)
}

func (m machines) ListActions(ctx context.Context,
	r *recoveryv1.ListActionsRequest,
) (*recoveryv1.ListActionsResponse, error) {
	return &recoveryv1.ListActionsResponse{
		Items: []*recoveryv1.RecoveryAction{{NodeId: r.GetNodeId(), NodeName: hiddenNode}},
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

// hiddenProfile is a version whose texts are for people of the operator.
func hiddenProfile() *recoveryv1.ProfileVersion {
	return &recoveryv1.ProfileVersion{Profile: &commonv1.Profile{Name: hiddenNode}, Reason: "for " + hiddenNode}
}

func (m machines) ListProfiles(ctx context.Context,
	r *recoveryv1.ListProfilesRequest,
) (*recoveryv1.ListProfilesResponse, error) {
	return &recoveryv1.ListProfilesResponse{Items: []*recoveryv1.ProfileVersion{hiddenProfile()}}, m.owners.note(ctx, r)
}

func (m machines) SetProfile(ctx context.Context,
	r *recoveryv1.SetProfileRequest,
) (*recoveryv1.SetProfileResponse, error) {
	return &recoveryv1.SetProfileResponse{Profile: hiddenProfile()}, m.owners.note(ctx, r)
}

func (m machines) ActivateProfile(ctx context.Context,
	r *recoveryv1.ActivateProfileRequest,
) (*recoveryv1.ActivateProfileResponse, error) {
	return &recoveryv1.ActivateProfileResponse{Profile: hiddenProfile()}, m.owners.note(ctx, r)
}

func (m machines) RetireProfile(ctx context.Context,
	r *recoveryv1.RetireProfileRequest,
) (*recoveryv1.RetireProfileResponse, error) {
	return &recoveryv1.RetireProfileResponse{Profile: hiddenProfile()}, m.owners.note(ctx, r)
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

func (m machines) IssueBundle(ctx context.Context,
	r *recoveryv1.IssueBundleRequest,
) (*recoveryv1.IssueBundleResponse, error) {
	return &recoveryv1.IssueBundleResponse{NodeId: r.GetNodeId(), NodeName: hiddenNode}, m.owners.note(ctx, r)
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
