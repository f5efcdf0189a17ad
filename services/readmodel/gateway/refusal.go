package gateway

import (
	"context"
	"errors"
	"strings"
	"time"
	"unicode"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/guard"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/gateway/forward"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	// refusalLimit is how long a refused request may wait for its audit entry. The log writes later an entry that it could
	// not write by then.
	refusalLimit = 5 * time.Second
	// maxSubject is how many characters of the name in a refused request are kept, because the name has not been
	// validated.
	maxSubject = 128
)

// Refusals records in the audit log the requests that people were refused for their roles. An owner records its
// refusals itself.
type Refusals struct {
	log    *audit.Log
	reader *view.Reader
}

// NewRefusals returns Refusals that write to readmodel's audit log.
func NewRefusals(log *audit.Log, reader *view.Reader) *Refusals {
	return &Refusals{log: log, reader: reader}
}

// Denied records a request that was refused before it reached its method.
func (r *Refusals) Denied(ctx context.Context, d guard.Denial) {
	r.note(ctx, d.Procedure, d.Message, d.Err)
}

// WrapUnary implements connect.Interceptor. It records the refusals of methods that check more than the list of their
// roles.
func (r *Refusals) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, req)
		r.after(ctx, req.Spec().Procedure, req.Any(), err)
		return resp, err
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (r *Refusals) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		err := next(ctx, conn)
		r.after(ctx, conn.Spec().Procedure, nil, err)
		return err
	}
}

// WrapStreamingClient implements connect.Interceptor; this one is for servers.
func (r *Refusals) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (r *Refusals) after(ctx context.Context, procedure string, message any, err error) {
	var refusal *forward.OwnerError
	if err == nil || errors.As(err, &refusal) || !recorded(err) {
		return
	}
	r.note(ctx, procedure, message, err)
}

// recorded reports whether err is a refusal that readmodel itself decided.
func recorded(err error) bool {
	switch fault.ReasonOf(err) { // everything else is an owner's decision, or none
	case commonv1.Reason_REASON_PERMISSION_DENIED, commonv1.Reason_REASON_ROLE_NOT_HELD,
		commonv1.Reason_REASON_LAST_SECURITY_PERSON,
		commonv1.Reason_REASON_ALREADY_EXISTS:
		return true
	default:
		return false
	}
}

// note records a refusal. It goes on if the client disconnects, so that a person cannot avoid the entry.
func (r *Refusals) note(ctx context.Context, procedure string, message any, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), refusalLimit)
	defer cancel()
	person, _ := rpc.PersonFrom(ctx)
	e := attempted(procedure, message)
	e.TenantID = person.TenantID
	e.Details = map[string]any{"procedure": procedure, "roles": person.Roles}
	if said, ok := message.(interface{ GetReason() string }); ok && said.GetReason() != "" {
		e.Details["given_reason"] = spelled(said.GetReason())
	}
	_ = r.log.RefuseBounded(ctx, e, err, r.resolve)
}

// resolve adds the workspace, the tenant and the node of the object that was named, as far as the person may see it, so
// that the entry is found by them.
func (r *Refusals) resolve(ctx context.Context, e *audit.Entry) {
	scope, err := caller.ScopeOf(ctx)
	if err != nil || e.SubjectID == "" {
		return
	}
	// Best effort: an object that is not found keeps the name from the request.
	_ = r.reader.Read(ctx, scope, func(ctx context.Context, s *view.Snapshot) error {
		switch e.SubjectType {
		case "workspace":
			if w, err := s.Workspace(ctx, e.SubjectID); err == nil {
				e.WorkspaceID, e.TenantID = w.GetWorkspaceId(), w.GetTenantId()
			}
		case "node":
			if n, err := s.Node(ctx, e.SubjectID); err == nil {
				e.NodeID = n.GetNodeId()
			}
		case "allocation":
			if a, err := s.Allocation(ctx, e.SubjectID); err == nil {
				e.WorkspaceID, e.TenantID, e.NodeID = a.GetWorkspaceId(), a.GetTenantId(), a.GetNodeId()
			}
		}
		return nil
	})
}

