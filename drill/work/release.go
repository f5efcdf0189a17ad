package work

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	"github.com/gpuaas/mesh/mesh/reap"
)

// ReleaseFailed is row 30: the machine of a workspace's allocation is disconnected while the workspace is released.
func ReleaseFailed() kit.Drill {
	return kit.Drill{
		Name: "release-failed-stuck",
		Injects: "the agent of the machine that holds a workspace is killed and stays away, its workload runs on, and the " +
			"workspace is decommissioned; once for each " +
			"way out",
		Sees: "the hold `release_failed` with occupancy `cleanup` and its reason, the machine cordoned; the workspace " +
			"wants an operator",
		Recovers: "the first hold by retry-release after the machine's return; the second by force-release with evidence " +
			"while it is away (a wrong fence and orphans " +
			"that were not acknowledged are refused), and the machine reaps the orphans and is uncordoned as it returns",
		Needs: "its own mesh: a machine whose agent can be killed",
		Expect: kit.Verdict{
			Reason: "release_failed", UserState: "operator_action_required", Owner: "lifecycle",
			Next: "retry-release",
		},
		Mutation: "the replicas of lifecycle are started anew with a release_deadline of an hour: the clock that is to " +
			"give up the release runs as before and never " +
			"gets there; the machine is away as before",
		FailsAt: stage.Detected,
		Scale:   15, // the deadline of a release is two minutes in production and five seconds here
		Mutate:  act.Restarted(act.Lifecycle, "GPUAAS_LIFECYCLE_RELEASE_DEADLINE=1h"),
		Run:     runRelease,
	}
}

func runRelease(ctx context.Context, r *kit.Run) error {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return err
	}
	ways := []func(context.Context, *kit.Run, mesh.Held, *lifecyclev1.Allocation) error{retried, forced}
	if r.Control != kit.None {
		ways = ways[:1] // both begin alike
	}
	var detected, recovered float64
	for _, way := range ways {
		r.Subject = nil
		if err := oneRelease(ctx, r, c, way); err != nil {
			return err
		}
		detected, recovered = max(detected, r.Result.DetectedSeconds), max(recovered, r.Result.RecoveredSeconds)
	}
	r.Result.DetectedSeconds, r.Result.RecoveredSeconds = detected, recovered
	return nil
}

func oneRelease(ctx context.Context, r *kit.Run, c *cluster.Cluster,
	way func(context.Context, *kit.Run, mesh.Held, *lifecyclev1.Allocation) error,
) error {
	m := r.Mesh
	h, err := mesh.PlaceOnMachine(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.About(h.ID, h.Node)
	defer r.Leave(ctx, h.ID)
	defer h.Machine.Start() //nolint:errcheck // it runs already, unless the drill failed before
	if err := r.Observe(ctx); err != nil {
		return err
	}
	pid := h.Machine.PID()
	agent := host.Kernel(pid)
	err = r.Inject(ctx, fmt.Sprintf("the agent of %s, process %d, is gone as the kernel shows, and the workload that "+
		"it ran still answers", h.Machine.Name(), pid),
		func(ctx context.Context) error { return h.Machine.Stop(ctx) },
		func(ctx context.Context) error { return errors.Join(host.Gone(pid, agent), mesh.Answers(ctx, h.URL)) })
	if err != nil {
		return err
	}
	op, err := m.Operate(ctx, h.ID, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION)
	if err != nil {
		return stage.At(stage.Injected, err)
	}
	r.Evidence(op.GetOperationId())
	var allocated *lifecyclev1.Allocation
	err = r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		var err error
		if allocated, err = newestAllocation(ctx, m, h.ID); err != nil {
			return kit.Verdict{}, err
		}
		return failedRelease(ctx, m, h, allocated)
	})
	if err != nil {
		return err
	}
	r.Evidence(allocated.GetAllocationId())
	r.Note("allocation %s is %s, occupancy %s: %s", allocated.GetAllocationId(), names.Of(allocated.GetState()),
		allocated.GetOccupancy(),
		allocated.GetLastError())
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := mesh.Answers(ctx, h.URL); err != nil {
		return stage.At(stage.Verdict, fmt.Errorf("the fault went away before it was seen: the workload has ended: %w", err))
	}
	return way(ctx, r, h, allocated)
}

// newestAllocation returns the newest allocation of a workspace.
func newestAllocation(ctx context.Context, m *mesh.Mesh, id string) (*lifecyclev1.Allocation, error) {
	resp, err := m.Client.Query.ListAllocations(ctx, &readmodelv1.ListAllocationsRequest{PageSize: 100, WorkspaceId: id})
	if err != nil {
		return nil, err
	}
	if len(resp.GetItems()) == 0 {
		return nil, errors.New("the workspace has no allocation")
	}
	return slices.MaxFunc(resp.GetItems(), func(a, b *lifecyclev1.Allocation) int {
		return cmp.Compare(a.GetEpoch(), b.GetEpoch())
	}), nil
}

