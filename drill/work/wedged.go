package work

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
)

// Wedged is row 29: a step of a saga stops progressing and its worker dies with it.
func Wedged() kit.Drill {
	return kit.Drill{
		Name: "saga-step-wedged",
		Injects: "SIGSTOP of the instance's agent while its workspace is provisioned, then SIGKILL of the replica of " +
			"lifecycle that had launched it",
		Sees: "the step stalled on the timeline with likely cause and advice; the workspace temporary",
		Recovers: "reset is refused, cancel, compensations, reset, retry; nothing orphaned at the API, in the driver's " +
			"ledger and among the processes. Where the " +
			"watchdog is quicker than the person, its recreation has brought the next instance",
		Needs:  "its own mesh: process placement on this host",
		Expect: kit.Verdict{Reason: "step_stalled", UserState: "temporary", Owner: "lifecycle", Next: "cancel"},
		Mutation: "the drivers are started anew with saga.step_stall_seconds at its upper bound, so that their sweep " +
			"looks for the same silence and reports it " +
			"an hour later; the step wedges as before and the budget stays that of the shorter policy",
		FailsAt: stage.Detected,
		Mutate:  blindStalls,
		Run:     runWedged,
	}
}

// blindStalls puts the stall budgets out of reach of the sweep, as an operator could, and returns the function that
// puts them back.
func blindStalls(ctx context.Context, r *kit.Run) (func(context.Context) error, error) {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return nil, err
	}
	set := func(values map[string]string) func(context.Context) error {
		return func(ctx context.Context) error {
			for key, value := range values {
				if err := r.Mesh.SetPolicy(ctx, key, value); err != nil {
					return err
				}
			}
			return r.Mesh.Restart(ctx, c.Lifecycle) // a driver reads them as it starts
		}
	}
	was, far := map[string]string{}, map[string]string{}
	for _, key := range []string{policy.SagaStepStallSeconds, policy.SagaWaitReadyStallSeconds} {
		k, _ := policy.Lookup(key)
		was[key], far[key] = fmt.Sprint(int(r.Policy.Duration(key).Seconds())), k.Max
	}
	return set(was), set(far)(ctx)
}

func runWedged(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	if _, err := m.Cluster(); err != nil {
		return err
	}
	if err := r.Observe(ctx); err != nil {
		return err
	}
	name := mesh.FreshName("wedged")
	op, err := m.Create(ctx, name, nil)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	ref, id := mesh.Tenant+"/"+name, op.GetWorkspaceId()
	r.About(id)
	r.Evidence(op.GetOperationId())
	defer r.Leave(ctx, id)
	pid, err := m.AwaitLaunch(ctx, id, op.GetEpoch())
	if err != nil {
		return stage.At(stage.Good, err)
	}
	agent := host.Kernel(pid)
	worker := host.Kernel(agent.Parent)
	err = r.Inject(ctx, fmt.Sprintf("SIGSTOP of the instance's agent, process %d, and SIGKILL of its launcher, process "+
		"%d, as the kernel shows them", pid, agent.Parent),
		func(context.Context) error {
			return errors.Join(syscall.Kill(pid, syscall.SIGSTOP), syscall.Kill(agent.Parent, syscall.SIGKILL))
		},
		func(context.Context) error { return errors.Join(host.Stopped(pid), host.Gone(agent.Parent, worker)) })
	if err != nil {
		return err
	}
	if err := r.Detect(ctx, func(ctx context.Context) (kit.Verdict,
		error,
	) {
		return stallVerdict(ctx, m, ref, op.GetOperationId())
	}); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := host.Stopped(pid); err != nil {
		return stage.At(stage.Verdict, fmt.Errorf("the fault went away before it was seen: %w", err))
	}
	return unwedge(ctx, r, id, op)
}

