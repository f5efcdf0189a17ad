package outages

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/reap"
)

// OldInstance is row 36: a copy of an instance whose epoch is over is started beside the present instance of its
// workspace.
func OldInstance() kit.Drill {
	return kit.Drill{
		Name: "old-instance-wakes",
		Injects: "the directory of an instance, keys and state included, is copied while it runs, as by a snapshot of its " +
			"disk; the workspace is recreated; then " +
			"the agent of the copy is started, at a path of its own, beside the instance of the next epoch",
		Sees: "a finding on the instance of the old epoch: refused as epoch_superseded, and from where; the " +
			"workspace normal",
		Recovers: "by itself: the agent of the copy ends for good, no workload of it was ever started, and the instance " +
			"of the next epoch works on untouched",
		Needs:  "its own mesh: process placement on this host",
		Expect: kit.Verdict{Reason: "epoch_superseded", UserState: "normal", Owner: "lifecycle", Next: "delete it there"},
		Mutation: "the replicas of lifecycle are started anew with a woken_sweep of an hour: the refusal is reported and " +
			"no sweep makes a finding of it in that time; the copy is " +
			"started and refused as before",
		FailsAt: stage.Detected,
		Mutate:  act.Restarted(act.Lifecycle, "GPUAAS_LIFECYCLE_WOKEN_SWEEP=1h"),
		Run:     runOldInstance,
	}
}

func runOldInstance(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	if _, err := m.Cluster(); err != nil {
		return err
	}
	if err := r.Observe(ctx); err != nil {
		return err
	}
	op, err := m.Create(ctx, mesh.FreshName("woken"), nil)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	id, former := op.GetWorkspaceId(), op.GetEpoch()
	r.About(id)
	r.Evidence(op.GetOperationId())
	defer r.Leave(ctx, id)
	if err := m.AwaitServing(ctx, id, former); err != nil {
		return stage.At(stage.Good, err)
	}
	first, err := m.InstancePID(id, former)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	copied, err := m.CopyAgent(first, m.InstanceDir(id, former))
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer r.Finally(ctx, func(ctx context.Context) { _ = copied.End(ctx) }) // of a mesh that is removed as a whole
	again, err := m.Operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RECREATE)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	present := again.GetEpoch()
	r.Evidence(again.GetOperationId())
	if err := m.AwaitServing(ctx, id, present); err != nil {
		return stage.At(stage.Good, err)
	}
	pid, err := m.InstancePID(id, present)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	successor := host.Kernel(pid)
	old := &woken{Copy: copied, mesh: m}
	if old.starts, err = host.WorkloadStarts(copied.Dir); err != nil {
		return stage.At(stage.Good, err)
	}
	if err := r.Inject(ctx, fmt.Sprintf("the agent of a copy of epoch %d's instance started (its identity's digest is "+
		"%.12s) while epoch %d's is process %d",
		former, copied.Identity, present, pid), func(context.Context) error { return old.Start() },
		func(context.Context) error { return old.ran(id, former, present) }); err != nil {
		return err
	}
	if err := r.Detect(ctx, func(ctx context.Context) (kit.Verdict,
		error,
	) {
		return wokenVerdict(ctx, r, id, former)
	}); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	err = r.Recovered(ctx, "the copy's agent ended as replaced, nothing of the copy runs or ever ran, the successor "+
		"untouched", func(ctx context.Context) error {
		if err := old.over(); err != nil {
			return err
		}
		if now := host.Kernel(pid); now.Start != successor.Start || now.State == "Z" {
			return stage.At(stage.Recover, fmt.Errorf("process %d of the successor is not as it was: %+v, was %+v", pid, now,
				successor))
		}
		return m.Serving(ctx, id, present)
	})
	if err != nil {
		return err
	}
	return r.Retire(ctx, id)
}

// wokenVerdict reads the finding on an instance that was started again, and how its workspace looks to its user.
func wokenVerdict(ctx context.Context, r *kit.Run, id string, epoch int64) (kit.Verdict, error) {
	found, err := r.Mesh.Client.Findings.ListFindings(ctx, &readmodelv1.ListFindingsRequest{Workspace: id, PageSize: 100})
	if err != nil {
		return kit.Verdict{}, err
	}
	for _, f := range found.GetItems() {
		if f.GetKind() != commonv1.FindingKind_FINDING_KIND_ENDED_INSTANCE_WOKE ||
			f.GetSubjectId() != id+":"+strconv.FormatInt(epoch, 10) {
			continue
		}
		ws, err := r.Mesh.Workspace(ctx, id)
		r.Evidence(f.GetFindingId(), f.GetNodeId())
		return kit.Verdict{
			Reason: f.GetAfter().GetFields()["reason"].GetStringValue(), UserState: names.Of(ws.GetUserState()),
			Next: f.GetNextAction(),
		}, err
	}
	return kit.Verdict{}, fmt.Errorf("%d findings speak of the workspace, none of the instance of epoch %d",
		len(found.GetItems()), epoch)
}

// woken is a copy of an instance and the state of its agent.
type woken struct {
	*mesh.Copy

	mesh   *mesh.Mesh
	starts map[string]string // of its workloads, as they were copied
}

// exitReplaced is the exit code of an agent whose epoch is over.
const exitReplaced = 5

// ran checks, by the kernel, the files and the launch log, that the fault took effect: an agent ran with the identity
// of an epoch that is over while a later one lives.
func (w *woken) ran(id string, former, present int64) error {
	if err := w.Ran(); err != nil {
		return err
	}
	ledger, err := w.mesh.Launches()
	if err != nil {
		return err
	}
	ended := slices.ContainsFunc(ledger, func(l host.Launch) bool {
		return l.WorkspaceID == id && l.Epoch == former && l.Op == "ended"
	})
	_, live, err := host.CheckLaunches(ledger, id)
	if err == nil && (!ended || live != present) {
		err = fmt.Errorf("the launch log has epoch %d alive, and the end of epoch %d is in it: %t", live, former, ended)
	}
	return err
}

// over checks that the copy's agent has ended as replaced and that none of its workloads was ever started.
func (w *woken) over() error {
	code, err := w.Exit()
	if err != nil {
		return err
	}
	if code != exitReplaced {
		return stage.At(stage.Recover, fmt.Errorf("the agent of the copy ended with %d, not with %d", code, exitReplaced))
	}
	starts, err := host.WorkloadStarts(w.Dir)
	if err != nil {
		return err
	}
	if !maps.Equal(starts, w.starts) {
		return stage.At(stage.Recover, fmt.Errorf("workloads of the copy were started: %v, were %v", starts, w.starts))
	}
	procs, err := reap.Under(w.Dir, agents.Program)
	if err == nil && len(procs) > 0 {
		err = fmt.Errorf("%d processes of the copy run", len(procs))
	}
	return err
}
