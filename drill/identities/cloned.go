package identities

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/person"
)

// Cloned is row 14: the directory of a machine's agent is copied to a second host.
func Cloned() kit.Drill {
	return kit.Drill{
		Name: "cloned-identity",
		Injects: "the directory of a machine's agent, keys and state included, is copied and an agent is started from the " +
			"copy: beside the original; and once more while the original, which has opened sessions since, is away",
		Sees: "`cloned_identity_detected`, the node wants security; it is on hold, so neither holder is connected; an " +
			"incident names it",
		Recovers: "an operator may not reactivate the node; the copy is found and ended, and the machine is wiped and " +
			"enrolled again with a new bundle, of the node on hold, and once more after security has reactivated it: another " +
			"instance with another serial; the copy is refused from then on, without an alarm",
		Needs: "its own mesh: a machine whose directory can be copied",
		Expect: kit.Verdict{
			Reason: "cloned_identity_detected", UserState: "security_action_required", Owner: "security",
			Next: "new identity",
		},
		Mutation: "the replicas of nodeapi are started anew with a challenge_within of a microsecond: no holder of an " +
			"old generation can answer in time, and one that does not answer is a dead connection; the copy is started as " +
			"before",
		FailsAt: stage.Detected,
		Mutate:  act.Restarted(act.NodeAPI, "GPUAAS_NODEAPI_CHALLENGE_WITHIN=1us"),
		Run:     runCloned,
	}
}

func runCloned(ctx context.Context, r *kit.Run) error {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return err
	}
	for _, together := range []bool{true, false} {
		k := &clone{
			run: r, cluster: c, machine: c.Nodes[0], dir: mesh.MachineDir(c, c.Nodes[0]), together: together,
		}
		err := k.drill(ctx)
		r.Finally(ctx, func(ctx context.Context) { err = errors.Join(err, k.back(ctx)) })
		if err != nil {
			return err
		}
		if r.Control != kit.None {
			return nil // both begin alike
		}
	}
	return nil
}

// clone is a machine whose agent's directory is copied.
type clone struct {
	run      *kit.Run
	cluster  *cluster.Cluster
	machine  *agents.Agent
	dir      string
	together bool // the copy is started beside the original

	before *readmodelv1.Node
	copy   *mesh.Copy
	used   bool // the copy was started
	anew   bool // the machine has its new identity
}

func (k *clone) drill(ctx context.Context) error {
	r, m := k.run, k.run.Mesh
	var err error
	if k.before, err = m.Node(ctx, k.machine.Name()); err != nil {
		return stage.At(stage.Good, err)
	}
	id := k.before.GetNodeId()
	r.About(id)
	r.Evidence(k.before.GetIdentity().GetNodeInstanceId())
	if err := k.prepare(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	what := "beside the original"
	if !k.together {
		what = "while the original is away"
	}
	err = r.Inject(ctx, fmt.Sprintf("an agent started %s from a copy of the directory of %s, whose identity's digest is "+
		"%.12s", what, k.machine.Name(), k.copy.Identity),
		func(context.Context) error {
			k.used = true
			return k.copy.Start()
		},
		func(context.Context) error { return k.ran() })
	if err != nil {
		return err
	}
	err = r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) {
		if !k.copy.Running() {
			return kit.Verdict{}, stage.At(stage.Injected, errors.New("the agent of the copy has ended by itself"))
		}
		node, err := m.Node(ctx, id)
		v := kit.Verdict{
			Reason: node.GetReason(), UserState: names.Of(node.GetUserState()), Next: node.GetNextAction(),
		}
		state := node.GetIdentity().GetState()
		if err == nil && (v.Reason != r.Drill.Expect.Reason || node.GetConnected() ||
			state != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD) {
			err = fmt.Errorf("the node is connected %t, %s to its user: %q; its identity is %s", node.GetConnected(),
				v.UserState, v.Reason, names.Of(state))
		}
		if err == nil {
			err = k.paged(ctx)
		}
		return v, err
	})
	if err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := k.operatorRefused(ctx); err != nil {
		return stage.At(stage.Verdict, err)
	}
	k.copy.Kill()
	r.Note("the copy was found and its agent ended")
	if !k.together {
		if _, err := act.Change(ctx, m, id, recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE); err != nil {
			return stage.At(stage.Recover, err)
		}
		r.Note("security reactivated the node, which ended the certificates of both holders")
	}
	if err := k.newIdentity(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	k.anew = true
	if err := k.copy.Start(); err != nil { // where it was found it is switched on again
		return stage.At(stage.Recover, err)
	}
	return r.Recovered(ctx, "the machine connected as another instance with another serial, the copy refused and nothing "+
		"held", k.apart)
}

// prepare makes the copy. If it is to be started apart from the original, it is one of an agent that does not run, and
// the original opens sessions before it goes away.
func (k *clone) prepare(ctx context.Context) error {
	m := k.run.Mesh
	if k.together {
		var err error
		k.copy, err = m.CopyAgent(k.machine.PID(), k.dir)
		return err
	}
	if err := k.machine.Stop(ctx); err != nil {
		return err
	}
	var err error
	if k.copy, err = m.CopyAgent(0, k.dir); err != nil {
		return err
	}
	if err := m.StartMachine(ctx, k.machine); err != nil {
		return err
	}
	// What the API shows may be its session from before: the copy is behind once the next one is admitted.
	was := k.before.GetSession().GetGeneration()
	err = await.Until(ctx, "another session of "+k.machine.Name(), await.Limit, func(ctx context.Context) error {
		node, err := m.Node(ctx, k.before.GetNodeId())
		if is := node.GetSession().GetGeneration(); err == nil && (is <= was || !node.GetConnected()) {
			err = fmt.Errorf("generation %d, connected %t; it was %d", is, node.GetConnected(), was)
		}
		return err
	})
	if err != nil {
		return err
	}
	return k.machine.Stop(ctx)
}

