package certificates

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// The lives of certificates and the age of recovery tokens in seconds, in a run with production timers too, which would
// wait for hours. They are to each other as in production.
const (
	scaledLeaf  = "20"
	scaledToken = "60"
)

// scaleOfReturn is by how much a scaled run is to detect sooner that a machine has returned without an accepted
// certificate: no policy is a part of that, and the controls wait for as long.
const scaleOfReturn = 10

// LongOutage is row 2: a machine's agent is stopped past the end of its certificate, and returns.
func LongOutage() kit.Drill {
	return kit.Drill{
		Name: "long-node-outage", Slow: true, Scale: scaleOfReturn,
		Injects: "the agent of a machine is killed and stays away until all its certificates have ended; then it is " +
			"started again, while the enrolment listener takes no connections until the refusal is seen",
		Sees: "`cert_expired` and recovering, from the connections that the node API refuses; the workload serves",
		Recovers: "by itself: the agent gets a certificate with its recovery token, as the same node instance and with " +
			"no token of an operator's",
		Needs:    "its own mesh: a machine whose agent can be killed, and the balancer before enrolment",
		Expect:   kit.Verdict{Reason: "cert_expired", UserState: "recovering", Owner: "agent", Next: "recovery token"},
		Mutation: rejectionsOver,
		FailsAt:  stage.Detected,
		Mutate:   act.Restarted(act.Recovery, rejectedFresh),
		Run:      runLongOutage,
	}
}

// What the ingress refuses is evidence for as long as recovery is set to: a millisecond in the mutation.
const (
	rejectedFresh  = "GPUAAS_RECOVERY_REJECTED_FRESH=1ms"
	rejectionsOver = "the replicas of recovery are started anew with a rejected_fresh of a millisecond: what the " +
		"ingress refuses is reported and kept, and over at once; the agent is killed as before, and its connections " +
		"are refused"
)

func runLongOutage(ctx context.Context, r *kit.Run) error {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return err
	}
	o, err := newAbsence(ctx, r, c)
	if o != nil {
		defer r.Finally(ctx, o.end)
	}
	if err != nil {
		return stage.At(stage.Good, err)
	}
	if err := o.limit(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	if err := o.leave(ctx, o.ends); err != nil {
		return err
	}
	if err := o.back(ctx, true); err != nil {
		return stage.At(stage.Injected, err)
	}
	if err := o.detect(ctx); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := mesh.Answers(ctx, o.held.URL); err != nil {
		return stage.At(stage.Verdict, fmt.Errorf("the workload does not serve while its agent is refused: %w", err))
	}
	if err := o.shut(false); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node connected, admitted, normal and proven healthy; the workspace serves",
		func(ctx context.Context) error {
			if err := act.Healthy(ctx, r.Mesh, o.held.Node); err != nil {
				return err
			}
			ws, err := r.Mesh.Workspace(ctx, o.held.ID)
			if err != nil {
				return err
			}
			return r.Mesh.Serving(ctx, o.held.ID, ws.GetEpoch())
		})
	if err != nil {
		return err
	}
	if err := o.recoveredByItself(ctx); err != nil {
		return stage.At(stage.Evidence, err)
	}
	return r.Retire(ctx, o.held.ID)
}

// absence is a machine whose agent stays away for longer than its certificates live.
type absence struct {
	run     *kit.Run
	cluster *cluster.Cluster
	held    mesh.Held
	undo    []func(context.Context) error
	pid     int
	process host.Process
	// away is whether the agent was killed and, of the drill whose tokens cannot be used, has taken no bundle since.
	away     bool
	killedAt time.Time
	// instance and successes are the node's as the API reported them before the fault.
	instance  string
	successes int64

	// Of the drill whose tokens cannot be used: what the agent is to record, what the evidence of the verdict is to say
	// (empty: that does not matter), and the absence of another machine at the same time (nil: there is none).
	cause, detail string
	other         *absence
}

// newAbsence places a workspace on a machine and has that machine get a certificate whose life is as long, in
// proportion to the age that its recovery token may reach (limit), as in production.
func newAbsence(ctx context.Context, r *kit.Run, c *cluster.Cluster) (*absence, error) {
	o := &absence{run: r, cluster: c}
	var err error
	if o.held, err = mesh.PlaceOnMachine(ctx, r.Mesh, c); err != nil {
		return o, err
	}
	r.About(o.held.ID, o.held.Node)
	if !r.Mesh.Scaled {
		r.Note("certificates live %s s and recovery tokens %s s, in place of hours: nothing else is scaled", scaledLeaf,
			scaledToken)
	}
	if err := o.set(ctx, policy.CertificateTTLSeconds, scaledLeaf); err != nil {
		return o, err
	}
	if err := o.shorten(ctx); err != nil {
		return o, err
	}
	return o, o.note(ctx)
}

