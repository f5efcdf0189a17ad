package watchdog

import (
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// machines keeps one incident open for each shared machine that cannot be reached. Its workspaces are not moved.
func (j *evaluation) machines(ctx context.Context) error {
	lost, unknown := map[string]*incident{}, map[string]bool{}
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
				i = &incident{
					Kind: kindMachine, Key: s.NodeID, Severity: commonv1.Severity_SEVERITY_P1,
					OwnerLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
					NextAction: "restart the machine or its agent; its workspaces come back with it. To move them, recreate each with a fenced proof",
				}
				lost[s.NodeID] = i
			}
			i.about(s.TenantID, s.WorkspaceID, s.NodeID)
		}
	}
	for node, i := range lost {
		i.Summary = fmt.Sprintf("machine %s cannot be reached; its %d workspaces are kept: nothing proves that their work has ended", node, len(i.Workspaces))
		if err := j.raise(ctx, i); err != nil {
			return err
		}
	}
	// While no replica of nodeapi listens, machines are not read. The state of such a machine is as unknown as that of one
	// in unknown, and its incident stays open.
	var listens *bool
	var problem error
	err := j.closeOthers(ctx, kindMachine, func(i *incident) bool {
		if lost[i.Key] != nil || unknown[i.Key] || !j.listened {
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
