package outages

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
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
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// What an outage may cost each agent: attempts to connect and lines of its log in a second of it, on average. An agent
// waits longer after each failure.
const (
	attemptsPerSecond = 1
	linesPerSecond    = 3
)

// patientAfter is the node.heartbeat_stale_after_seconds of a scaled run. With the amnesty after an outage it is longer
// than the longest wait of an agent between two attempts, as in production: an agent that draws 30 s just before the
// return is not blamed, and its workspace is not recreated.
const patientAfter = "32"

// noTasks is how many tasks of one node an outage may leave: probes and observations of before wait for its end.
const noTasks = 5

// NodeAPIOutage is row 4: all replicas of the node API are killed and stay away.
func NodeAPIOutage() kit.Drill {
	return kit.Drill{
		Name: "control-plane-outage",
		Injects: "all replicas of the node API are killed and stay away, for longer than an agent may be silent; then " +
			"they are started again",
		Sees: "`control_plane_outage` of every node, once, and no verdict on any of them; the workspaces serve and are " +
			"normal to their users; agents try again ever more slowly, and write little into their logs",
		Recovers: "by itself once replicas run: every node connects as the same instance, and none is blamed for the time " +
			"in which none was listened to",
		Needs: "its own mesh: replicas that can be killed",
		Expect: kit.Verdict{
			Reason: "control_plane_outage", UserState: "temporary", Owner: "control plane", Next: "restore the control plane",
		},
		Mutation: "the replicas of recovery are started anew with an outage_after of an hour: the beats of the node API " +
			"are read as before, and their absence is no outage yet; the replicas of the node API are killed as before",
		FailsAt: stage.Detected,
		Mutate:  act.Restarted(act.Recovery, "GPUAAS_RECOVERY_OUTAGE_AFTER=1h"),
		Scale:   2, // when a silent replica counts as gone is no policy
		Slow:    true,
		Run:     runNodeAPIOutage,
	}
}

