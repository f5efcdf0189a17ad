package drill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
)

// wedged is row 29: a step of a saga stops progressing and its worker dies with it.
func wedged() Drill {
	return Drill{
		Name:    "saga-step-wedged",
		Injects: "SIGSTOP of the instance's agent while its workspace is provisioned, then SIGKILL of the replica of lifecycle that had launched it",
		Sees:    "the step stalled on the timeline with likely cause and advice; the workspace temporary",
		Recovers: "reset is refused, cancel, compensations, reset, retry; nothing orphaned at the API, in the driver's ledger and among the processes. Where the " +
			"watchdog is quicker than the person, its recreation has brought the next instance",
		Needs:  "its own mesh: process placement on this host",
		Expect: Verdict{Reason: "step_stalled", UserState: "temporary", Owner: "lifecycle", Next: "cancel"},
		Mutation: "the drivers are started anew with saga.step_stall_seconds at its upper bound, so that their sweep looks for the same silence and reports it " +
			"an hour later; the step wedges as before and the budget stays that of the shorter policy",
		mutated: StageDetected,
		mutate:  blindStalls,
		run:     runWedged,
	}
}

// blindStalls puts the stall budgets out of reach of the sweep, as an operator could, and returns the function that
// puts them back.
func blindStalls(ctx context.Context, r *Run) (func(context.Context) error, error) {
	c, err := r.Mesh.own()
	if err != nil {
		return nil, err
	}
	set := func(values map[string]string) func(context.Context) error {
		return func(ctx context.Context) error {
			for key, value := range values {
				if err := r.Mesh.setPolicy(ctx, key, value); err != nil {
					return err
				}
			}
			return r.Mesh.anew(ctx, c.Lifecycle) // a driver reads them as it starts
		}
	}
	was, far := map[string]string{}, map[string]string{}
	for _, key := range []string{policy.SagaStepStallSeconds, policy.SagaWaitReadyStallSeconds} {
		k, _ := policy.Lookup(key)
		was[key], far[key] = fmt.Sprint(int(r.policy.Duration(key).Seconds())), k.Max
	}
	return set(was), set(far)(ctx)
}

func runWedged(ctx context.Context, r *Run) error {
	m := r.Mesh
	if _, err := m.own(); err != nil {
		return err
	}
	if err := r.observe(ctx); err != nil {
		return err
	}
	name := fresh("wedged")
	op, err := m.create(ctx, name, nil)
	if err != nil {
		return at(StageGood, err)
	}
	ref, id := Tenant+"/"+name, op.GetWorkspaceId()
	r.about(id)
	r.evidence(op.GetOperationId())
	defer r.leave(ctx, id)
	pid, err := m.launched(ctx, id, op.GetEpoch())
	if err != nil {
		return at(StageGood, err)
	}
	agent := kernel(pid)
	worker := kernel(agent.parent)
	err = r.inject(ctx, fmt.Sprintf("SIGSTOP of the instance's agent, process %d, and SIGKILL of its launcher, process %d, as the kernel shows them", pid, agent.parent),
		func(context.Context) error {
			return errors.Join(syscall.Kill(pid, syscall.SIGSTOP), syscall.Kill(agent.parent, syscall.SIGKILL))
		},
		func(context.Context) error { return errors.Join(stopped(pid), gone(agent.parent, worker)) })
	if err != nil {
		return err
	}
	if err := r.detect(ctx, func(ctx context.Context) (Verdict,
		error,
	) {
		return stallVerdict(ctx, m, ref, op.GetOperationId())
	}); err != nil {
		return err
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	if err := stopped(pid); err != nil {
		return at(StageVerdict, fmt.Errorf("the fault went away before it was seen: %w", err))
	}
	return unwedge(ctx, r, id, op)
}

// stallVerdict returns the verdict of the timeline on a run, or an error that names its missing parts.
func stallVerdict(ctx context.Context, m *Mesh, ref, runID string) (Verdict, error) {
	resp, err := m.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: ref})
	if err != nil {
		return Verdict{}, err
	}
	ws := resp.GetWorkspace()
	v := Verdict{UserState: names.Of(ws.GetUserState())}
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
func unwedge(ctx context.Context, r *Run, id string, wedged *lifecyclev1.Operation) error {
	m := r.Mesh
	_, err := m.operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RESET)
	if _, refused := fault.As(err); !refused {
		return at(StageRecover, fmt.Errorf("a reset before the cancel was to be refused and was answered %w",
			cmp.Or(err, errors.New("yes"))))
	}
	r.note("reset before cancel is refused: %v", err)
	if _, err := m.operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_CANCEL); err != nil {
		if ws, readErr := m.workspace(ctx, id); readErr == nil && ws.GetEpoch() > wedged.GetEpoch() {
			r.note("the watchdog was quicker: nothing is left to cancel")
			return unwedged(ctx, r, id, ws.GetEpoch())
		}
		return at(StageRecover, err)
	}
	if err := m.awaitState(ctx, id, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		r.Drill.recoverWithin(m.Scaled)/2); err != nil {
		return at(StageRecover, err)
	}
	if err := await(ctx, "the compensations to be whole", patience,
		func(ctx context.Context) error { return compensated(ctx, m, id, wedged) }); err != nil {
		return at(StageRecover, err)
	}
	r.note("cancelled and compensated %.1f s after the fault", time.Since(r.faultAt).Seconds())
	if _, err := m.operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RESET); err != nil {
		return at(StageRecover, err)
	}
	again, err := m.operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RETRY)
	if err != nil {
		return at(StageRecover, err)
	}
	r.evidence(again.GetOperationId())
	if again.GetEpoch() <= wedged.GetEpoch() {
		return at(StageRecover, fmt.Errorf("the retry runs in epoch %d, the instance of epoch %d has ended", again.GetEpoch(),
			wedged.GetEpoch()))
	}
	return unwedged(ctx, r, id, again.GetEpoch())
}

// unwedged checks that the workspace serves in a later epoch, and ends it.
func unwedged(ctx context.Context, r *Run, id string, epoch int64) error {
	if err := r.recovered(ctx, "active in the next epoch, its endpoint answers, nothing is left of the former one",
		func(ctx context.Context) error {
			return r.Mesh.serving(ctx, id, epoch)
		}); err != nil {
		return err
	}
	return r.retire(ctx, id)
}

// compensated checks that nothing of an epoch is left: its run ended failed with no attempt open, its claims are
// released, its instance is ended in the launch log and empty on the host.
func compensated(ctx context.Context, m *Mesh, id string, op *lifecyclev1.Operation) error {
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
	return m.nothingLeft(ctx, id)
}
