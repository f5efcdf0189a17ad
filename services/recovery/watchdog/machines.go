package watchdog

import (
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/fleet"
)

// machines keeps one incident open for each shared machine that cannot be reached. Its workspaces are not moved.
func (j *evaluation) machines(ctx context.Context) error {
	lost, unknown := map[string]*fleet.Incident{}, map[string]bool{}
	for _, s := range j.subjects {
		if !s.static() || s.NodeID == "" || s.State != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
			continue
		}
		switch {
		case s.Reach == reachUnknown:
			unknown[s.NodeID] = true
		case s.Reach == reachLost && (s.Identity == "" || s.Identity == "active"):
			i := lost[s.NodeID]
			if i == nil {
				i = &fleet.Incident{
					Kind: kindMachine, Key: s.NodeID, OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
					NextAction: "restart the machine or its agent; its workspaces come back with it. To move them, recreate each " +
						"with a fenced proof",
				}
				lost[s.NodeID] = i
			}
			i.About(s.TenantID, s.WorkspaceID, s.NodeID)
		}
	}
	for node, i := range lost {
		i.Summary = fmt.Sprintf("machine %s cannot be reached; its %d workspaces are kept: nothing proves that their work "+
			"has ended", node, len(i.Workspaces))
	}
	// While no replica of nodeapi listens, machines are not read. The state of such a machine is as unknown as that of one
	// in unknown, and its incident stays open.
	var listens *bool
	var problem error
	err := j.fleet.RaiseAll(ctx, kindMachine, lost, func(i *fleet.Incident) bool {
		if unknown[i.Key] || !j.listened {
			return true
		}
		if listens == nil {
			var listen bool
			listen, problem = pg.Value[bool](ctx, j.tx, replicaListens)
			listens = &listen
		}
		return problem != nil || !*listens
	})
	if problem != nil {
		return fmt.Errorf("read who listens: %w", problem)
	}
	return err
}
