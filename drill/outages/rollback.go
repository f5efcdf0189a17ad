package outages

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/restored"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/agents"
)

// NodesAhead is row 34: a database that is older than what its nodes remember.
func NodesAhead() kit.Drill {
	return kit.Drill{
		Name: "control-plane-rollback",
		Injects: "a machine that serves a workspace opens sessions; then all services are stopped, the database's " +
			"directory is replaced by a copy from before these, and everything is started again",
		Sees: "rollback mode with that node as its evidence, and one incident; the node connects as the same instance, " +
			"with no alarm and no hold; the workload serves, and was never started again",
		Recovers: "`rollback accept`; the node has the generation that it remembers or a higher one, and completes a task",
		Needs:    "its own mesh: Postgres on this host, and the balancer before the node API",
		Expect: kit.Verdict{
			Reason: "control_plane_rollback", UserState: "normal", Owner: "control plane", Next: "gpuaas rollback accept",
		},
		Mutation: "no agent comes through to the node API, so that none shows a number that the database does not have; " +
			"the database is as old as before",
		FailsAt: stage.Detected,
		Scale:   1, // an agent waits for up to half a minute between two attempts, which no policy shortens
		Run:     runRollback,
	}
}

func runRollback(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	held, err := mesh.PlaceOnMachine(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.About(held.ID, held.Node)
	defer r.Leave(ctx, held.ID)
	if m.Scaled {
		if err := m.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, patientAfter); err != nil {
			return stage.At(stage.Good, err)
		}
		before, _ := r.Policy.Get(policy.HeartbeatStaleAfterSeconds)
		defer r.Finally(ctx, func(ctx context.Context) {
			r.Left("the policy", m.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, before))
		})
	}
	h := &history{run: r, held: held}
	b, err := restored.Take(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	if err := h.goOn(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	between := func(context.Context) error { return nil }
	if r.Control == kit.Mutated {
		between = func(context.Context) error { return b.HideNewer(c) }
		defer func() { _ = b.ShowNewer(ctx, m, c) }() // the drill has failed by then, as it had to
	}
	err = r.Inject(ctx, fmt.Sprintf("the database is put back to a copy with generation %d of %s, which has "+
		"generation %d", h.copied, held.Machine.Name(), h.before.GetConfirmed()),
		func(ctx context.Context) error { return b.PutBack(ctx, c, between) },
		func(context.Context) error { return b.InPlace(c) })
	if err != nil {
		return err
	}
	r.FaultAt = time.Now() // the API cannot report anything before the control plane's return
	if err := r.Detect(ctx, h.verdict); err != nil {
		return err
	}
	if n, err := agents.Await(ctx, m.Client, c.Nodes, await.Settle); err != nil || n < len(c.Nodes) {
		return stage.At(stage.Verdict, errors.Join(err, fmt.Errorf("%d of %d machines are connected", n, len(c.Nodes))))
	}
	if err := h.bystander(ctx); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := h.untouched(ctx); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := restored.Accept(ctx, m); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the mode over, every node connected as before, and a task of the node completed", h.recovered)
	if err != nil {
		return err
	}
	if err := h.untouched(ctx); err != nil {
		return stage.At(stage.Evidence, err)
	}
	return r.Retire(ctx, held.ID)
}

// history is what the database is to lose.
type history struct {
	run    *kit.Run
	held   mesh.Held
	copied int64                    // the node's generation in the copy of the database
	before *recoveryv1.NodeIdentity // as the database had it last
	starts map[string]string        // of the workloads
	closed int                      // incidents of rollbacks before
	probe  string
}

// goOn has the machine's agent open sessions that the copy of the database does not have.
func (h *history) goOn(ctx context.Context) error {
	m := h.run.Mesh
	node, err := m.Node(ctx, h.held.Node)
	if err != nil {
		return err
	}
	h.copied = node.GetIdentity().GetConfirmed()
	for range 2 {
		h.held.Machine.LetDie()
		if err := h.held.Machine.Kill9(); err != nil {
			return err
		}
		if err := m.StartMachine(ctx, h.held.Machine); err != nil {
			return err
		}
	}
	if node, err = m.Node(ctx, h.held.Node); err != nil {
		return err
	}
	if is := node.GetIdentity().GetConfirmed(); is <= h.copied {
		return fmt.Errorf("%s is in generation %d, and the copy of the database has %d: there is nothing to remember",
			h.held.Machine.Name(), is, h.copied)
	}
	h.before = node.GetIdentity()
	if h.starts, err = host.WorkloadStarts(h.held.Dir); err != nil {
		return err
	}
	closed, err := restored.Incidents(ctx, m)
	h.closed = len(closed)
	return err
}

// verdict reads the mode, whose evidence the node is, and its one incident.
func (h *history) verdict(ctx context.Context) (kit.Verdict, error) {
	m := h.run.Mesh
	answer, err := m.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
	if err != nil {
		return kit.Verdict{}, err
	}
	mode := answer.GetRollback()
	if !mode.GetActive() || !slices.ContainsFunc(mode.GetEvidence(), func(e *recoveryv1.RollbackEvidence) bool {
		return e.GetKind() == recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_NODE_AHEAD &&
			e.GetSubject() == h.held.Node
	}) {
		return kit.Verdict{}, fmt.Errorf("rollback mode is set %t, and none of %d pieces of evidence is of the node",
			mode.GetActive(), mode.GetEvidenceTotal())
	}
	incidents, err := restored.Incidents(ctx, m)
	if err != nil {
		return kit.Verdict{}, err
	}
	if n := len(incidents) - h.closed; n != 1 || incidents[0].GetClosedAt() != nil ||
		incidents[0].GetSeverity() != commonv1.Severity_SEVERITY_P0 {
		return kit.Verdict{}, fmt.Errorf("%d incidents came of it", n)
	}
	h.run.Evidence(incidents[0].GetIncidentId())
	return kit.Verdict{
		Reason: names.Of(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK), Next: incidents[0].GetNextAction(),
	}, nil
}

// bystander waits until the agent of the bystander is back, whose session ended with the services, and takes what its
// user sees then.
func (h *history) bystander(ctx context.Context) error {
	return await.Until(ctx, "the bystander's agent", await.Settle, func(ctx context.Context) error {
		w, err := h.run.Mesh.Workspace(ctx, mesh.Tenant+"/"+mesh.Bystander)
		if err == nil && !w.GetAgentConnected() {
			err = errors.New("it is not connected")
		}
		h.run.Verdict.UserState = names.Of(w.GetUserState())
		h.run.Result.UserState = h.run.Verdict.UserState
		return err
	})
}

// untouched checks that the node is the same instance, active and without an alarm, and that its workload serves and
// was not started again.
func (h *history) untouched(ctx context.Context) error {
	node, err := h.run.Mesh.Node(ctx, h.held.Node)
	if err != nil {
		return err
	}
	is := node.GetIdentity()
	if is.GetNodeInstanceId() != h.before.GetNodeInstanceId() || is.GetAlarm() != "" ||
		is.GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		return fmt.Errorf("the identity is %v, was %v", is, h.before)
	}
	if is.GetConfirmed() < h.before.GetConfirmed() {
		return fmt.Errorf("the node is in generation %d, and was in %d", is.GetConfirmed(), h.before.GetConfirmed())
	}
	starts, err := host.WorkloadStarts(h.held.Dir)
	if err != nil {
		return err
	}
	if !maps.Equal(starts, h.starts) {
		return fmt.Errorf("workloads were started again: %v, were %v", starts, h.starts)
	}
	return mesh.Answers(ctx, h.held.URL)
}

// recovered returns nil once the mode is over and the node has completed a task since.
func (h *history) recovered(ctx context.Context) error {
	m := h.run.Mesh
	answer, err := m.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
	if err != nil {
		return err
	}
	if answer.GetRollback().GetActive() {
		return errors.New("rollback mode is set")
	}
	if err := act.Connected(ctx, m, h.held.Node); err != nil {
		return err
	}
	if h.probe == "" {
		resp, err := m.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: h.held.Node})
		if err != nil {
			return err
		}
		h.probe = resp.GetTask().GetTaskId()
	}
	tasks, err := act.TasksOf(ctx, m, h.held.Node)
	if err != nil {
		return err
	}
	if state := tasks[h.probe].GetState(); state != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		return fmt.Errorf("task %s is %s", h.probe, names.Of(state))
	}
	return nil
}
