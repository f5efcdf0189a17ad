package view

import (
	"context"
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// Target is a workspace that an operation is requested for, with what a person of its tenant is not shown.
type Target struct {
	Workspace *readmodelv1.Workspace
	Machine   []string      // the id and the name of its node, as far as it has one
	Repair    status.Repair // of its node, for a scope that is bound to a tenant; none for others
}

type machineRow struct {
	NodeID   string   `db:"node_id" expr:"COALESCE(w.node_id::text, '')"`
	Name     string   `db:"name" expr:"COALESCE(w.body->>'node_name', '')"`
	Reason   string   `db:"reason" expr:"COALESCE(v.body->>'reason', '')"`
	Evidence []string `db:"evidence" expr:"ARRAY(SELECT e.value->>'reason' {evidence} mesh.clock())"`
	Ours     []string `db:"ours" expr:"{ours}"`
}

var machineOfWorkspace = pg.Define(pg.RoleReadmodel, "view.machine_of_workspace", `
	SELECT `+strings.NewReplacer("{evidence}", evidenceHeld, "{ours}", fleetReasons).Replace(
	pg.Columns[machineRow]("w"))+` FROM readmodel.workspace w
	LEFT JOIN readmodel.verdict v ON v.node_id = w.node_id
	WHERE w.workspace_id = $1::uuid`)

// Target returns one workspace as Workspace does, and what is known of its node. A repair agrees with what its tenant
// is shown: of an active workspace it follows from the user state, and of another, whose user state has other causes,
// from what the verdict about the node would do to an active one. Verdicts about the control plane are no repair of a
// node: what they stop, the owners refuse.
func (s *Snapshot) Target(ctx context.Context, ref string) (Target, error) {
	w, err := s.Workspace(ctx, ref)
	if err != nil {
		return Target{}, err
	}
	out := Target{Workspace: w}
	if s.scope.Everything() {
		return out, nil
	}
	row, err := pg.One[machineRow](ctx, s.tx, machineOfWorkspace, w.GetWorkspaceId())
	if err != nil {
		return Target{}, fmt.Errorf("read the machine of a workspace: %w", err)
	}
	out.Machine = []string{row.NodeID, row.Name}
	switch w.GetState() {
	case commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
	case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:
		out.Repair = status.RepairOf(w.GetUserState())
	default:
		reason := status.Touching(ofReasons(row.Reason, row.Evidence...), parseReasons(row.Ours)...)
		out.Repair = status.RepairOf(fault.ImpactOf(reason).Family)
	}
	return out, nil
}

// WithoutMachines returns a text of an owner without the names of the target's node, which its tenant is not shown.
func (t Target) WithoutMachines(text string) string { return list.WithoutMachines(text, t.Machine...) }