func runNodeAPIOutage(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	held, err := mesh.PlaceOnMachine(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	r.About(held.ID)
	defer r.Leave(ctx, held.ID)
	o := &blackout{run: r, cluster: c, held: held, after: r.Policy.HeartbeatStaleAfter()}
	defer r.Finally(ctx, o.putRight)
	if err := o.before(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	err = r.Inject(ctx, fmt.Sprintf("the %d replicas of the node API killed; the kernel has none of their processes",
		len(c.NodeAPI)), func(context.Context) error { return o.begin() }, func(context.Context) error { return o.took() })
	if err != nil {
		return err
	}
	if err := r.Detect(ctx, o.verdict); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := o.lasts(ctx); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := o.cost(ctx); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := o.end(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	back := time.Now()
	err = r.Recovered(ctx, "every node connected, admitted and normal; the workspace serves", func(
		ctx context.Context,
	) error {
		if err := o.allBack(ctx); err != nil {
			return err
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
	r.Note("all were back %.1f s after the replicas were started", time.Since(back).Seconds())
	if err := o.noneBlamed(ctx, back); err != nil {
		return stage.At(stage.Evidence, err)
	}
	return r.Retire(ctx, held.ID)
}

// blackout is the time without any replica of the node API.
type blackout struct {
	run     *kit.Run
	cluster *cluster.Cluster
	held    mesh.Held
	nodes   []*readmodelv1.Node // before the fault
	killed  map[int]host.Process
	lines   map[string]int // of the agents' logs, before the fault
	refused int64          // attempts to connect, before the fault
	began   time.Time
	after   time.Duration           // how long an agent may be silent
	outage  *recoveryv1.NodeVerdict // as it was first read
}

// before notes what the outage is compared with. All nodes are part of the fault.
func (o *blackout) before(ctx context.Context) error {
	if o.run.Mesh.Scaled {
		if err := o.run.Mesh.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, patientAfter); err != nil {
			return err
		}
		set, err := o.run.Mesh.Policy(ctx)
		if err != nil {
			return err
		}
		o.after = set.HeartbeatStaleAfter()
	}
	resp, err := o.run.Mesh.Client.Query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: 500})
	if err != nil {
		return err
	}
	for _, node := range resp.GetItems() {
		if node.GetConnected() {
			o.nodes = append(o.nodes, node)
		}
		o.run.About(node.GetNodeId())
	}
	o.killed, o.lines = map[int]host.Process{}, map[string]int{}
	for _, p := range o.cluster.NodeAPI {
		o.killed[p.PID()] = host.Kernel(p.PID())
	}
	for _, machine := range o.cluster.Nodes {
		if o.lines[machine.LogPath()], err = linesOf(machine.LogPath()); err != nil {
			return err
		}
	}
	// Asked only how many it has refused; nothing is shut out.
	o.refused, err = o.cluster.ShutOut(o.cluster.Plan.Addresses.Agents, false)
	return err
}

// begin kills the replicas. New connections are refused and counted before them.
func (o *blackout) begin() error {
	o.began = time.Now()
	if _, err := o.cluster.ShutOut(o.cluster.Plan.Addresses.Agents, true); err != nil {
		return err
	}
	var errs []error
	for _, p := range o.cluster.NodeAPI {
		p.LetDie()
		errs = append(errs, p.Kill9())
	}
	return errors.Join(errs...)
}

func (o *blackout) took() error {
	var errs []error
	for pid, was := range o.killed {
		errs = append(errs, host.Gone(pid, was))
	}
	return errors.Join(errs...)
}

// end starts the replicas again, and waits until they are ready.
func (o *blackout) end(ctx context.Context) error {
	_, err := o.cluster.ShutOut(o.cluster.Plan.Addresses.Agents, false)
	errs := []error{err}
	for _, p := range o.cluster.NodeAPI {
		errs = append(errs, p.Start())
	}
	for _, p := range o.cluster.NodeAPI {
		errs = append(errs, p.AwaitReady(ctx))
	}
	return errors.Join(errs...)
}

// putRight leaves the mesh as it was, however far the drill came. The policy is put back last: agents that are not back
// yet would be called down under the scaled one.
func (o *blackout) putRight(ctx context.Context) {
	_ = o.end(ctx) // it has ended, unless the drill failed
	_ = await.Until(ctx, "every node to be back", await.Limit, o.allBack)
	before, _ := o.run.Policy.Get(policy.HeartbeatStaleAfterSeconds)
	o.run.Left("the policy", o.run.Mesh.SetPolicy(ctx, policy.HeartbeatStaleAfterSeconds, before))
}

// allBack checks that every node is connected, admitted and normal.
func (o *blackout) allBack(ctx context.Context) error {
	for _, node := range o.nodes {
		if err := act.Connected(ctx, o.run.Mesh, node.GetNodeId()); err != nil {
			return fmt.Errorf("%s: %w", node.GetName(), err)
		}
	}
	return nil
}

// verdict reads the verdict, which is one and the same of all nodes for as long as the outage lasts.
func (o *blackout) verdict(ctx context.Context) (kit.Verdict, error) {
	var v kit.Verdict
	for _, before := range o.nodes {
		node, err := o.run.Mesh.Node(ctx, before.GetNodeId())
		if err != nil {
			return v, err
		}
		v = kit.Verdict{
			Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction(),
		}
		if node.GetConnected() || v.Reason != o.run.Drill.Expect.Reason {
			return v, fmt.Errorf("%s is connected %t, %s to its user: %q", node.GetName(), node.GetConnected(), v.UserState,
				v.Reason)
		}
		is := node.GetVerdict()
		if o.outage == nil {
			o.outage = is
		}
		if is.GetNodeId() != "" || is.GetVersion() != o.outage.GetVersion() ||
			!is.GetDetectedAt().AsTime().Equal(o.outage.GetDetectedAt().AsTime()) {
			return v, stage.At(stage.Verdict, fmt.Errorf("the outage is not one verdict: %s has %v, another node or before %v",
				node.GetName(), is, o.outage))
		}
	}
	return v, nil
}

// lasts lets the outage last for longer than an agent may be silent, and checks that the workspace serves, is normal to
// its user, and that the verdict stays.
func (o *blackout) lasts(ctx context.Context) error {
	until := o.began.Add(o.after + 3*time.Second)
	for {
		if err := mesh.Answers(ctx, o.held.URL); err != nil {
			return fmt.Errorf("the workload does not serve while no replica runs: %w", err)
		}
		ws, err := o.run.Mesh.Workspace(ctx, o.held.ID)
		if err != nil {
			return err
		}
		if state := names.Of(ws.GetUserState()); state != "normal" {
			return fmt.Errorf("the workspace is %s to its user: %s", state, ws.GetReason())
		}
		if _, err := o.verdict(ctx); err != nil {
			return stage.At(stage.Verdict, fmt.Errorf("the verdict does not stay: %w", err))
		}
		if time.Now().After(until) {
			return nil
		}
		if err := await.Sleep(ctx, time.Second); err != nil {
			return err
		}
	}
}

// cost checks how often the agents have tried to connect, how much they have written, and how many tasks wait.
func (o *blackout) cost(ctx context.Context) error {
	took := time.Since(o.began)
	now, err := o.cluster.ShutOut(o.cluster.Plan.Addresses.Agents, true)
	if err != nil {
		return err
	}
	tried := now - o.refused
	if most := int64(took.Seconds()*attemptsPerSecond) * int64(len(o.nodes)); tried > most || tried == 0 {
		return fmt.Errorf("%d agents have tried to connect %d times in %.0f s; from 1 to %d are expected", len(o.nodes),
			tried, took.Seconds(), most)
	}
	written := 0
	for _, machine := range o.cluster.Nodes {
		lines, err := linesOf(machine.LogPath())
		if err != nil {
			return err
		}
		lines -= o.lines[machine.LogPath()]
		if most := int(took.Seconds() * linesPerSecond); lines > most {
			return fmt.Errorf("the agent of %s has written %d lines in %.0f s, more than %d", machine.Name(), lines,
				took.Seconds(), most)
		}
		written += lines
	}
	tasks, err := act.TasksOf(ctx, o.run.Mesh, o.held.Node)
	if err != nil {
		return err
	}
	made := 0
	for _, task := range tasks {
		if task.GetCreatedAt().AsTime().After(o.run.FaultAt) {
			made++
		}
	}
	if made > noTasks {
		return fmt.Errorf("%d tasks of one node were made meanwhile", made)
	}
	o.run.Note("in %.0f s %d agents tried %d times, those of the machines wrote %d lines; %d tasks wait for one of them",
		took.Seconds(), len(o.nodes), tried, written, made)
	return nil
}

// noneBlamed checks, once a node that had not returned by now would have been called down, that none had a verdict of
// its own, that no incident beside that verdict was opened, and that each node is the same instance.
func (o *blackout) noneBlamed(ctx context.Context, back time.Time) error {
	const amnesty, margin = 10 * time.Second, 2 * time.Second
	if err := await.Sleep(ctx, time.Until(back.Add(o.after+amnesty+margin))); err != nil {
		return err
	}
	for _, before := range o.nodes {
		node, err := o.run.Mesh.Node(ctx, before.GetNodeId())
		if err != nil {
			return err
		}
		is, was := node.GetIdentity(), before.GetIdentity()
		if is.GetNodeInstanceId() != was.GetNodeInstanceId() || is.GetState() != was.GetState() {
			return fmt.Errorf("the identity of %s is %v, was %v", node.GetName(), is, was)
		}
		resp, err := o.run.Mesh.Client.Query.ListNodeVerdicts(ctx,
			&readmodelv1.ListNodeVerdictsRequest{Node: before.GetNodeId(), PageSize: 100})
		if err != nil {
			return err
		}
		for _, p := range resp.GetItems() {
			if p.GetDetectedAt().AsTime().After(o.run.FaultAt) {
				return fmt.Errorf("%s is blamed for the outage: %s", node.GetName(), names.Of(p.GetReason()))
			}
		}
		o.run.Evidence(node.GetSession().GetSessionId())
	}
	resp, err := o.run.Mesh.Client.Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{PageSize: 100})
	if err != nil {
		return err
	}
	for _, i := range resp.GetItems() {
		if i.GetOpenedAt().AsTime().After(o.run.FaultAt) {
			return fmt.Errorf("an incident was opened: %s", names.Of(i.GetKind()))
		}
	}
	o.run.Note("one verdict of the control plane, version %d; none of %d nodes had one of its own", o.outage.GetVersion(),
		len(o.nodes))
	return nil
}

// linesOf returns the number of lines of a file.
func linesOf(file string) (int, error) {
	data, err := os.ReadFile(file) // of our own mesh
	return bytes.Count(data, []byte("\n")), err
}
