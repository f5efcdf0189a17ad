package detect

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// NodeDiskFull is the kind of the findings of Disks.
const NodeDiskFull = commonv1.FindingKind_FINDING_KIND_NODE_DISK_FULL

const nextDiskFull = "free room on the host, on the file system of the directory named here; what workspaces keep " +
	"is theirs. The finding and its cordon end " +
	"by themselves once the agent reports room"

// Disks finds the nodes whose agents last reported that their own directories have no room. For a disconnected
// agent its last report counts.
func (d *Detectors) Disks(ctx context.Context) ([]finding.Seen, error) {
	gates, err := gate.DiskFull(ctx, d.db)
	if err != nil {
		return nil, err
	}
	out := make([]finding.Seen, 0, len(gates))
	for _, g := range gates {
		out = append(out, DiskFull(g.NodeID, g.Name, g.Host.GetStateDisk()))
	}
	return out, nil
}

// DiskFull returns the finding about one node.
func DiskFull(nodeID, name string, disk *commonv1.StateDisk) finding.Seen {
	return finding.Seen{
		Kind: NodeDiskFull, Severity: finding.P1, SubjectType: "node", SubjectID: nodeID, NodeID: nodeID,
		NextAction: nextDiskFull, Cordon: true, Certain: true,
		Summary: fmt.Sprintf("the agent of node %s has no room in %s: its state directory takes no new work", name,
			disk.GetPath()),
		Before: map[string]any{"room": "enough for the agent's own files"},
		After: map[string]any{
			"directory": disk.GetPath(), "reported": disk.GetDetail(),
			"since": disk.GetSince().AsTime().UTC().Format(time.RFC3339),
		},
	}
}