// limit bounds the age of recovery tokens. Tokens of before may be older than that, so it comes after all machines have
// certificates of the scaled life.
func (o *absence) limit(ctx context.Context) error {
	return o.set(ctx, policy.RecoveryTokenMaxAgeSeconds, scaledToken)
}

// beside has another machine, which serves no workspace, get a certificate of the scaled life too.
func (o *absence) beside(ctx context.Context) error {
	i := slices.IndexFunc(o.cluster.Nodes, func(a *agents.Agent) bool { return a.Name() != o.held.Machine.Name() })
	if i < 0 {
		return errors.New("the mesh has no other machine")
	}
	machine := o.cluster.Nodes[i]
	node, err := o.run.Mesh.Node(ctx, machine.Name())
	if err != nil {
		return err
	}
	o.other = &absence{run: o.run, cluster: o.cluster, held: mesh.Held{
		Node: node.GetNodeId(), Machine: machine, Dir: mesh.MachineDir(o.cluster, machine),
	}}
	o.run.About(node.GetNodeId())
	if err := o.other.shorten(ctx); err != nil {
		return err
	}
	return o.other.note(ctx)
}

// machines returns the absence, and that of another machine if there is one.
func (o *absence) machines() []*absence {
	if o.other == nil {
		return []*absence{o}
	}
	return []*absence{o, o.other}
}

// shorten has the machine get a certificate of the scaled life in place of one that lives for hours. The replica that
// issues it may not know the policy yet; then it is done once more.
func (o *absence) shorten(ctx context.Context) error {
	const again = 2 * time.Second
	for began := time.Now(); ; {
		left, err := reissue(ctx, o.run.Mesh, o.cluster, o.held.Machine)
		if err != nil {
			return err
		}
		if left < time.Minute {
			return nil
		}
		if time.Since(began) > await.Patience {
			return fmt.Errorf("the certificate of %s ends in %s", o.held.Machine.Name(), left)
		}
		if err := await.Sleep(ctx, again); err != nil {
			return err
		}
	}
}

// reissue has a machine get another certificate and returns how long that one lives: an agent that has lost its
// certificates gets another with its recovery token.
func reissue(ctx context.Context, m *mesh.Mesh, c *cluster.Cluster, machine *agents.Agent) (time.Duration, error) {
	before, err := m.Node(ctx, machine.Name())
	if err != nil {
		return 0, err
	}
	if err := machine.Stop(ctx); err != nil {
		return 0, err
	}
	for _, file := range []string{"cert.pem", "key.pem", "cert-next.pem", "key-next.pem"} {
		err := os.Remove(filepath.Join(mesh.MachineDir(c, machine), "etc", file))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, err
		}
	}
	if err := machine.Start(); err != nil {
		return 0, err
	}
	var left time.Duration
	err = await.Until(ctx, machine.Name()+" to be connected with another certificate", await.Limit,
		func(ctx context.Context) error {
			node, err := m.Node(ctx, machine.Name())
			if err != nil {
				return err
			}
			now, was := node.GetIdentity().GetCurrentSerial(), before.GetIdentity().GetCurrentSerial()
			if now == was || !node.GetConnected() || !node.GetGate().GetAdmitted() {
				return fmt.Errorf("it is connected %t, with the serial %s after %s", node.GetConnected(), now, was)
			}
			left = time.Until(node.GetIdentity().GetCertificateNotAfter().AsTime())
			return nil
		})
	return left, err
}

// back starts the agent again. What is measured counts from then: an agent that is away shows nothing but its silence.
func (o *absence) back(ctx context.Context, shut bool) error {
	node, err := o.run.Mesh.Node(ctx, o.held.Node)
	if err == nil && node.GetReason() == o.run.Drill.Expect.Reason {
		err = fmt.Errorf("the node is %s before its agent is back", node.GetReason())
	}
	if err != nil {
		return err
	}
	o.run.FaultAt = time.Now()
	return errors.Join(o.shut(shut), o.held.Machine.Start())
}

// set changes a policy key until the drill ends.
func (o *absence) set(ctx context.Context, key, value string) error {
	before, _ := o.run.Policy.Get(key)
	o.undo = append(o.undo, func(ctx context.Context) error { return o.run.Mesh.SetPolicy(ctx, key, before) })
	return o.run.Mesh.SetPolicy(ctx, key, value)
}

func (o *absence) note(ctx context.Context) error {
	node, err := o.run.Mesh.Node(ctx, o.held.Node)
	if err != nil {
		return err
	}
	o.instance, o.successes = node.GetIdentity().GetNodeInstanceId(), node.GetSession().GetRecovery().GetSuccesses()
	o.run.Evidence(o.instance, node.GetSession().GetSessionId())
	return nil
}

