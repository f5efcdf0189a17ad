// Package act has what several drills do to a mesh and ask of it.
package act

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/material"
)

// Connected checks that a node is connected, admitted and normal.
func Connected(ctx context.Context, m *mesh.Mesh, id string) error {
	node, err := m.Node(ctx, id)
	if err == nil && (!node.GetConnected() || !node.GetGate().GetAdmitted() || node.GetReason() != "") {
		err = fmt.Errorf("the node is connected %t, admitted %t, %s to its user: %q", node.GetConnected(),
			node.GetGate().GetAdmitted(), names.Of(node.GetUserState()), node.GetReason())
	}
	return err
}

// Healthy checks that a node is connected, admitted and normal, and that recovery has proven it healthy: no reason
// holds, and all five items of the checklist are present.
func Healthy(ctx context.Context, m *mesh.Mesh, id string) error {
	if err := Connected(ctx, m, id); err != nil {
		return err
	}
	node, err := m.Node(ctx, id)
	if err != nil {
		return err
	}
	items := node.GetVerdict().GetChecklist()
	for _, item := range items {
		if !item.GetPresent() {
			return fmt.Errorf("%s is missing: %s", names.Of(item.GetCheck()), item.GetDetail())
		}
	}
	if node.GetVerdict().GetHealthySince() == nil || len(items) != len(recoveryv1.HealthCheck_name)-1 {
		return fmt.Errorf("the node is not proven healthy: %d items are present", len(items))
	}
	return nil
}

// Change requests a verb of a node's identity, as a person with the roles operator and security does.
func Change(ctx context.Context, m *mesh.Mesh, node string, verb recoveryv1.IdentityVerb) (*recoveryv1.NodeIdentity,
	error,
) {
	resp, err := await.Answer(ctx, names.Of(verb),
		func(ctx context.Context) (*readmodelv1.ChangeNodeIdentityResponse, error) {
			return m.Client.Command.ChangeNodeIdentity(ctx,
				&readmodelv1.ChangeNodeIdentityRequest{Node: node, Verb: verb, Reason: "drill"})
		})
	return resp.GetNode(), err
}

// Signal sends a signal to replicas.
func Signal(replicas []*cluster.Process, sig syscall.Signal) {
	for _, p := range replicas {
		_ = p.Signal(sig) // one that has ended is started again, and is not stopped
	}
}

// TasksOf returns the tasks of a node by their ids.
func TasksOf(ctx context.Context, m *mesh.Mesh, node string) (map[string]*readmodelv1.Task, error) {
	resp, err := m.Client.Query.ListTasks(ctx, &readmodelv1.ListTasksRequest{Node: node, PageSize: 500})
	tasks := map[string]*readmodelv1.Task{}
	for _, task := range resp.GetItems() {
		tasks[task.GetTaskId()] = task
	}
	return tasks, err
}

// VerdictOf returns what reads the verdict on a node until it has the given reason.
func VerdictOf(m *mesh.Mesh, node, reason string) func(context.Context) (kit.Verdict, error) {
	return func(ctx context.Context) (kit.Verdict, error) {
		n, err := m.Node(ctx, node)
		v := kit.Verdict{Reason: n.GetReason(), UserState: names.Of(n.GetUserState()), Next: n.GetNextAction()}
		if err == nil && v.Reason != reason {
			err = fmt.Errorf("the node is connected %t, %s to its user: %q", n.GetConnected(), v.UserState, v.Reason)
		}
		return v, err
	}
}

// SameInstance checks that a node was not enrolled again.
func SameInstance(ctx context.Context, m *mesh.Mesh, node, instance string, mints int32) error {
	now, err := m.Node(ctx, node)
	id := now.GetIdentity()
	if err == nil && (id.GetNodeInstanceId() != instance || id.GetMints() != mints) {
		err = fmt.Errorf("the node is instance %s after %d enrolments, was %s after %d", id.GetNodeInstanceId(),
			id.GetMints(), instance, mints)
	}
	return err
}

// RestartMachine starts a machine's agent anew with an environment and arguments of the drill's, and waits until the
// node is normal.
func RestartMachine(ctx context.Context, m *mesh.Mesh, held mesh.Held, env string, args ...string) error {
	if err := held.Machine.Stop(ctx); err != nil {
		return err
	}
	held.Machine.SetEnv(env)
	held.Machine.SetArgs(args...)
	if err := m.StartMachine(ctx, held.Machine); err != nil {
		return err
	}
	return await.Until(ctx, held.Machine.Name()+" to be normal", await.Limit,
		func(ctx context.Context) error { return Connected(ctx, m, held.Node) })
}

// RestoreMachine starts a machine's agent anew as it was before the drill, and waits until its node is normal: facts
// that are as they were are another change of them, of which the next drill would be accused.
func RestoreMachine(ctx context.Context, r *kit.Run, held mesh.Held) {
	r.Finally(ctx, func(ctx context.Context) {
		err := errors.Join(held.Machine.Stop(ctx), r.Mesh.StartMachine(ctx, held.Machine))
		if err == nil {
			err = await.Until(ctx, held.Machine.Name()+" to be normal again", await.Patience,
				func(ctx context.Context) error { return Connected(ctx, r.Mesh, held.Node) })
		}
		r.Left("the machine", err)
	})
}

// Cordon sets or removes a person's cordon.
func Cordon(ctx context.Context, m *mesh.Mesh, node string, on bool) error {
	_, err := await.Answer(ctx, "cordon", func(ctx context.Context) (*readmodelv1.SetCordonResponse, error) {
		return m.Client.Command.SetCordon(ctx, &readmodelv1.SetCordonRequest{Node: node, Cordoned: on, Reason: "drill"})
	})
	return err
}

// Refused reports whether an error is a refusal that a repetition would get again, that of a changed fence included.
func Refused(err error) bool {
	_, typed := fault.As(err)
	return typed && (!await.Passing(err) || fault.Has(err, commonv1.Reason_REASON_CONFLICT))
}

// Restarted returns a mutation that starts replicas of a service anew with settings in their environment; its undo
// starts them anew without.
func Restarted(of func(*cluster.Cluster) []*cluster.Process, env ...string) func(context.Context, *kit.Run) (
	func(context.Context) error, error,
) {
	return func(ctx context.Context, r *kit.Run) (func(context.Context) error, error) {
		c, err := r.Mesh.Cluster()
		if err != nil {
			return nil, err
		}
		back := func(ctx context.Context) error { return r.Mesh.Restart(ctx, of(c)) }
		return back, r.Mesh.Restart(ctx, of(c), env...)
	}
}

// Recovery returns the replicas of recovery.
func Recovery(c *cluster.Cluster) []*cluster.Process { return c.Recovery }

// NodeAPI returns the replicas of nodeapi.
func NodeAPI(c *cluster.Cluster) []*cluster.Process { return c.NodeAPI }

// Lifecycle returns the replicas of lifecycle.
func Lifecycle(c *cluster.Cluster) []*cluster.Process { return c.Lifecycle }

// Foreign makes the keys and certificates of another mesh, whose roots no agent of this one trusts.
func Foreign(c *cluster.Cluster) (*material.Material, error) {
	dir := filepath.Join(c.Dir(), "foreign")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make foreign certificates: %w", err)
	}
	return material.Make(material.Config{Dir: dir, TrustDomain: cluster.TrustDomain})
}
