package forward

import (
	"context"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Command serves CommandService. It resolves names and hides objects that the person may not see; the owners decide
// everything else.
type Command struct {
	reads  caller.Reads
	owners Owners
}

// NewCommand returns the server.
func NewCommand(reads caller.Reads, owners Owners) *Command {
	return &Command{reads: reads, owners: owners}
}

// requester returns who asks for an operation: "admin" for an operator, else "user".
func requester(ctx context.Context) string {
	if p, ok := rpc.PersonFrom(ctx); ok && p.Operator() {
		return "admin"
	}
	return "user"
}

// CreateTenant creates a tenant.
func (c *Command) CreateTenant(ctx context.Context,
	req *readmodelv1.CreateTenantRequest,
) (*readmodelv1.CreateTenantResponse, error) {
	answer, err := operator(ctx, "lifecycle", c.owners.Workspaces.CreateTenant,
		&lifecyclev1.CreateTenantRequest{Name: req.GetName(), Quota: req.GetQuota()})
	return &readmodelv1.CreateTenantResponse{
		Tenant: answer.GetTenant(), Existed: answer.GetExisted(),
		Pos: answer.GetPos(),
	}, err
}

// CreateWorkspace starts the provisioning of a workspace, or joins the one under way.
func (c *Command) CreateWorkspace(ctx context.Context,
	req *readmodelv1.CreateWorkspaceRequest,
) (*readmodelv1.CreateWorkspaceResponse, error) {
	scope, err := caller.ScopeOf(ctx)
	if err != nil {
		return nil, err
	}
	tenant := req.GetTenant()
	if !scope.Everything() && !strings.EqualFold(tenant, scope.TenantID()) {
		// A tenant that the person may not see and one that does not exist get the same answer.
		t, err := caller.Find(ctx, c.reads, (*view.Snapshot).Tenant, tenant)
		if err != nil {
			return nil, err
		}
		tenant = t.GetTenantId()
	}
	create := func() (*lifecyclev1.RequestOperationResponse, error) {
		return c.owners.Workspaces.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
			Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
			Target: &lifecyclev1.RequestOperationRequest_Create{
				Create: &lifecyclev1.CreateWorkspace{Tenant: tenant, Name: req.GetName(), Spec: req.GetSpec()},
			},
			Requester: requester(ctx), IdempotencyKey: req.GetIdempotencyKey(), DryRun: req.GetDryRun(),
		})
	}
	answer, err := create()
	if fault.Has(err, commonv1.Reason_REASON_TENANT_UNKNOWN) && scope.Everything() {
		// The tenant is neither a name nor an id, so it may be a part of an id. Lifecycle is asked first, because it knows
		// the tenants that exist now.
		found, findErr := caller.Find(ctx, c.reads, (*view.Snapshot).Tenant, tenant)
		switch {
		case findErr == nil:
			tenant = found.GetTenantId()
			answer, err = create()
		case !fault.Has(findErr, commonv1.Reason_REASON_NOT_FOUND):
			return nil, findErr
		}
	}
	return &readmodelv1.CreateWorkspaceResponse{Operation: operation(ctx, view.Target{}, answer.GetOperation())},
		RefusedOn(ctx, "lifecycle", view.Target{}, err)
}

// OperateWorkspace asks for any other operation on a workspace.
func (c *Command) OperateWorkspace(ctx context.Context,
	req *readmodelv1.OperateWorkspaceRequest,
) (*readmodelv1.OperateWorkspaceResponse, error) {
	t, err := caller.Find(ctx, c.reads, (*view.Snapshot).Target, req.GetWorkspace())
	if err != nil {
		return nil, err
	}
	if err := underRepair(t, req.GetKind()); err != nil {
		return nil, err
	}
	answer, err := c.owners.Workspaces.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
		Kind:      req.GetKind(),
		Target:    &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: t.Workspace.GetWorkspaceId()},
		Requester: requester(ctx), IdempotencyKey: req.GetIdempotencyKey(), Reason: req.GetReason(),
		Override:    req.GetOverride(),
		DryRun:      req.GetDryRun(),
		FencedProof: req.GetFencedProof(),
	})
	return &readmodelv1.OperateWorkspaceResponse{Operation: operation(ctx, t, answer.GetOperation())},
		RefusedOn(ctx, "lifecycle", t, err)
}