// stallVerdict returns the verdict of the timeline on a run, or an error that names its missing parts.
func stallVerdict(ctx context.Context, m *mesh.Mesh, ref, runID string) (kit.Verdict, error) {
	resp, err := m.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: ref})
	if err != nil {
		return kit.Verdict{}, err
	}
	ws := resp.GetWorkspace()
	v := kit.Verdict{UserState: names.Of(ws.GetUserState())}
	for _, run := range resp.GetRuns() {
		if run.GetRunId() == runID {
			v.Reason, _, _ = strings.Cut(run.GetStuckReason(), ":")
			if run.GetWhyWaiting() == "" {
				return v, errors.New("the run does not say why it is waiting")
			}
		}
	}
	for _, i := range resp.GetItems() {
		if i.GetRunId() != runID || !i.GetStalled() {
			continue
		}
		if i.GetLikelyCause() == "" || i.GetAdvice() == "" || !ws.GetStalled() || v.Reason == "" {
			return v, fmt.Errorf("the step %q is flagged without a cause, advice, or the run's word (%q)", i.GetName(), v.Reason)
		}
		v.Next = i.GetAdvice()
		return v, nil
	}
	return v, fmt.Errorf("no step of %d is flagged; the workspace is at %q: %s", len(resp.GetItems()), ws.GetCurrentStep(),
		ws.GetWhyWaiting())
}

// unwedge follows the runbook, with its first two steps tried in the wrong order too.
func unwedge(ctx context.Context, r *kit.Run, id string, wedged *lifecyclev1.Operation) error {
	m := r.Mesh
	_, err := m.Operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RESET)
	if _, refused := fault.As(err); !refused {
		return stage.At(stage.Recover, fmt.Errorf("a reset before the cancel was to be refused and was answered %w",
			cmp.Or(err, errors.New("yes"))))
	}
	r.Note("reset before cancel is refused: %v", err)
	if _, err := m.Operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_CANCEL); err != nil {
		if ws, readErr := m.Workspace(ctx, id); readErr == nil && ws.GetEpoch() > wedged.GetEpoch() {
			r.Note("the watchdog was quicker: nothing is left to cancel")
			return unwedged(ctx, r, id, ws.GetEpoch())
		}
		return stage.At(stage.Recover, err)
	}
	if err := m.AwaitState(ctx, id, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		r.Drill.RecoverWithin(m.Scaled)/2); err != nil {
		return stage.At(stage.Recover, err)
	}
	if err := await.Until(ctx, "the compensations to be whole", await.Patience,
		func(ctx context.Context) error { return compensated(ctx, m, id, wedged) }); err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Note("cancelled and compensated %.1f s after the fault", time.Since(r.FaultAt).Seconds())
	if _, err := m.Operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RESET); err != nil {
		return stage.At(stage.Recover, err)
	}
	again, err := m.Operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RETRY)
	if err != nil {
		return stage.At(stage.Recover, err)
	}
	r.Evidence(again.GetOperationId())
	if again.GetEpoch() <= wedged.GetEpoch() {
		return stage.At(stage.Recover,
			fmt.Errorf("the retry runs in epoch %d, the instance of epoch %d has ended", again.GetEpoch(),
				wedged.GetEpoch()))
	}
	return unwedged(ctx, r, id, again.GetEpoch())
}

// unwedged checks that the workspace serves in a later epoch, and ends it.
func unwedged(ctx context.Context, r *kit.Run, id string, epoch int64) error {
	if err := r.Recovered(ctx, "active in the next epoch, its endpoint answers, nothing is left of the former one",
		func(ctx context.Context) error {
			return r.Mesh.Serving(ctx, id, epoch)
		}); err != nil {
		return err
	}
	return r.Retire(ctx, id)
}

// compensated checks that nothing of an epoch is left: its run ended failed with no attempt open, its claims are
// released, its instance is ended in the launch log and empty on the host.
func compensated(ctx context.Context, m *mesh.Mesh, id string, op *lifecyclev1.Operation) error {
	resp, err := m.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: id})
	if err != nil {
		return err
	}
	undone := 0
	for _, run := range resp.GetRuns() {
		if run.GetRunId() == op.GetOperationId() && run.GetState() != commonv1.RunState_RUN_STATE_FAILED {
			return fmt.Errorf("the run is %s", names.Of(run.GetState()))
		}
	}
	for _, i := range resp.GetItems() {
		if s := i.GetState(); s == commonv1.AttemptState_ATTEMPT_STATE_RUNNING ||
			s == commonv1.AttemptState_ATTEMPT_STATE_WAITING {
			return fmt.Errorf("%s is %s", i.GetName(), names.Of(s))
		}
		if i.GetDirection() == commonv1.Direction_DIRECTION_UNDO &&
			i.GetState() == commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED {
			undone++
		}
	}
	if undone == 0 {
		return errors.New("the timeline shows nothing undone")
	}
	return m.NothingLeft(ctx, id)
}
