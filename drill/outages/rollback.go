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
	"github.com/gpuaas/mesh/mesh/cluster"
)

// NodesAhead is row 34: a database that is older than what its nodes remember.
func NodesAhead() kit.Drill {
	return kit.Drill{
		Name: "control-plane-rollback",
		Injects: "a machine that serves a workspace opens sessions; then all services are stopped, the database's " +
			"directory is replaced by a copy from before these, and everything is started again; the agent of another " +
			"machine was killed before and stays away",
		Sees: "`control_plane_rollback` of the node that is away, with its evidence and the one incident; rollback mode " +
			"with the other node as its evidence, which connects as the same instance, with no alarm, no hold and no " +
			"reason, and shows the mode as a fact; the workload serves, and was never started again",
		Recovers: "`rollback accept`; the node has the generation that it remembers or a higher one, and completes a task; " +
			"the agent that was away connects",
		Needs: "its own mesh: Postgres on this host, and the balancer before the node API",
		Expect: kit.Verdict{
			Reason: "control_plane_rollback", UserState: "operator_action_required", Owner: "control plane",
			Next: "gpuaas rollback status",
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
	defer r.Finally(ctx, h.putRight) // it runs, unless the drill failed
	b, err := restored.Take(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	if err := errors.Join(h.goOn(ctx), h.leave(ctx, c)); err != nil {
		return stage.At(stage.Good, err)
	}
	between := func(context.Context) error { return nil }
	if r.Control == kit.Mutated {
		between = func(context.Context) error { return b.HideNewer(c) }
		defer func() { _ = b.ShowNewer(ctx, m, c) }() // the drill has failed by then, as it had to
	}
	err = r.Inject(ctx, fmt.Sprintf("the database is put back to a copy with generation %d of %s, which has "+
		"generation %d", h.copied, held.Machine.Name(), h.generation),
		func(ctx context.Context) error { return b.PutBack(ctx, c, between) },
		func(context.Context) error { return b.InPlace(c) })
	if err != nil {
		return err
	}
	r.FaultAt = time.Now() // the API cannot report anything before the control plane's return
	if err := r.Detect(ctx, h.verdict); err != nil {
		return err
	}
	present := slices.DeleteFunc(slices.Clone(c.Nodes), func(a *agents.Agent) bool { return a == h.away })
	if n, err := agents.Await(ctx, m.Client, present, await.Limit); err != nil || n < len(present) {
		return stage.At(stage.Verdict, errors.Join(err, fmt.Errorf("%d of %d machines are connected", n, len(present))))
	}
	if err := errors.Join(h.bystander(ctx), h.notBlamed(ctx)); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := h.untouched(ctx); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := errors.Join(restored.Accept(ctx, m), h.away.Start()); err != nil {
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
	away   *agents.Agent            // its agent does not run during the fault; nil: it was not killed yet
	absent string                   // the id of its node
	copied int64                    // the node's generation in the copy of the database
	before *recoveryv1.NodeIdentity // as the database had it last
	// generation is that of the node's last session before.
	generation int64
	starts     map[string]string // of the workloads
	closed     int               // incidents of rollbacks before
	probe      string
}

// goOn has the machine's agent open sessions that the copy of the database does not have.
func (h *history) goOn(ctx context.Context) error {
	m := h.run.Mesh
	node, err := m.Node(ctx, h.held.Node)
	if err != nil {
		return err
	}
	h.copied = node.GetSession().GetGeneration()
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
	if h.generation = node.GetSession().GetGeneration(); h.generation <= h.copied {
		return fmt.Errorf("%s is in generation %d, and the copy of the database has %d: there is nothing to remember",
			h.held.Machine.Name(), h.generation, h.copied)
	}
	h.before = node.GetIdentity()
	if h.starts, err = host.WorkloadStarts(h.held.Dir); err != nil {
		return err
	}
	closed, err := restored.Incidents(ctx, m)
	h.closed = len(closed)
	return err
}

// leave kills the agent of a machine that the workspace does not stand on, and waits until it is seen to be away.
func (h *history) leave(ctx context.Context, c *cluster.Cluster) error {
	i := slices.IndexFunc(c.Nodes, func(a *agents.Agent) bool { return a != h.held.Machine })
	if i < 0 {
		return errors.New("the mesh has no second machine")
	}
	h.away = c.Nodes[i]
	node, err := h.run.Mesh.Node(ctx, h.away.Name())
	if err != nil {
		return err
	}
	h.absent = node.GetNodeId()
	h.run.About(h.absent)
	h.away.LetDie()
	if err := h.away.Kill9(); err != nil {
		return err
	}
	return await.Until(ctx, h.away.Name()+" to be away", await.Limit, func(ctx context.Context) error {
		node, err := h.run.Mesh.Node(ctx, h.absent)
		if err == nil && node.GetConnected() {
			err = errors.New("it is connected")
		}
		return err
	})
}

// putRight starts the agent that is away.
func (h *history) putRight(ctx context.Context) {
	if h.away != nil {
		h.run.Left("the machine that was away", h.run.Mesh.StartMachine(ctx, h.away))
	}
}

// verdict reads the verdict of the node that is away, with its evidence and incident; and that the mode has the other
// node as its evidence and no second incident.
func (h *history) verdict(ctx context.Context) (kit.Verdict, error) {
	m := h.run.Mesh
	v, err := act.VerdictOf(m, h.absent, h.run.Drill.Expect.Reason)(ctx)
	if err != nil {
		return v, err
	}
	node, err := m.Node(ctx, h.absent)
	if err != nil {
		return v, err
	}
	const reason = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK
	incident := node.GetVerdict().GetCorrelationId()
	if !slices.ContainsFunc(node.GetVerdict().GetEvidence(), func(e *recoveryv1.Evidence) bool {
		return e.GetReason() == reason && e.GetSource() == commonv1.EvidenceSource_EVIDENCE_SOURCE_ROLLBACK
	}) || incident == "" {
		return v, fmt.Errorf("the verdict has the evidence %v and the incident %q", node.GetVerdict().GetEvidence(),
			incident)
	}
	answer, err := m.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
	if err != nil {
		return v, err
	}
	mode := answer.GetRollback()
	if !mode.GetActive() || !slices.ContainsFunc(mode.GetEvidence(), func(e *recoveryv1.RollbackEvidence) bool {
		return e.GetKind() == recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_NODE_AHEAD &&
			e.GetSubject() == h.held.Node
	}) {
		return v, fmt.Errorf("rollback mode is set %t, and none of %d pieces of evidence is of the node",
			mode.GetActive(), mode.GetEvidenceTotal())
	}
	incidents, err := restored.Incidents(ctx, m)
	if err != nil {
		return v, err
	}
	if n := len(incidents) - h.closed; n != 1 || incidents[0].GetClosedAt() != nil ||
		incidents[0].GetIncidentId() != incident || incidents[0].GetSeverity() != commonv1.Severity_SEVERITY_P0 {
		return v, fmt.Errorf("%d incidents came of it, of %d; the verdict has %s", n, len(incidents), incident)
	}
	h.run.Evidence(incident)
	return v, nil
}

// bystander waits until the agent of the bystander is back, whose session ended with the services, and its user sees a
// normal workspace.
func (h *history) bystander(ctx context.Context) error {
	return await.Until(ctx, "the bystander's agent", await.Limit, func(ctx context.Context) error {
		w, err := h.run.Mesh.Workspace(ctx, mesh.Tenant+"/"+mesh.Bystander)
		if err == nil && (!w.GetAgentConnected() || w.GetUserState() != commonv1.UserState_USER_STATE_NORMAL) {
			err = fmt.Errorf("it is connected %t, %s to its user", w.GetAgentConnected(), names.Of(w.GetUserState()))
		}
		return err
	})
}

// notBlamed checks that the node that is connected has no reason, and shows the mode as a fact. Its addresses may be
// others than those in the copy of the database: these are recorded, and blame nothing.
func (h *history) notBlamed(ctx context.Context) error {
	node, err := h.run.Mesh.Node(ctx, h.held.Node)
	addresses := names.Of(commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT)
	if err == nil && (node.GetReason() != "" && node.GetReason() != addresses ||
		node.GetUserState() != commonv1.UserState_USER_STATE_NORMAL ||
		node.GetControlPlaneReason() != h.run.Drill.Expect.Reason) {
		err = fmt.Errorf("the node that is connected is %s, %q; of the control plane it shows %q",
			names.Of(node.GetUserState()), node.GetReason(), node.GetControlPlaneReason())
	}
	return err
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
	if now := node.GetSession().GetGeneration(); now < h.generation {
		return fmt.Errorf("the node is in generation %d, and was in %d", now, h.generation)
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
	for _, id := range []string{h.held.Node, h.absent} {
		if err := act.Connected(ctx, m, id); err != nil {
			return err
		}
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