// end puts everything back.
func (o *absence) end(ctx context.Context) {
	_ = o.shut(false)
	for _, undo := range slices.Backward(o.undo) {
		o.run.Left("the policy", undo(ctx))
	}
	if o.held.Machine == nil {
		return
	}
	for _, each := range o.machines() {
		_ = each.held.Machine.Start() // it runs, unless the drill failed
		// The next drill may stop its agent for longer than a certificate of this one lives.
		o.run.Left("the certificate", await.Until(ctx, each.held.Machine.Name()+" to have one of the former life",
			await.Limit, func(ctx context.Context) error {
				node, err := o.run.Mesh.Node(ctx, each.held.Node)
				if err == nil && time.Until(node.GetIdentity().GetCertificateNotAfter().AsTime()) < time.Minute {
					err = errors.New("it has not")
				}
				return errors.Join(err, act.Connected(ctx, o.run.Mesh, each.held.Node))
			}))
	}
	o.run.Leave(ctx, o.held.ID)
}

// shut has the enrolment listener take no connections, or take them again.
func (o *absence) shut(shut bool) error {
	_, err := o.cluster.ShutOut(o.cluster.Plan.Addresses.Enroll, shut)
	return err
}

// kill kills the agent.
func (o *absence) kill() error {
	o.pid = o.held.Machine.PID()
	o.process = host.Kernel(o.pid)
	o.held.Machine.LetDie()
	o.away, o.killedAt = true, time.Now()
	return o.held.Machine.Kill9()
}

// leave kills the agent, unless it is away already, and waits until a time, after which its certificates have ended.
func (o *absence) leave(ctx context.Context, until func() time.Time) error {
	if !o.away { // if the fault is withheld, it is shown that this process runs
		o.pid = o.held.Machine.PID()
		o.process = host.Kernel(o.pid)
	}
	return o.run.Inject(ctx, fmt.Sprintf("the agent of %s, process %d, killed; by the host's clock each certificate in "+
		"its files has ended", o.held.Machine.Name(), o.pid),
		func(ctx context.Context) error {
			if !o.away {
				if err := o.kill(); err != nil {
					return err
				}
			}
			return await.Sleep(ctx, time.Until(until())+time.Second)
		},
		func(context.Context) error {
			if ends := o.ends(); time.Now().Before(ends) {
				return fmt.Errorf("a certificate ends at %s", ends)
			}
			return host.Gone(o.pid, o.process)
		})
}

// ends returns when the last of the certificates in the agent's files ends; the zero time if there is none.
func (o *absence) ends() time.Time {
	var last time.Time
	for _, file := range []string{"cert.pem", "cert-next.pem"} {
		data, err := os.ReadFile(filepath.Join(o.held.Dir, "etc", file))
		if err != nil {
			continue
		}
		if leaf, err := leafOf(data); err == nil && leaf.NotAfter.After(last) {
			last = leaf.NotAfter
		}
	}
	return last
}

// leafOf returns the first certificate of a PEM file.
func leafOf(data []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, errors.New("the file has no certificate")
	}
	return x509.ParseCertificate(block.Bytes)
}

// detect waits for the row's verdict on the machine.
func (o *absence) detect(ctx context.Context) error {
	r := o.run
	return r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		node, err := r.Mesh.Node(ctx, o.held.Node)
		v := kit.Verdict{
			Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction(),
		}
		if err == nil && (node.GetConnected() || v.Reason != r.Drill.Expect.Reason) {
			err = fmt.Errorf("the node is connected %t, %s to its user: %q", node.GetConnected(), v.UserState, v.Reason)
		}
		return v, err
	})
}

// recoveredByItself checks that the node is the same instance, on another certificate, by a recovery of its agent.
func (o *absence) recoveredByItself(ctx context.Context) error {
	node, err := o.run.Mesh.Node(ctx, o.held.Node)
	if err != nil {
		return err
	}
	recovery := node.GetSession().GetRecovery()
	switch {
	case node.GetIdentity().GetNodeInstanceId() != o.instance:
		return fmt.Errorf("the node is instance %s, was %s", node.GetIdentity().GetNodeInstanceId(), o.instance)
	case recovery.GetSuccesses() <= o.successes || recovery.GetLastOutcome() != "succeeded":
		return fmt.Errorf("the agent reports of its recoveries: %v", recovery)
	}
	o.run.Evidence(node.GetSession().GetSessionId())
	o.run.Note("the agent reports %d attempts, %d succeeded, %d suppressed", recovery.GetAttempts(),
		recovery.GetSuccesses(), recovery.GetSuppressed())
	return nil
}