// ran checks, by the kernel and the files, that an agent was started with the identity of the original.
func (k *clone) ran() error {
	if err := k.copy.Ran(); err != nil {
		return err
	}
	if original := host.IdentityDigest(k.dir); original != k.copy.Identity {
		return fmt.Errorf("the original's identity has the digest %.12s, the copy's %.12s", original, k.copy.Identity)
	}
	return nil
}

// paged checks that security has an incident that names the machine.
func (k *clone) paged(ctx context.Context) error {
	resp, err := k.run.Mesh.Client.Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{PageSize: 100})
	if err != nil {
		return err
	}
	for _, i := range resp.GetItems() {
		if i.GetKind() == commonv1.IncidentKind_INCIDENT_KIND_IDENTITY_SUSPECTED &&
			i.GetSeverity() == commonv1.Severity_SEVERITY_P0 && slices.Contains(i.GetNodeIds(), k.before.GetNodeId()) {
			k.run.Evidence(i.GetIncidentId())
			return nil
		}
	}
	return errors.New("no incident for security names the machine")
}

// operatorRefused checks that a person with the role operator alone may not let the node in again, and that the node
// stays on hold.
func (k *clone) operatorRefused(ctx context.Context) error {
	operator, err := k.cluster.Person(ctx, "",
		person.Session{Subject: "operator-of-drill", Roles: []string{"operator"}, Life: time.Hour})
	if err != nil {
		return err
	}
	id := k.before.GetNodeId()
	_, err = await.Answer(ctx, "reactivation by an operator",
		func(ctx context.Context) (*readmodelv1.ChangeNodeIdentityResponse, error) {
			return operator.Command.ChangeNodeIdentity(ctx, &readmodelv1.ChangeNodeIdentityRequest{
				Node: id, Verb: recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE, Reason: "drill",
			})
		})
	if !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		return fmt.Errorf("the reactivation by an operator was answered with: %w", cmp.Or(err, errors.New("no refusal")))
	}
	node, err := k.run.Mesh.Node(ctx, id)
	if err == nil && node.GetIdentity().GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD {
		err = fmt.Errorf("the identity is %s after it was refused", names.Of(node.GetIdentity().GetState()))
	}
	k.run.Note("an operator was refused to reactivate the node")
	return err
}

// newIdentity gives the machine a new identity, as an operator does: a bundle, on the wiped machine.
func (k *clone) newIdentity(ctx context.Context) error {
	m := k.run.Mesh
	if err := k.machine.Stop(ctx); err != nil {
		return err
	}
	resp, err := await.Answer(ctx, "the enrolment of "+k.machine.Name(),
		func(ctx context.Context) (*readmodelv1.EnrollNodeResponse, error) {
			return m.Client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: k.machine.Name()})
		})
	if err != nil {
		return err
	}
	if err := errors.Join(host.Wipe(k.dir), k.machine.Furnish(resp.GetToken())); err != nil {
		return err
	}
	return k.machine.Start()
}

// apart checks that the machine has a new identity with which it works, and that the copy is refused.
func (k *clone) apart(ctx context.Context) error {
	m := k.run.Mesh
	if err := act.Healthy(ctx, m, k.before.GetNodeId()); err != nil {
		return err
	}
	node, err := m.Node(ctx, k.before.GetNodeId())
	if err != nil {
		return err
	}
	was, is := k.before.GetIdentity(), node.GetIdentity()
	if is.GetNodeInstanceId() == was.GetNodeInstanceId() || is.GetCurrentSerial() == was.GetCurrentSerial() ||
		is.GetAlarm() != "" {
		return fmt.Errorf("the identity is %v, was %v", is, was)
	}
	k.run.Evidence(is.GetNodeInstanceId())
	refused, err := os.ReadFile(filepath.Join(k.copy.Dir, "state", "diagnostics.json")) // of our own mesh
	if err != nil {
		return err
	}
	if !strings.Contains(string(refused), "serial_unknown") {
		return errors.New("the copy has not recorded that its certificate is refused")
	}
	return nil
}

// back ends the copy. A machine whose copy was started and that has no new identity yet gets one: neither holder of the
// old one may be trusted.
func (k *clone) back(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, await.Limit)
	defer cancel()
	if k.copy == nil {
		return k.machine.Start()
	}
	err := k.copy.End(ctx)
	if !k.used || k.anew {
		return errors.Join(err, k.machine.Start())
	}
	node, nodeErr := k.run.Mesh.Node(ctx, k.before.GetNodeId())
	if node.GetIdentity().GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		_, holdErr := act.Change(ctx, k.run.Mesh, node.GetNodeId(), recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD)
		nodeErr = errors.Join(nodeErr, holdErr)
	}
	return errors.Join(err, nodeErr, k.newIdentity(ctx))
}