// EnrollNode issues a bootstrap bundle for a new machine.
func (c *Command) EnrollNode(ctx context.Context, req *readmodelv1.EnrollNodeRequest) (*readmodelv1.EnrollNodeResponse,
	error,
) {
	answer, err := operator(ctx, "recovery", c.owners.Identities.IssueBootstrap, &recoveryv1.IssueBootstrapRequest{
		Name: req.GetName(), ValidFor: req.GetValidFor(), IdempotencyKey: req.GetIdempotencyKey(),
		Profile: req.GetProfile(),
	})
	return &readmodelv1.EnrollNodeResponse{
		NodeId: answer.GetNodeId(), Token: answer.GetToken(), ExpiresAt: answer.GetExpiresAt(), Profile: answer.GetProfile(),
		Pos: answer.GetPos(),
	}, err
}

// ChangeNodeIdentity holds, quarantines, fences, reactivates or retires a node.
func (c *Command) ChangeNodeIdentity(ctx context.Context,
	req *readmodelv1.ChangeNodeIdentityRequest,
) (*readmodelv1.ChangeNodeIdentityResponse, error) {
	n, err := caller.Find(ctx, c.reads, (*view.Snapshot).Node, req.GetNode())
	if err != nil {
		return nil, err
	}
	answer, err := c.owners.Identities.ChangeIdentity(ctx,
		&recoveryv1.ChangeIdentityRequest{NodeId: n.GetNodeId(), Verb: req.GetVerb(), Reason: req.GetReason()})
	return &readmodelv1.ChangeNodeIdentityResponse{Node: answer.GetNode(), Pos: answer.GetPos()}, Refused("recovery", err)
}

// SetCordon cordons or uncordons a node.
func (c *Command) SetCordon(ctx context.Context, req *readmodelv1.SetCordonRequest) (*readmodelv1.SetCordonResponse,
	error,
) {
	n, err := caller.Find(ctx, c.reads, (*view.Snapshot).Node, req.GetNode())
	if err != nil {
		return nil, err
	}
	answer, err := c.owners.Gates.SetCordon(ctx,
		&lifecyclev1.SetCordonRequest{NodeId: n.GetNodeId(), Cordoned: req.GetCordoned(), Reason: req.GetReason()})
	return &readmodelv1.SetCordonResponse{Gate: answer.GetGate(), Pos: answer.GetPos()}, Refused("lifecycle", err)
}

// ProbeNode queues a typed no-op for a node.
func (c *Command) ProbeNode(ctx context.Context, req *readmodelv1.ProbeNodeRequest) (*readmodelv1.ProbeNodeResponse,
	error,
) {
	n, err := caller.Find(ctx, c.reads, (*view.Snapshot).Node, req.GetNode())
	if err != nil {
		return nil, err
	}
	answer, err := c.owners.Tasks.EnqueueProbe(ctx,
		&lifecyclev1.EnqueueProbeRequest{NodeId: n.GetNodeId(), IdempotencyKey: req.GetIdempotencyKey()})
	return &readmodelv1.ProbeNodeResponse{Task: answer.GetTask(), Pos: answer.GetPos()}, Refused("lifecycle", err)
}

// ChangeTask cancels, requeues or closes a task.
func (c *Command) ChangeTask(ctx context.Context, req *readmodelv1.ChangeTaskRequest) (*readmodelv1.ChangeTaskResponse,
	error,
) {
	verb, err := names.Parse[lifecyclev1.TaskVerb](req.GetVerb())
	if err != nil {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "there is no such verb",
			fault.Unmet("verb: cancel, requeue or close"), fault.Cause(err))
	}
	if _, err := caller.Find(ctx, c.reads, (*view.Snapshot).Task, req.GetTaskId()); err != nil {
		return nil, err
	}
	answer, err := c.owners.Tasks.ChangeTask(ctx,
		&lifecyclev1.ChangeTaskRequest{TaskId: req.GetTaskId(), Verb: verb, Reason: req.GetReason()})
	return &readmodelv1.ChangeTaskResponse{Task: answer.GetTask(), Pos: answer.GetPos()}, Refused("lifecycle", err)
}

// SetPolicy changes one policy key.
func (c *Command) SetPolicy(ctx context.Context, req *readmodelv1.SetPolicyRequest) (*readmodelv1.SetPolicyResponse,
	error,
) {
	answer, err := operator(ctx, "recovery", c.owners.Policies.SetPolicy, &recoveryv1.SetPolicyRequest{
		Key: req.GetKey(), Value: req.GetValue(), Reason: req.GetReason(),
		AcknowledgeWeakening: req.GetAcknowledgeWeakening(),
	})
	return &readmodelv1.SetPolicyResponse{Key: answer.GetKey(), Pos: answer.GetPos()}, err
}
