package hosts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// DiskFull is row 37: the state directory of a machine's agent fills up, then has room again.
func DiskFull() kit.Drill {
	return kit.Drill{
		Name: "node-disk-full",
		Injects: "the state directory of a machine's agent stands on a small file system of its own, which is filled to " +
			"the last block while a workspace serves " +
			"there",
		Sees: "the diagnostic `state_disk_full` on the node and the finding `node_disk_full`; the node cordoned by the " +
			"finding and out of placement; a create says " +
			"that there is no room; the agent keeps its stream and the workspace serves on",
		Recovers: "by itself: as soon as there is room the diagnostic and the finding end, and the next workspace is made " +
			"on that machine",
		Needs: "its own mesh, and root: it mounts a file system",
		Expect: kit.Verdict{
			Reason: "node_disk_full", UserState: "operator_action_required", Owner: "agent / host",
			Next: "free room",
		},
		Mutation: "the agent is started with --room-every of an hour: the check that is to notice the disk runs as before " +
			"and never gets there; the disk fills as " +
			"before, and writes to it are refused",
		FailsAt: stage.Detected,
		Scale:   10, // the agent checks the free space every few seconds in either form
		Host:    host.MayMount,
		Run:     runDiskFull,
	}
}

// smallMachine is a machine whose agent keeps its state on a small disk.
type smallMachine struct {
	machine *agents.Agent
	node    string // id
	state   string // directory
	filler  string
}

func runDiskFull(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	s, back, err := onSmallDisk(ctx, r, c)
	defer back()
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.About(s.node)
	first, err := mesh.PlaceOnMachine(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.About(first.ID)
	defer r.Leave(ctx, first.ID)
	if first.Node != s.node {
		return stage.At(stage.Good, fmt.Errorf("the workspace stands on %s, not on %s", first.Machine.Name(),
			s.machine.Name()))
	}
	pid := s.machine.PID()
	agent := host.Kernel(pid)
	err = r.Inject(ctx, fmt.Sprintf("the disk of %s's state directory filled: a write of this drill's own is refused "+
		"for want of room", s.machine.Name()),
		func(context.Context) error { return host.Fill(s.filler) },
		func(context.Context) error { return host.RefusesWrites(s.state) })
	if err != nil {
		return err
	}
	var finding string
	err = r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		v, id, err := withoutRoom(ctx, m, s.node)
		finding = id
		return v, err
	})
	if err != nil {
		return err
	}
	r.Evidence(finding)
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := keepsWorking(ctx, r, first, pid, agent); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := notPlaced(ctx, r); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := host.RefusesWrites(s.state); err != nil {
		return stage.At(stage.Verdict, fmt.Errorf("the fault went away before it was seen: %w", err))
	}
	if err := os.Remove(s.filler); err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Note("the disk has room again")
	return takesWorkAgain(ctx, r, s, first, finding, pid, agent)
}

// takesWorkAgain checks that every effect of the fault ends by itself and that the next workspace is made on the
// machine.
func takesWorkAgain(ctx context.Context, r *kit.Run, s smallMachine, first mesh.Held, finding string, pid int,
	agent host.Process,
) error {
	m := r.Mesh
	err := await.Until(ctx, "the diagnostic and the finding to end", r.Drill.RecoverWithin(m.Scaled),
		func(ctx context.Context) error {
			return withRoom(ctx, m, s.node, finding)
		})
	if err != nil {
		return stage.At(stage.Recover, err)
	}
	op, err := m.Create(ctx, mesh.FreshName("disk"),
		&lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC})
	if err != nil {
		return stage.At(stage.Recover, err)
	}
	r.About(op.GetWorkspaceId())
	defer r.Leave(ctx, op.GetWorkspaceId())
	err = r.Recovered(ctx, "diagnostic and finding over, no cordon, and a new workspace serves on the machine",
		func(ctx context.Context) error {
			if err := m.Serving(ctx, op.GetWorkspaceId(), op.GetEpoch()); err != nil {
				return err
			}
			ws, err := m.Workspace(ctx, op.GetWorkspaceId())
			if err == nil && ws.GetNodeId() != s.node {
				err = fmt.Errorf("it stands on %s", ws.GetNodeName())
			}
			return err
		})
	if err != nil {
		return err
	}
	if err := keepsWorking(ctx, r, first, pid, agent); err != nil {
		return stage.At(stage.Evidence, err)
	}
	return errors.Join(r.Retire(ctx, op.GetWorkspaceId()), r.Retire(ctx, first.ID))
}

// keepsWorking checks that the agent is the same process as before, with its stream, and that the workloads on the
// machine serve.
func keepsWorking(ctx context.Context, r *kit.Run, first mesh.Held, pid int, agent host.Process) error {
	if now := host.Kernel(pid); now.Start != agent.Start || now.State == "" || now.State == "Z" {
		return fmt.Errorf("the agent, process %d, has ended", pid)
	}
	node, err := r.Mesh.Node(ctx, first.Node)
	if err != nil {
		return err
	}
	if !node.GetConnected() {
		return errors.New("the agent has lost its stream")
	}
	return mesh.Answers(ctx, first.URL)
}