// attempted returns the entry of a request, made from the request alone. For the requests in the switch its action is
// the one that the owner would have recorded; for any other it is made of the name of the method.
func attempted(procedure string, message any) audit.Entry {
	entry := func(action, subjectType, subject string) audit.Entry {
		return audit.Entry{Action: action, SubjectType: subjectType, SubjectID: spelled(subject)}
	}
	switch m := message.(type) {
	case *readmodelv1.CreateTenantRequest:
		return entry("tenant.create", "tenant", m.GetName())
	case *readmodelv1.CreateWorkspaceRequest:
		return entry("workspace.create", "workspace", m.GetTenant()+"/"+m.GetName())
	case *readmodelv1.OperateWorkspaceRequest:
		return entry("workspace."+names.Of(m.GetKind()), "workspace", m.GetWorkspace())
	case *readmodelv1.EnrollNodeRequest:
		return entry("node.bootstrap.issue", "node", m.GetName())
	case *readmodelv1.ChangeNodeIdentityRequest:
		return entry("node."+names.Of(m.GetVerb()), "node", m.GetNode())
	case *readmodelv1.AcceptHostFactsRequest:
		return entry("node.accept_facts", "node", m.GetNode())
	case *readmodelv1.SetCordonRequest:
		if !m.GetCordoned() {
			return entry("node.uncordon", "node", m.GetNode())
		}
		return entry("node.cordon", "node", m.GetNode())
	case *readmodelv1.ProbeNodeRequest:
		return entry("node.probe", "node", m.GetNode())
	case *readmodelv1.MergeDiagnosticsRequest:
		return entry("node.diagnostics", "node", m.GetNode())
	case *readmodelv1.CollectDiagnosticsRequest:
		return entry("node.diagnostics.collect", "node", m.GetNode())
	case *readmodelv1.ChangeTaskRequest:
		v, _ := names.Parse[lifecyclev1.TaskVerb](m.GetVerb())
		return entry("task."+names.Of(v), "task", m.GetTaskId())
	case *readmodelv1.SetPolicyRequest:
		return entry("policy.set", "policy", m.GetKey())
	case *readmodelv1.RetryReleaseRequest:
		return entry("allocation.retry_release", "allocation", m.GetRequest().GetAllocationId())
	case *readmodelv1.ForceReleaseRequest:
		return entry("allocation.force_release", "allocation", m.GetRequest().GetAllocationId())
	case *readmodelv1.EndInstanceRequest:
		return entry("instance.end", "instance", m.GetRequest().GetInstance())
	case *readmodelv1.ReleaseBrakeRequest:
		return entry("brake.release", "brake", "")
	case *readmodelv1.CloseIncidentRequest:
		return entry("incident.close", "incident", m.GetIncidentId())
	case *readmodelv1.CreatePersonRequest:
		return entry("person.create", "person", m.GetName())
	case *readmodelv1.EndPersonRequest:
		return entry("person.end", "person", m.GetPerson())
	case *readmodelv1.AcceptRollbackRequest:
		return entry("rollback.accept", "rollback", "mesh")
	case *readmodelv1.ForgetConsumerRequest:
		return entry("consumer.forget", "consumer", m.GetConsumer())
	case *readmodelv1.ReplayParkedRequest:
		return entry("parked_event.replay", "consumer", m.GetConsumer())
	case *readmodelv1.DropParkedRequest:
		return entry("parked_event.drop", "consumer", m.GetConsumer())
	case *readmodelv1.RebuildProjectionsRequest:
		return entry("projections.rebuild", "projections", project.ConsumerName)
	case *readmodelv1.AcknowledgeFindingRequest:
		return entry("finding.acknowledge", "finding", m.GetRequest().GetFindingId())
	case *readmodelv1.RotateKeyRequest:
		return entry("key.rotate", "key", names.Of(m.GetKind()))
	case *readmodelv1.RevokeTokensRequest:
		if m.GetTokenId() != "" {
			return entry("token.revoke", "recovery_token", m.GetTokenId())
		}
		return entry("token.revoke", "node", m.GetNodeId())
	case *readmodelv1.ExtendTokensRequest:
		return entry("token.extend", "profile", m.GetProfile())
	case *readmodelv1.SetProfileRequest:
		return entry("profile.set", "profile", m.GetName())
	case *readmodelv1.ActivateProfileRequest:
		return entry("profile.activate", "profile", m.GetName())
	case *readmodelv1.RetireProfileRequest:
		return entry("profile.retire", "profile", m.GetName())
	case *readmodelv1.IssueBundleRequest:
		return entry("node.bundle.issue", "node", m.GetNodeId())
	case *readmodelv1.RunPreflightRequest:
		return entry("ca.preflight", "preflight", "mesh")
	case *readmodelv1.RotateAuthorityRequest:
		return entry("authority.rotate", "authority", "nodes")
	case *readmodelv1.RepairTrustRequest:
		return entry("authority.repair", "authority", "nodes")
	default:
		e := entry(methodText(procedure), "", "")
		named(&e, message)
		return e
	}
}

// named sets the entry's subject to the workspace or the node that a query names.
func named(e *audit.Entry, message any) {
	if m, ok := message.(interface{ GetWorkspace() string }); ok && m.GetWorkspace() != "" {
		e.SubjectType, e.SubjectID = "workspace", spelled(m.GetWorkspace())
	} else if m, ok := message.(interface{ GetNode() string }); ok && m.GetNode() != "" {
		e.SubjectType, e.SubjectID = "node", spelled(m.GetNode())
	}
}

// methodText returns the action of a procedure: `audit.verify_audit` for /gpuaas.readmodel.v1.AuditService/VerifyAudit.
func methodText(procedure string) string {
	service, method, _ := strings.Cut(strings.TrimPrefix(procedure, "/"), "/")
	if i := strings.LastIndexByte(service, '.'); i >= 0 {
		service = service[i+1:]
	}
	var out strings.Builder
	out.WriteString(strings.ToLower(strings.TrimSuffix(service, "Service")) + ".")
	for i, r := range method {
		if unicode.IsUpper(r) && i > 0 {
			out.WriteByte('_')
		}
		out.WriteRune(unicode.ToLower(r))
	}
	return out.String()
}

// spelled returns at most maxSubject characters of what a person wrote, made printable, because it is shown on
// terminals.
func spelled(s string) string {
	var out strings.Builder
	n := 0
	for _, r := range s {
		if n++; n > maxSubject {
			return audit.Printable(out.String()) + "…"
		}
		out.WriteRune(r)
	}
	return audit.Printable(out.String())
}
