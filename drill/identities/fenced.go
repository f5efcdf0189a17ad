package identities

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// streamEnds is how long a stream may outlive the commit that quarantines or fences its node.
const streamEnds = 2 * time.Second

// Fenced is row 13: a node is quarantined, and fenced, while its agent is connected.
func Fenced() kit.Drill {
	return kit.Drill{
		Name: "identity-fenced",
		Injects: "the node of a connected machine that serves a workspace is quarantined by an operator; and once more, " +
			"fenced by the security role",
		Sees: "`identity_revoked_or_fenced`, the node wants an operator; the agent's connection, as the kernel shows it, " +
			"ends within 2 s of the commit; nothing is dispatched from then on; the workload serves",
		Recovers: "by reactivation: the agent opens a session by itself with the same identity, and takes work again",
		Needs:    "its own mesh: it reads the connections of an agent's process from the kernel",
		Expect: kit.Verdict{
			Reason: "identity_revoked_or_fenced", UserState: "operator_action_required", Owner: "security",
			Next: "reactivate",
		},
		Mutation: "the replicas of nodeapi are started anew with an error at the point at which a decision closes a " +
			"session: the node is fenced as before, they are sent that, and its connection stands",
		FailsAt: stage.Detected,
		Mutate:  act.Restarted(act.NodeAPI, "GPUAAS_FAILPOINTS=nodeapi.decision.before_close=errors"),
		Run:     runFenced,
	}
}

func runFenced(ctx context.Context, r *kit.Run) error {
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
	verbs := []recoveryv1.IdentityVerb{
		recoveryv1.IdentityVerb_IDENTITY_VERB_QUARANTINE, recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE,
	}
	if r.Control != kit.None {
		verbs = verbs[1:] // both begin alike
	}
	for _, verb := range verbs {
		if err := fencedBy(ctx, r, c, held, verb); err != nil {
			return err
		}
	}
	return r.Retire(ctx, held.ID)
}

// fencedBy is the drill with one of the verbs.
func fencedBy(ctx context.Context, r *kit.Run, c *cluster.Cluster, held mesh.Held, verb recoveryv1.IdentityVerb) error {
	m := r.Mesh
	before, err := m.Node(ctx, held.Node)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	pid := held.Machine.PID()
	s := &stream{pid: pid, process: host.Kernel(pid), addr: c.Plan.Addresses.Agents}
	if err := s.stands(); err != nil {
		return stage.At(stage.Good, err)
	}
	defer r.Finally(ctx, func(ctx context.Context) { // it is active, unless the drill failed
		_, _ = act.Change(ctx, m, held.Node, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE)
		if r.Control == kit.Mutated { // the session that was not closed takes no work any more
			_ = errors.Join(held.Machine.Stop(ctx), m.StartMachine(ctx, held.Machine))
		}
	})
	var after *recoveryv1.NodeIdentity
	err = r.Inject(ctx, fmt.Sprintf("%s of %s while its agent, process %d, is connected: the answer of the verb has a "+
		"higher fence than %d", names.Of(verb), held.Machine.Name(), s.pid, before.GetIdentity().GetFenceEpoch()),
		func(ctx context.Context) error {
			var err error
			after, err = act.Change(ctx, m, held.Node, verb)
			s.committed = time.Now()
			return err
		},
		func(context.Context) error {
			if after.GetFenceEpoch() <= before.GetIdentity().GetFenceEpoch() {
				return fmt.Errorf("no fence higher than %d was drawn", before.GetIdentity().GetFenceEpoch())
			}
			return nil
		})
	if err != nil {
		return err
	}
	err = r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		if err := s.ends(); err != nil {
			return kit.Verdict{}, err
		}
		node, err := m.Node(ctx, held.Node)
		v := kit.Verdict{
			Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction(),
		}
		if err == nil && (v.Reason != r.Drill.Expect.Reason || node.GetConnected()) {
			err = fmt.Errorf("the node is connected %t, %s to its user: %q", node.GetConnected(), v.UserState, v.Reason)
		}
		return v, err
	})
	if err != nil {
		return err
	}
	r.Note("the connection ended %.2f s after the commit", s.ended.Sub(s.committed).Seconds())
	if err := r.Check(ctx); err != nil {
		return err
	}
	waiting, err := nothingDispatched(ctx, r, held)
	if err != nil {
		return stage.At(stage.Verdict, err)
	}
	if _, err := act.Change(ctx, m, held.Node, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node reactivated, connected as the same instance, its tasks dispatched, and its "+
		"workspace serves",
		func(ctx context.Context) error {
			if err := act.Healthy(ctx, m, held.Node); err != nil {
				return err
			}
			tasks, err := act.TasksOf(ctx, m, held.Node)
			if err != nil {
				return err
			}
			for _, id := range waiting {
				if task := tasks[id]; task.GetAttempt() == 0 {
					return fmt.Errorf("task %s, which waited for the node, is %s", id, names.Of(task.GetState()))
				}
			}
			ws, err := m.Workspace(ctx, held.ID)
			if err != nil {
				return err
			}
			return m.Serving(ctx, held.ID, ws.GetEpoch())
		})
	if err != nil {
		return err
	}
	node, err := m.Node(ctx, held.Node)
	if err == nil && node.GetIdentity().GetNodeInstanceId() != before.GetIdentity().GetNodeInstanceId() {
		err = fmt.Errorf("the node is another instance, %s", node.GetIdentity().GetNodeInstanceId())
	}
	return stage.At(stage.Evidence, err)
}

