package forward

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Profiles serves ProfileService. Every answer comes from recovery, which owns the profiles; readmodel keeps no copy.
type Profiles struct{ owners Owners }

// NewProfiles returns the server.
func NewProfiles(owners Owners) *Profiles { return &Profiles{owners: owners} }

// ListProfiles lists the versions of profiles.
func (p *Profiles) ListProfiles(ctx context.Context, req *readmodelv1.ListProfilesRequest) (
	*readmodelv1.ListProfilesResponse, error,
) {
	answer, err := operator(ctx, "recovery", p.owners.Profiles.ListProfiles,
		&recoveryv1.ListProfilesRequest{Name: req.GetName()})
	return &readmodelv1.ListProfilesResponse{Items: answer.GetItems()}, err
}

// SetProfile announces a content of a profile.
func (p *Profiles) SetProfile(ctx context.Context, req *readmodelv1.SetProfileRequest) (
	*readmodelv1.SetProfileResponse, error,
) {
	answer, err := operator(ctx, "recovery", p.owners.Profiles.SetProfile, &recoveryv1.SetProfileRequest{
		Name: req.GetName(), ApiUrl: req.GetApiUrl(), RecoveryUrl: req.GetRecoveryUrl(), TerminalUrl: req.GetTerminalUrl(),
		CaBundlePem: req.GetCaBundlePem(), RecoveryCaBundlePem: req.GetRecoveryCaBundlePem(), Reason: req.GetReason(),
		NewestSeen: req.GetNewestSeen(),
	})
	return &readmodelv1.SetProfileResponse{Profile: answer.GetProfile(), Pos: answer.GetPos()}, err
}

// ActivateProfile makes a version the active one of its name.
func (p *Profiles) ActivateProfile(ctx context.Context, req *readmodelv1.ActivateProfileRequest) (
	*readmodelv1.ActivateProfileResponse, error,
) {
	answer, err := operator(ctx, "recovery", p.owners.Profiles.ActivateProfile, &recoveryv1.ActivateProfileRequest{
		Name: req.GetName(), Version: req.GetVersion(), Reason: req.GetReason(), RowSeen: req.GetRowSeen(),
	})
	return &readmodelv1.ActivateProfileResponse{Profile: answer.GetProfile(), Pos: answer.GetPos()}, err
}

// RetireProfile ends a version.
func (p *Profiles) RetireProfile(ctx context.Context, req *readmodelv1.RetireProfileRequest) (
	*readmodelv1.RetireProfileResponse, error,
) {
	answer, err := operator(ctx, "recovery", p.owners.Profiles.RetireProfile, &recoveryv1.RetireProfileRequest{
		Name: req.GetName(), Version: req.GetVersion(), Reason: req.GetReason(), Force: req.GetForce(),
		RowSeen: req.GetRowSeen(),
	})
	return &readmodelv1.RetireProfileResponse{Profile: answer.GetProfile(), Pos: answer.GetPos()}, err
}
