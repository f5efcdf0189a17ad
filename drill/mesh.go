package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/devstack/scratch"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/halt"
	"github.com/gpuaas/mesh/mesh/person"
)

// Tenant of everything that drills make.
const Tenant = "drill"

// Mesh is the mesh on which drills run.
type Mesh struct {
	Client *person.Client
	// Scaled reports whether the mesh runs with the short policy values of Scaled(): its drills are judged by scaled
	// budgets.
	Scaled bool

	cluster *cluster.Cluster // nil: a mesh of another operator, of which only the API is known
	stop    func(context.Context) error
}

// Config of a mesh of the drills' own.
type Config struct {
	Programs   string // directory of gpuaas and gpuaas-node-agent
	CacheDir   string // searched for Postgres' binaries after the system's
	Dir        string // empty: a temporary one, which is removed unless Keep
	Production bool   // production timers instead of the scaled ones
	LogLevel   string
	// Reaper is a process that outlives this one and calls Reap(dir) as soon as its standard input ends, for any reason;
	// nil: no process does.
	Reaper func(dir string) *exec.Cmd
}

// lease of sagas in a scaled mesh: how long a run stays leased to a silent replica.
const scaledLease = 3 * time.Second

// Scaled returns the policy values of a scaled mesh.
func Scaled() map[string]string {
	return map[string]string{
		policy.SagaStepStallSeconds: "8", policy.SagaWaitReadyStallSeconds: "8", policy.SagaCancelGraceSeconds: "5",
		policy.TaskStaleSweepIntervalSeconds: "2", policy.ChurnRecreatesPerHour: "60",
		policy.HeartbeatStaleAfterSeconds: "6",
	}
}

// scaledEnv returns the settings of a scaled mesh that are configuration and not policy.
func scaledEnv() []string {
	return []string{
		"GPUAAS_LIFECYCLE_SAGA_LEASE=" + scaledLease.String(), "GPUAAS_LIFECYCLE_ORPHAN_SWEEP=2s",
		"GPUAAS_LIFECYCLE_RELEASE_DEADLINE=5s", "GPUAAS_RECOVERY_MINT_WAIT=6s", "GPUAAS_LIFECYCLE_WOKEN_SWEEP=1s",
	}
}

// nodes of a mesh of the drills' own: one for the fault, one that must not be affected.
const ownNodes = 2

// Start brings up a mesh of the drills' own. Close ends it.
func Start(ctx context.Context, logger *slog.Logger, cfg Config) (*Mesh, error) {
	halt.Sweep(ctx, logger)
	dir := cfg.Dir
	var temporary *scratch.Dir
	if dir == "" {
		var err error
		if temporary, err = scratch.Make(halt.Drill); err != nil {
			return nil, err
		}
		dir = temporary.Path()
	}
	c := cluster.Config{
		Dir: filepath.Join(dir, "mesh"), Programs: cfg.Programs, CacheDir: cfg.CacheDir, Replicas: 2, Nodes: ownNodes,
		GPUs: 1, LogLevel: cfg.LogLevel,
	}
	if !cfg.Production {
		c.Policy, c.Env = Scaled(), scaledEnv()
	}
	released, err := reapLater(cfg, c.Dir)
	if err != nil {
		return nil, err
	}
	up, err := cluster.New(ctx, logger, c)
	if err != nil {
		return nil, errors.Join(err, released())
	}
	kept, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var keeping sync.WaitGroup
	var keepErr error
	keeping.Go(func() { keepErr = up.Keep(kept) })
	m := &Mesh{Client: up.Client, Scaled: !cfg.Production, cluster: up}
	m.stop = func(ctx context.Context) error {
		cancel()
		keeping.Wait()
		err := errors.Join(keepErr, up.Close(ctx), released())
		if temporary != nil && err == nil {
			err = temporary.Remove()
		}
		return err
	}
	if err := up.Start(ctx); err != nil {
		return nil, errors.Join(err, fmt.Errorf("the services' logs end with:\n%s", up.Tails(8)),
			m.Close(context.WithoutCancel(ctx)))
	}
	return m, nil
}

// reapLater starts the process that ends everything that a mesh has launched if this process dies. The returned
// function releases it.
func reapLater(cfg Config, dir string) (func() error, error) {
	if cfg.Reaper == nil {
		return func() error { return nil }, nil
	}
	cmd := cfg.Reaper(dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("prepare the reaper: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the reaper: %w", err)
	}
	return func() error { return errors.Join(in.Close(), cmd.Wait()) }, nil
}

// Reap waits until in ends, which is when the process that started this one is gone, and then ends all processes below
// the directory of a mesh: instances, agents and workloads.
func Reap(ctx context.Context, in io.Reader, dir string) error {
	_, _ = io.Copy(io.Discard, in)
	// The kernel ends the services, which would launch instances again.
	if err := wait(ctx, 300*time.Millisecond); err != nil {
		return err
	}
	_, err := agents.End(ctx, dir, 500*time.Millisecond)
	return err
}