// stream is the connection of an agent to the node API, as the kernel shows it.
type stream struct {
	pid       int
	process   host.Process // as the kernel had it before the verb
	addr      string
	committed time.Time // when the verb was answered
	ended     time.Time // when no connection was left
}

func (s *stream) stands() error {
	count, err := host.Connections(s.pid, s.addr)
	if err == nil && count == 0 {
		err = fmt.Errorf("the agent, process %d, has no connection to the node API", s.pid)
	}
	return err
}

// ends returns nil once the connection has ended. One that stands for too long fails the drill.
func (s *stream) ends() error {
	if !s.ended.IsZero() {
		return nil
	}
	count, err := host.Connections(s.pid, s.addr)
	now := time.Now()
	switch {
	case err != nil:
		return err
	case host.Gone(s.pid, s.process) == nil:
		return stage.At(stage.Verdict, fmt.Errorf("the agent, process %d, has ended: that it has no connection shows nothing",
			s.pid))
	case count == 0:
		s.ended = now
		return nil
	case now.Sub(s.committed) > streamEnds:
		return stage.At(stage.Detected, fmt.Errorf("the agent's connection stands %.1f s after the commit",
			now.Sub(s.committed).Seconds()))
	default:
		return errors.New("the agent's connection stands")
	}
}

// nothingDispatched requests a task of the node, and checks that none that was made since the fault is dispatched; the
// workload serves on. It returns those tasks.
func nothingDispatched(ctx context.Context, r *kit.Run, held mesh.Held) ([]string, error) {
	m := r.Mesh
	if _, err := m.Client.Command.ProbeNode(ctx, &readmodelv1.ProbeNodeRequest{Node: held.Node}); err != nil {
		return nil, fmt.Errorf("ask for a probe: %w", err)
	}
	const watched = 3 * time.Second // many times as long as the dispatch to a node that may work
	if err := await.Sleep(ctx, watched); err != nil {
		return nil, err
	}
	tasks, err := act.TasksOf(ctx, m, held.Node)
	if err != nil {
		return nil, err
	}
	var made []string
	for id, task := range tasks {
		if task.GetCreatedAt().AsTime().Before(r.FaultAt) {
			continue
		}
		made = append(made, id)
		if task.GetAttempt() > 0 {
			return nil, fmt.Errorf("task %s, made after the commit, was dispatched: %s", id, names.Of(task.GetState()))
		}
	}
	if len(made) == 0 {
		return nil, errors.New("no task was made since the commit: that none was dispatched shows nothing")
	}
	r.Note("%d tasks were made since the commit, none was dispatched", len(made))
	return made, mesh.Answers(ctx, held.URL)
}
