package mesh

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/gpuaas/mesh/drill/kit/await"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// Good waits until the mesh is as it should be before a fault: all parts well, all machines connected, and the
// bystander active.
func (m *Mesh) Good(ctx context.Context) error {
	if err := await.Until(ctx, "every part of the mesh to be well", await.Limit, m.Well); err != nil {
		return err
	}
	if err := m.ReleaseBrake(ctx); err != nil {
		return err
	}
	return m.bystander(ctx)
}

// ReleaseBrake releases the fleet brake if it is engaged, as an operator does who knows what failed: the faults of
// earlier drills are in its window.
func (m *Mesh) ReleaseBrake(ctx context.Context) error {
	resp, err := m.Client.Incidents.GetBrake(ctx, &readmodelv1.GetBrakeRequest{})
	if err != nil || !resp.GetBrake().GetEngaged() {
		return err
	}
	_, err = m.Client.Incidents.ReleaseBrake(ctx, &readmodelv1.ReleaseBrakeRequest{Reason: "faults of drills"})
	if fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
		return nil // it has let go meanwhile
	}
	return err
}

// Well returns nil if all parts of the mesh are well and all machines connected.
func (m *Mesh) Well(ctx context.Context) error {
	status, err := m.Client.Query.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	for _, c := range status.GetComponents() {
		if !c.GetOk() {
			return fmt.Errorf("%s is not well: %s %s", c.GetName(), c.GetReason(), c.GetDetail())
		}
	}
	if m.cluster == nil {
		return nil
	}
	for _, p := range m.cluster.Processes() {
		if err := p.Ready(ctx); err != nil {
			return err
		}
	}
	if n, err := agents.Await(ctx, m.Client, m.cluster.Nodes, 0); err != nil || n < len(m.cluster.Nodes) {
		return errors.Join(err, fmt.Errorf("%d of %d machines are connected", n, len(m.cluster.Nodes)))
	}
	return nil
}

// Bystander is the workspace that no fault may affect.
const Bystander = "bystander"

// bystander makes the tenant and the workspace that no fault may affect, or finds them.
func (m *Mesh) bystander(ctx context.Context) error {
	_, err := m.Client.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{
		Name: Tenant, Quota: &lifecyclev1.Quota{Workspaces: 100, Gpus: 64, StorageBytes: 1 << 40},
	})
	if err != nil {
		return fmt.Errorf("make the tenant of the drills: %w", err)
	}
	ref := Tenant + "/" + Bystander
	if w, err := m.Workspace(ctx, ref); err != nil || w.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
		if _, err := m.Create(ctx, Bystander, nil); err != nil {
			return fmt.Errorf("make the workspace that nothing is to happen to: %w", err)
		}
		if err := m.AwaitState(ctx, ref, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, await.Limit); err != nil {
			return err
		}
	}
	// It is compared with afterwards, so it must not be on its way back from an earlier drill.
	return await.Until(ctx, "the workspace that nothing is to happen to", await.Limit, func(ctx context.Context) error {
		w, err := m.Workspace(ctx, ref)
		if err == nil && (w.GetUserState() != commonv1.UserState_USER_STATE_NORMAL ||
			w.GetManagement().GetState() != readmodelv1.LayerState_LAYER_STATE_CONNECTED) {
			err = fmt.Errorf("it is %s to its user, its management %s", names.Of(w.GetUserState()),
				names.Of(w.GetManagement().GetState()))
		}
		return err
	})
}

// SetPolicy changes a key as an operator does.
func (m *Mesh) SetPolicy(ctx context.Context, key, value string) error {
	_, err := await.Answer(ctx, "set "+key, func(ctx context.Context) (*readmodelv1.SetPolicyResponse, error) {
		return m.Client.Command.SetPolicy(ctx,
			&readmodelv1.SetPolicyRequest{Key: key, Value: value, Reason: "drill", AcknowledgeWeakening: true})
	})
	return err
}

// Restart ends the replicas of a service in order, one after the other, and has them started again, with env in their
// environment from then on. A killed replica would keep its leases on runs until they expire; one that ends in order
// releases them.
func (m *Mesh) Restart(ctx context.Context, replicas []*cluster.Process, env ...string) error {
	for _, p := range replicas {
		p.BeforeStart(func() []string { return env })
		starts := p.Starts() // before its end: it is started again within moments
		if err := p.Signal(syscall.SIGTERM); err != nil {
			return fmt.Errorf("end %s: %w", p.Name, err)
		}
		if err := await.Until(ctx, p.Name+" to be started again", await.Limit, func(ctx context.Context) error {
			if p.Starts() == starts {
				return errors.New("it is not")
			}
			return p.Ready(ctx)
		}); err != nil {
			return err
		}
	}
	return await.Until(ctx, "every part of the mesh to be well again", await.Limit, m.Well)
}