// On returns a mesh that another operator runs, with its policy as it is. Only faults that the API can cause can be
// injected there.
func On(client *person.Client) *Mesh { return &Mesh{Client: client} }

// Own reports whether the mesh is the drills' own, whose hosts and processes they may damage.
func (m *Mesh) Own() bool { return m.cluster != nil }

// Close ends a mesh of the drills' own with everything that runs on it, and removes its files; of another mesh it only
// closes the connection.
func (m *Mesh) Close(ctx context.Context) error {
	if m.stop == nil {
		return nil
	}
	return m.stop(ctx)
}

// Tails returns the ends of the logs, for people.
func (m *Mesh) Tails(lines int) string {
	if m.cluster == nil {
		return ""
	}
	return m.cluster.Tails(lines)
}

func (m *Mesh) form() string {
	if m.Scaled {
		return "scaled"
	}
	return "production"
}

// policy returns the policy that the mesh runs with, as the API reports it.
func (m *Mesh) policy(ctx context.Context) (policy.Set, error) {
	resp, err := m.Client.Query.GetPolicy(ctx, &readmodelv1.GetPolicyRequest{})
	if err != nil {
		return policy.Set{}, fmt.Errorf("ask for the policy: %w", err)
	}
	values := map[string]string{}
	for _, k := range resp.GetItems() {
		if _, known := policy.Lookup(k.GetKey()); known {
			values[k.GetKey()] = k.GetValue()
		}
	}
	return policy.NewSet(values)
}

// good waits until the mesh is as it should be before a fault: all parts well, all machines connected, and the
// bystander active.
func (m *Mesh) good(ctx context.Context) error {
	if err := await(ctx, "every part of the mesh to be well", settle, m.well); err != nil {
		return err
	}
	return m.bystander(ctx)
}

func (m *Mesh) well(ctx context.Context) error {
	status, err := m.Client.Query.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	for _, c := range status.GetComponents() {
		if !c.GetOk() {
			return fmt.Errorf("%s is not well: %s %s", c.GetName(), c.GetReason(), c.GetDetail())
		}
	}
	if m.cluster == nil {
		return nil
	}
	for _, p := range m.cluster.Processes() {
		if err := p.Ready(ctx); err != nil {
			return err
		}
	}
	if n, err := agents.Await(ctx, m.Client, m.cluster.Nodes, 0); err != nil || n < len(m.cluster.Nodes) {
		return errors.Join(err, fmt.Errorf("%d of %d machines are connected", n, len(m.cluster.Nodes)))
	}
	return nil
}

const bystander = "bystander"

// bystander makes the tenant and the workspace that no fault may affect, or finds them.
func (m *Mesh) bystander(ctx context.Context) error {
	_, err := m.Client.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{
		Name: Tenant, Quota: &lifecyclev1.Quota{Workspaces: 100, Gpus: 64, StorageBytes: 1 << 40},
	})
	if err != nil {
		return fmt.Errorf("make the tenant of the drills: %w", err)
	}
	ref := Tenant + "/" + bystander
	if w, err := m.workspace(ctx, ref); err != nil || w.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
		if _, err := m.create(ctx, bystander, nil); err != nil {
			return fmt.Errorf("make the workspace that nothing is to happen to: %w", err)
		}
		if err := m.awaitState(ctx, ref, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, settle); err != nil {
			return err
		}
	}
	// It is compared with afterwards, so it must not be on its way back from an earlier drill.
	return await(ctx, "the workspace that nothing is to happen to", settle, func(ctx context.Context) error {
		w, err := m.workspace(ctx, ref)
		if err == nil && w.GetUserState() != commonv1.UserState_USER_STATE_NORMAL {
			err = fmt.Errorf("it is %s to its user", names.Of(w.GetUserState()))
		}
		return err
	})
}

// fresh returns a name that no earlier drill has used.
func fresh(prefix string) string {
	id := ids.New()
	return prefix + "-" + id[len(id)-8:]
}

// create requests a workspace, again if the answer was lost.
func (m *Mesh) create(ctx context.Context, name string, spec *lifecyclev1.WorkspaceSpec) (*lifecyclev1.Operation,
	error,
) {
	key := ids.New()
	return command(ctx, "create "+name, func(ctx context.Context) (*lifecyclev1.Operation, error) {
		resp, err := m.Client.Command.CreateWorkspace(ctx,
			&readmodelv1.CreateWorkspaceRequest{Tenant: Tenant, Name: name, Spec: spec, IdempotencyKey: key})
		return resp.GetOperation(), err
	})
}

// operate requests a verb, as the command line does; again if the answer was lost.
func (m *Mesh) operate(ctx context.Context, workspace string, kind commonv1.OperationKind) (*lifecyclev1.Operation,
	error,
) {
	key := ids.New()
	return command(ctx, names.Of(kind), func(ctx context.Context) (*lifecyclev1.Operation, error) {
		resp, err := m.Client.Command.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
			Workspace: workspace, Kind: kind, Reason: "drill", IdempotencyKey: key,
		})
		return resp.GetOperation(), err
	})
}