// failedRelease returns the complete verdict on an allocation whose release has failed: occupied for cleanup, with a
// reason, on a machine that takes nothing new.
func failedRelease(
	ctx context.Context, m *mesh.Mesh, h mesh.Held, allocated *lifecyclev1.Allocation,
) (kit.Verdict, error) {
	ws, err := m.Workspace(ctx, h.ID)
	if err != nil {
		return kit.Verdict{}, err
	}
	node, err := m.Node(ctx, h.Node)
	if err != nil {
		return kit.Verdict{}, err
	}
	v := kit.Verdict{Reason: names.Of(allocated.GetState()), UserState: names.Of(ws.GetUserState())}
	if allocated.GetState() != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED ||
		allocated.GetOccupancy() != "cleanup" ||
		allocated.GetLastError() == "" ||
		!node.GetGate().GetCordoned() {
		return v, fmt.Errorf("the hold is %s, its occupancy %s, its error %q; the machine is cordoned: %t; the workspace "+
			"is %s at %q: %s", v.Reason,
			allocated.GetOccupancy(), allocated.GetLastError(), node.GetGate().GetCordoned(), names.Of(ws.GetState()),
			ws.GetCurrentStep(), ws.GetWhyWaiting())
	}
	return v, nil
}

// retried is the first remedy: the machine returns, and the release is tried again.
func retried(ctx context.Context, r *kit.Run, h mesh.Held, allocated *lifecyclev1.Allocation) error {
	if err := startAgain(ctx, r, h); err != nil {
		return err
	}
	retry := func(ctx context.Context) error {
		_, err := await.Answer(ctx, "retry-release", func(ctx context.Context) (*readmodelv1.RetryReleaseResponse, error) {
			return r.Mesh.Client.Release.RetryRelease(ctx, &readmodelv1.RetryReleaseRequest{
				Request: &lifecyclev1.RetryReleaseRequest{AllocationId: allocated.GetAllocationId(), Reason: "drill"},
			})
		})
		return err
	}
	if err := retry(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	tried := allocated.GetFence()
	return r.Recovered(ctx, "released after the machine's return: no claim, no workload is left, the machine takes "+
		"new work", func(ctx context.Context) error {
		err := freed(ctx, r.Mesh, h, allocated)
		if err == nil {
			return nil
		}
		// Five seconds may be too short again for a machine that is busy: the drill retries once more, as an operator would.
		now, readErr := newestAllocation(ctx, r.Mesh, h.ID)
		if readErr != nil || now.GetState() != commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED ||
			now.GetFence() <= tried {
			return err
		}
		tried = now.GetFence()
		r.Note("the release was late again: %s", now.GetLastError())
		return errors.Join(err, retry(ctx))
	})
}

// forced is the second remedy: the allocation is given up with evidence while the machine is disconnected, and cleaned
// when it returns.
func forced(ctx context.Context, r *kit.Run, h mesh.Held, allocated *lifecyclev1.Allocation) error {
	m := r.Mesh
	force := func(ctx context.Context, dry bool, fence int64, orphans ...string) (*lifecyclev1.ForceReleaseResponse,
		error,
	) {
		resp, err := m.Client.Release.ForceRelease(ctx,
			&readmodelv1.ForceReleaseRequest{Request: &lifecyclev1.ForceReleaseRequest{
				AllocationId: allocated.GetAllocationId(), ExpectedFence: fence,
				FencedProof: commonv1.FencedProof_FENCED_PROOF_NETWORK_ISOLATED, AckOrphans: orphans,
				Reason: "drill: the machine's agent is gone", DryRun: dry,
			}})
		return resp.GetResponse(), err
	}
	shown, err := m.Client.Release.GetAllocation(ctx,
		&readmodelv1.GetAllocationRequest{AllocationId: allocated.GetAllocationId()})
	if err != nil {
		return stage.At(stage.Recover, err)
	}
	allocated = shown.GetAllocation()
	if _, err := force(ctx, false, allocated.GetFence()+1); !act.Refused(err) {
		return stage.At(stage.Recover, fmt.Errorf("a force-release with another fence was to be refused and was answered %w",
			cmp.Or(err, errors.New("yes"))))
	}
	if _, err := force(ctx, false, allocated.GetFence()); !act.Refused(err) {
		return stage.At(stage.Recover,
			fmt.Errorf("a force-release without its orphans acknowledged was to be refused and was answered %w",
				cmp.Or(err, errors.New("yes"))))
	}
	var orphans []string
	for _, c := range shown.GetClaims() {
		orphans = append(orphans, c.GetClaimId())
	}
	if plan, err := force(ctx, true, allocated.GetFence(), orphans...); err == nil {
		orphans = nil
		for _, c := range plan.GetClaims() {
			orphans = append(orphans, c.GetClaimId())
		}
	}
	_, err = await.Answer(ctx, "force-release", func(ctx context.Context) (*lifecyclev1.ForceReleaseResponse, error) {
		return force(ctx, false, allocated.GetFence(), orphans...)
	})
	if err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Evidence(orphans...)
	if err := await.Until(ctx, "the hold to be released on a cordoned machine", await.Limit,
		func(ctx context.Context) error { return givenUp(ctx, m, h) }); err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Note("released by force with %d claims left as orphans, the machine cordoned", len(orphans))
	if err := startAgain(ctx, r, h); err != nil {
		return err
	}
	return r.Recovered(ctx, "the machine is back and has reaped the orphans: no claim, no workload is left, it takes "+
		"new work", func(ctx context.Context) error {
		return freed(ctx, m, h, allocated)
	})
}

// startAgain starts the machine's agent again and waits for its session.
func startAgain(ctx context.Context, r *kit.Run, h mesh.Held) error {
	return stage.At(stage.Recover, r.Mesh.StartMachine(ctx, h.Machine))
}

// givenUp checks that an allocation is released on a person's attestation: the uncleaned remains are orphaned and the
// machine takes no new work.
func givenUp(ctx context.Context, m *mesh.Mesh, h mesh.Held) error {
	allocated, err := newestAllocation(ctx, m, h.ID)
	if err != nil {
		return err
	}
	claims, err := m.Claims(ctx, h.ID)
	if err != nil {
		return err
	}
	orphaned := slices.ContainsFunc(claims, func(c *lifecyclev1.Claim) bool { return c.GetOrphanedAt() != nil })
	node, err := m.Node(ctx, h.Node)
	if err != nil {
		return err
	}
	if allocated.GetState() != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || !orphaned ||
		!node.GetGate().GetCordoned() {
		return fmt.Errorf("it is %s: %s, of %d claims one is orphaned: %t, the machine is cordoned: %t",
			names.Of(allocated.GetState()), allocated.GetLastError(), len(claims), orphaned, node.GetGate().GetCordoned())
	}
	return nil
}

// freed checks that nothing of an allocation is left: at the API, and in the machine's own list of processes.
func freed(ctx context.Context, m *mesh.Mesh, h mesh.Held, was *lifecyclev1.Allocation) error {
	allocated, err := newestAllocation(ctx, m, h.ID)
	if err != nil {
		return err
	}
	if allocated.GetAllocationId() != was.GetAllocationId() ||
		allocated.GetState() != commonv1.AllocationState_ALLOCATION_STATE_RELEASED || allocated.GetOccupancy() != "none" {
		return fmt.Errorf("the hold is %s, its occupancy %s: %s", names.Of(allocated.GetState()),
			allocated.GetOccupancy(),
			allocated.GetLastError())
	}
	ws, err := m.Workspace(ctx, h.ID)
	if err != nil {
		return err
	}
	if ws.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED {
		return fmt.Errorf("the workspace is %s at %q: %s", names.Of(ws.GetState()), ws.GetCurrentStep(), ws.GetWhyWaiting())
	}
	claims, err := m.Claims(ctx, h.ID)
	if err != nil {
		return err
	}
	if len(claims) > 0 {
		return fmt.Errorf("%d claims are not released, such as %s %s (orphaned: %t)", len(claims), claims[0].GetKind(),
			claims[0].GetName(), claims[0].GetOrphanedAt() != nil)
	}
	node, err := m.Node(ctx, h.Node)
	if err != nil {
		return err
	}
	if gate := node.GetGate(); gate.GetCordoned() || !node.GetConnected() {
		return fmt.Errorf("the machine is connected: %t, cordoned: %t %s", node.GetConnected(), gate.GetCordoned(),
			gate.GetCordonReason())
	}
	return noWorkload(h)
}

// noWorkload checks that no process of a workspace runs on its machine.
func noWorkload(h mesh.Held) error {
	procs, err := reap.Under(h.Dir, agents.Program)
	if err != nil {
		return err
	}
	for _, p := range procs {
		if line := strings.Join(p.Args, " "); strings.Contains(line, h.ID) || (len(p.Args) > 1 && p.Args[1] != "run") {
			return fmt.Errorf("process %d runs on the machine: %s", p.PID, line)
		}
	}
	return nil
}