// notPlaced requests a workspace that only the machine without room could take, and checks that its timeline has the
// reason why it is not made.
func notPlaced(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	op, err := m.Create(ctx, mesh.FreshName("full"),
		&lifecyclev1.WorkspaceSpec{Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC})
	if err != nil {
		return err
	}
	r.About(op.GetWorkspaceId())
	defer r.Leave(ctx, op.GetWorkspaceId())
	return await.Until(ctx, "the timeline to say that there is no room", await.Patience, func(ctx context.Context) error {
		ws, err := m.Workspace(ctx, op.GetWorkspaceId())
		if err != nil {
			return err
		}
		if ws.GetNodeId() != "" {
			return stage.At(stage.Verdict, fmt.Errorf("the workspace was placed on %s", ws.GetNodeName()))
		}
		if said := ws.GetLastError() + ws.GetWhyWaiting(); !strings.Contains(said, "no room") {
			return fmt.Errorf("it is %s at %q: %s", names.Of(ws.GetState()), ws.GetCurrentStep(), said)
		}
		return nil
	})
}

// withoutRoom returns the complete verdict on a node whose disk is full: its reason, the diagnostic of its host, the
// finding, and the finding's cordon.
func withoutRoom(ctx context.Context, m *mesh.Mesh, id string) (kit.Verdict, string, error) {
	node, err := m.Node(ctx, id)
	if err != nil {
		return kit.Verdict{}, "", err
	}
	v := kit.Verdict{Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction()}
	finding, err := diskFinding(ctx, m, id)
	if err != nil {
		return v, "", err
	}
	gate := node.GetGate()
	full := names.Of(commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL)
	if v.Reason != full || finding == "" || !diagnosed(node, false) || !gate.GetCordoned() ||
		gate.GetCordonedBy() != "finding:"+finding {
		return v, finding, fmt.Errorf("the node is %s %q, its finding is %q, its diagnostics are %v, it is cordoned %t by %q",
			v.UserState, v.Reason, finding, node.GetSession().GetDiagnostics(), gate.GetCordoned(), gate.GetCordonedBy())
	}
	return v, finding, nil
}

// withRoom checks that all of that is over.
func withRoom(ctx context.Context, m *mesh.Mesh, id, finding string) error {
	node, err := m.Node(ctx, id)
	if err != nil {
		return err
	}
	open, err := diskFinding(ctx, m, id)
	if err != nil {
		return err
	}
	if node.GetReason() != "" || open != "" || !diagnosed(node, true) || node.GetGate().GetCordoned() {
		return fmt.Errorf("the node's reason is %q, finding %q (of %q) is open, its diagnostics are %v, it is cordoned %t",
			node.GetReason(), open, finding,
			node.GetSession().GetDiagnostics(), node.GetGate().GetCordoned())
	}
	return nil
}

// diagnosed reports whether the node's session carries the diagnostic of a full disk, over or not.
func diagnosed(node *readmodelv1.Node, over bool) bool {
	return slices.ContainsFunc(node.GetSession().GetDiagnostics(), func(d *commonv1.Diagnostic) bool {
		return d.GetCode() == commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL && (d.GetEndedAt() != nil) == over
	})
}

// diskFinding returns the open finding about a node's disk; empty if there is none.
func diskFinding(ctx context.Context, m *mesh.Mesh, node string) (string, error) {
	resp, err := m.Client.Findings.ListFindings(ctx, &readmodelv1.ListFindingsRequest{PageSize: 500})
	if err != nil {
		return "", err
	}
	for _, f := range resp.GetItems() {
		if f.GetKind() == commonv1.FindingKind_FINDING_KIND_NODE_DISK_FULL && f.GetNodeId() == node &&
			f.GetResolvedAt() == nil {
			return f.GetFindingId(), nil
		}
	}
	return "", nil
}

// onSmallDisk gives the first machine a state directory on a small file system, with everything that was in it, and
// keeps the others out of placement. The returned function puts everything back, as well as it can.
func onSmallDisk(ctx context.Context, r *kit.Run, c *cluster.Cluster) (smallMachine, func(), error) {
	m, machine := r.Mesh, c.Nodes[0]
	state := filepath.Join(mesh.MachineDir(c, machine), "state")
	s := smallMachine{machine: machine, state: state, filler: filepath.Join(state, "filler")}
	var undo []func(ctx context.Context) error
	back := func() {
		r.Finally(ctx, func(ctx context.Context) {
			for _, step := range slices.Backward(undo) {
				if err := step(ctx); err != nil {
					r.Note("not put back: %v", err)
				}
			}
		})
	}
	for _, a := range c.Nodes {
		node, err := m.Node(ctx, a.Name())
		if err != nil {
			return s, back, err
		}
		if a == machine {
			s.node = node.GetNodeId()
			continue
		}
		if err := act.Cordon(ctx, m, node.GetNodeId(), true); err != nil {
			return s, back, err
		}
		undo = append(undo, func(ctx context.Context) error { return act.Cordon(ctx, m, node.GetNodeId(), false) })
	}
	if err := machine.Stop(ctx); err != nil {
		return s, back, err
	}
	undo = append(undo, func(ctx context.Context) error { return m.StartMachine(ctx, machine) })
	if err := host.MoveOnto(ctx, s.state, true); err != nil {
		return s, back, err
	}
	undo = append(undo, func(ctx context.Context) error {
		return errors.Join(machine.Stop(ctx), host.MoveOnto(ctx, s.state, false))
	})
	if r.Control == kit.Mutated {
		machine.SetArgs("--room-every", "1h")
	}
	return s, back, m.StartMachine(ctx, machine)
}