// patience is how long a request is repeated whose answers are lost while a replica is replaced.
const patience = time.Minute

// settle is how long a condition before a fault or after its repair may take; it is no budget of the drill: the machine
// may be busy.
const settle = 3 * time.Minute

// command repeats a request with an idempotency key until it is answered: a refusal is an answer.
func command[T any](ctx context.Context, what string, ask func(ctx context.Context) (T, error)) (T, error) {
	var out T
	var refused error
	err := await(ctx, "an answer to "+what, patience, func(ctx context.Context) error {
		var err error
		out, err = ask(ctx)
		if err != nil && !passing(err) {
			refused = fmt.Errorf("%s: %w", what, err)
			return nil
		}
		return err
	})
	return out, errors.Join(err, refused)
}

// passing reports whether a request may simply be made again.
func passing(err error) bool {
	for _, r := range []commonv1.Reason{
		commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_CONFLICT,
	} {
		if fault.Has(err, r) {
			return true
		}
	}
	_, typed := fault.As(err)
	return !typed
}

func (m *Mesh) workspace(ctx context.Context, ref string) (*readmodelv1.Workspace, error) {
	resp, err := m.Client.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: ref})
	return resp.GetWorkspace(), err
}

// awaitState waits until a workspace is in a state.
func (m *Mesh) awaitState(ctx context.Context, ref string, want commonv1.WorkspaceState, limit time.Duration) error {
	return await(ctx, ref+" to be "+names.Of(want), limit, func(ctx context.Context) error {
		w, err := m.workspace(ctx, ref)
		if err != nil {
			return err
		}
		if w.GetState() != want {
			return fmt.Errorf("it is %s: %s %s %s", names.Of(w.GetState()), w.GetCurrentStep(), w.GetWhyWaiting(),
				w.GetLastError())
		}
		return nil
	})
}

// explain adds the owner of the verdict's reason and its remedy, as the API explains them.
func explain(ctx context.Context, m *Mesh, v Verdict) (Verdict, error) {
	var items []*readmodelv1.ReasonText
	err := await(ctx, "the explanation of "+v.Reason, patience, func(ctx context.Context) error {
		resp, err := m.Client.Query.ExplainReason(ctx, &readmodelv1.ExplainReasonRequest{Code: v.Reason})
		items = resp.GetItems()
		if err != nil && !passing(err) {
			return at(StageVerdict, err)
		}
		return err
	})
	if err != nil {
		return v, err
	}
	if len(items) != 1 {
		return v, fmt.Errorf("the API explains the reason %q %d times", v.Reason, len(items))
	}
	v.Owner = items[0].GetOwner()
	if v.Next == "" {
		v.Next = items[0].GetNextAction()
	}
	return v, nil
}

// setPolicy changes a key as an operator does.
func (m *Mesh) setPolicy(ctx context.Context, key, value string) error {
	_, err := command(ctx, "set "+key, func(ctx context.Context) (*readmodelv1.SetPolicyResponse, error) {
		return m.Client.Command.SetPolicy(ctx,
			&readmodelv1.SetPolicyRequest{Key: key, Value: value, Reason: "drill", AcknowledgeWeakening: true})
	})
	return err
}

// anew ends the replicas of a service in order, one after the other, and has them started again, with env in their
// environment from then on. A killed replica would keep its leases on runs until they expire; one that ends in order
// releases them.
func (m *Mesh) anew(ctx context.Context, replicas []*cluster.Process, env ...string) error {
	for _, p := range replicas {
		p.BeforeStart(func() []string { return env })
		starts := p.Starts() // before its end: it is started again within moments
		if err := p.Signal(syscall.SIGTERM); err != nil {
			return fmt.Errorf("end %s: %w", p.Name, err)
		}
		if err := await(ctx, p.Name+" to be started again", settle, func(ctx context.Context) error {
			if p.Starts() == starts {
				return errors.New("it is not")
			}
			return p.Ready(ctx)
		}); err != nil {
			return err
		}
	}
	return await(ctx, "every part of the mesh to be well again", settle, m.well)
}

var errNotOwn = errors.New("this fault hurts hosts and processes: it is injected into a mesh of the drill's own alone; leave --context out")

// own returns the cluster, or an error if the mesh is not the drills' own.
func (m *Mesh) own() (*cluster.Cluster, error) {
	if m.cluster == nil {
		return nil, at(StageGood, errNotOwn)
	}
	return m.cluster, nil
}

// Refuse returns why a drill cannot be run on a mesh; nil if it can.
func (d Drill) Refuse(m *Mesh) error {
	if !m.Own() && !d.Outside {
		return fmt.Errorf("%s: %w", d.Name, errNotOwn)
	}
	return nil
}

// wait sleeps for as long as a fault is to last.
func wait(ctx context.Context, d time.Duration) error {
	if !app.Sleep(ctx, d) {
		return context.Cause(ctx)
	}
	return nil
}
