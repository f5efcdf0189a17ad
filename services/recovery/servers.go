package recovery

import (
	"context"
	"errors"
	"net"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/authority"
	"github.com/gpuaas/mesh/services/recovery/enrol"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/instance"
	"github.com/gpuaas/mesh/services/recovery/profiles"
)

// sessions implements SessionService.
type sessions struct {
	identities *identity.Identities
	enroller   *enrol.Enroller
	poller     *authority.Poller
	policy     policy.Reader
	profiles   *profiles.Book
}

// OpenSessions decides about a batch of Hellos.
func (s *sessions) OpenSessions(ctx context.Context,
	req *recoveryv1.OpenSessionsRequest,
) (*recoveryv1.OpenSessionsResponse, error) {
	results, moment, err := s.identities.Open(ctx, req.GetSessions())
	return &recoveryv1.OpenSessionsResponse{
		Results: results, ServerTime: timestamppb.New(moment.Now), Policy: enrol.NodePolicy(s.policy.Current()),
		ProfileFingerprint: s.profiles.Default().GetFingerprint(),
	}, shown(err)
}

// ConfirmSessions decides about a batch of Readys.
func (s *sessions) ConfirmSessions(ctx context.Context,
	req *recoveryv1.ConfirmSessionsRequest,
) (*recoveryv1.ConfirmSessionsResponse, error) {
	results, moment, err := s.identities.Confirm(ctx, req.GetSessions())
	return &recoveryv1.ConfirmSessionsResponse{Results: results, ServerTime: timestamppb.New(moment.Now)}, shown(err)
}

// ReportChallenge closes a challenge.
func (s *sessions) ReportChallenge(ctx context.Context,
	req *recoveryv1.ReportChallengeRequest,
) (*recoveryv1.ReportChallengeResponse, error) {
	denial, err := s.identities.ReportChallenge(ctx, req)
	return &recoveryv1.ReportChallengeResponse{Denial: denial}, shown(err)
}

// RenewCertificate issues the next certificate.
func (s *sessions) RenewCertificate(ctx context.Context,
	req *recoveryv1.RenewCertificateRequest,
) (*recoveryv1.RenewCertificateResponse, error) {
	issued, err := s.enroller.Renew(ctx, req)
	return &recoveryv1.RenewCertificateResponse{
		CertificateChainPem: issued.ChainPEM, Serial: issued.Serial.Serial, NotAfter: timestamppb.New(issued.NotAfter),
		RecoveryToken: issued.RecoveryToken,
	}, shown(err)
}

// WatchAuthority serves one replica's view.
func (s *sessions) WatchAuthority(ctx context.Context,
	stream *connect.BidiStream[recoveryv1.WatchAuthorityRequest, recoveryv1.WatchAuthorityResponse],
) error {
	return s.poller.Watch(ctx, stream)
}

// instances implements InstanceService.
type instances struct{ instances *instance.Instances }

// PrepareInstance records an instance that will be launched and returns the node that it will be.
func (s *instances) PrepareInstance(ctx context.Context,
	req *recoveryv1.PrepareInstanceRequest,
) (*recoveryv1.PrepareInstanceResponse, error) {
	nodeID, err := s.instances.Prepare(ctx, req)
	return &recoveryv1.PrepareInstanceResponse{NodeId: nodeID}, shown(err)
}

// RetireInstance ends the identity of an instance.
func (s *instances) RetireInstance(ctx context.Context,
	req *recoveryv1.RetireInstanceRequest,
) (*recoveryv1.RetireInstanceResponse, error) {
	return &recoveryv1.RetireInstanceResponse{}, shown(s.instances.Retire(ctx, req))
}

// persons implements IdentityService.
type persons struct {
	identities *identity.Identities
	enroller   *enrol.Enroller
	audit      *audit.Log
}

// IssueBootstrap issues an operator's token.
func (s *persons) IssueBootstrap(ctx context.Context,
	req *recoveryv1.IssueBootstrapRequest,
) (*recoveryv1.IssueBootstrapResponse, error) {
	bundle, err := s.enroller.IssueBootstrap(ctx, req.GetName(), req.GetProfile(), req.GetValidFor().AsDuration(),
		req.GetIdempotencyKey(), rpc.ActorFrom(ctx))
	return &recoveryv1.IssueBootstrapResponse{
		NodeId: bundle.NodeID, Token: bundle.Token, ExpiresAt: timestamppb.New(bundle.ExpiresAt),
		Profile: bundle.Profile, Pos: bundle.Pos,
	}, shown(err)
}

// ChangeIdentity applies a person's verb.
func (s *persons) ChangeIdentity(ctx context.Context,
	req *recoveryv1.ChangeIdentityRequest,
) (*recoveryv1.ChangeIdentityResponse, error) {
	person, ok := rpc.PersonFrom(ctx)
	if !ok {
		return nil, fault.New(commonv1.Reason_REASON_ASSERTION_INVALID, "")
	}
	r, pos, err := s.identities.Change(ctx, req.GetNodeId(), req.GetVerb(), req.GetReason(),
		identity.Actor{Subject: person.Subject, Roles: person.Roles})
	if err != nil {
		refused := audit.Entry{
			Action: "node." + names.Of(req.GetVerb()), Reason: req.GetReason(), SubjectType: "node",
			SubjectID: req.GetNodeId(), NodeID: req.GetNodeId(),
		}
		return nil, s.audit.Refuse(ctx, refused, shown(err))
	}
	return &recoveryv1.ChangeIdentityResponse{Node: r.Proto(), Pos: pos}, nil
}

// enrolment implements EnrollmentService.
type enrolment struct{ enroller *enrol.Enroller }

// Enroll turns a token into a certificate.
func (s *enrolment) Enroll(ctx context.Context, req *recoveryv1.EnrollRequest) (*recoveryv1.EnrollResponse, error) {
	from := ""
	if call, ok := connect.CallInfoForHandlerContext(ctx); ok {
		// The address is that of the connection: a header is under the caller's control.
		from, _, _ = net.SplitHostPort(call.Peer().Addr) // an address that cannot be read shares one bucket
	}
	resp, err := s.enroller.Enroll(ctx, from, req)
	return resp, shown(err)
}

// shown turns the error of a database that cannot be reached, or whose connection was lost at the commit, into the
// fault unavailable, so that the caller repeats the call: every call here is idempotent. Other errors are returned
// unchanged.
func shown(err error) error {
	if errors.Is(err, pg.ErrCommitUnknown) {
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "", fault.Cause(err))
	}
	return pg.Fault(err)
}
