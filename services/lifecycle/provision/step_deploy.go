package provision

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/readiness"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// probeEvery is the time between two probes of readiness.
const probeEvery = time.Second

// readyOutput is the output of the wait, which the last step reads.
type readyOutput struct {
	Endpoints []endpoint `json:"endpoints"`
}

// deployOutput is the output of the deploy, which the wait reads.
type deployOutput struct {
	// Restarts are those that each workload had when it was deployed: a workload that was adopted keeps its count.
	Restarts map[string]int32 `json:"restarts"`
}

type endpoint struct {
	Workload string `json:"workload"`
	Name     string `json:"name"`
	URL      string `json:"url"`
}

// deploy has the agent make and start every workload. The tasks are queued together and waited for together.
func (s *Steps) deploy(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	_, spec, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	where, err := output[storageOutput](env, StepStorage)
	if err != nil {
		return saga.Outcome{}, err
	}
	schema, err := output[SchemaOutput](env, StepSchema)
	if err != nil {
		return saga.Outcome{}, err
	}
	owner := secretenv.Owner{TenantID: env.TenantID, WorkspaceID: env.WorkspaceID}
	if err := s.deps.Secrets.Opens(spec, owner); err != nil {
		return saga.Outcome{}, err
	}
	secrets := s.DatabaseEnv(schema, env.Epoch)
	var held []claims.Claim
	before := deployOutput{Restarts: map[string]int32{}}
	var waiting task.Row // for one of them
	pending := 0
	for _, w := range spec.GetWorkloads() {
		claim, _, err := env.Intent(ctx,
			claims.Spec{
				Kind: allocation.KindWorkload, Name: w.GetName(), Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL,
				NodeID: where.NodeID,
			})
		if err != nil {
			return saga.Outcome{}, fmt.Errorf("claim workload: %w", err)
		}
		held = append(held, claim)
		deploy := &nodev1.WorkloadDeploy{
			Workload: w, GpuDeviceIds: where.Devices, StorageName: StorageName,
			SecretEnv: secrets,
		}
		if err := s.deps.Secrets.SealDeploy(deploy, owner); err != nil {
			return saga.Outcome{}, err
		}
		row, done, err := s.do(ctx, env, taskSpec{
			suffix: "deploy-" + w.GetName(), kind: commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY, nodeID: where.NodeID,
			payload: deploy,
		})
		if err != nil {
			return saga.Outcome{}, err
		}
		if !done {
			pending++
			waiting = row
			continue
		}
		status := &nodev1.WorkloadStatusOutput{}
		if err := proto.Unmarshal(row.Output, status); err != nil {
			return saga.Outcome{}, fmt.Errorf("read result of workload.deploy: %w", err)
		}
		for _, st := range status.GetWorkloads() {
			before.Restarts[w.GetName()] = st.GetRestarts()
		}
	}
	if pending > 0 {
		why, err := s.keptFrom(ctx, waiting, commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY)
		return waitTask(fmt.Sprintf("waiting for the agent to deploy %d of %d workloads", pending, len(held)) + why), err
	}
	return saga.Done(before, func(ctx context.Context, tx pgx.Tx) error {
		for _, c := range held {
			if err := env.ConfirmTx(ctx, tx, c, where.NodeID+"/"+c.Name); err != nil {
				return fmt.Errorf("confirm workload: %w", err)
			}
		}
		return nil
	}), nil
}

// remove has the agent remove the workloads. Where the workspace has an instance of its own, an agent that cannot act
// does not delay it: the workloads end with the instance.
func (s *Steps) remove(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	if err := s.withdraw(ctx, env); err != nil {
		return saga.Outcome{}, err
	}
	held, err := claimsOf(ctx, env, allocation.KindWorkload)
	if err != nil {
		return saga.Outcome{}, err
	}
	a, allocated, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return saga.Outcome{}, err
	}
	own := allocated && placement.HasOwnInstance(a.Placement)
	waiting := 0
	for _, c := range held {
		if own && (c.NodeID == "" || !gate.Reachable(ctx, s.deps.DB, c.NodeID)) {
			continue
		}
		_, done, err := s.do(ctx, env, taskSpec{
			suffix: "remove-" + c.Name, kind: commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE, nodeID: c.NodeID,
			payload: &nodev1.WorkloadRef{Name: c.Name}, within: time.Minute,
		})
		switch {
		case err != nil && (!own || saga.Interrupted(err)):
			return saga.Outcome{}, err
		case err != nil:
			continue
		case !done && own && (s.overdue(ctx, env) || allocation.Late(ctx, s.deps.DB, env.WorkspaceID)):
			continue
		case !done:
			waiting++
		default:
			if err := env.Release(ctx, c); err != nil {
				return saga.Outcome{}, fmt.Errorf("release workload: %w", err)
			}
		}
	}
	if waiting > 0 {
		return waitTask(fmt.Sprintf("waiting for the agent to remove %d workloads", waiting)), nil
	}
	return saga.Done(nil), nil
}

// observeDeploy leaves the observation to the agent: a second deploy of the same workloads adopts those that run.
func (s *Steps) observeDeploy(ctx context.Context, env *saga.Env) (saga.Observation, error) {
	held, err := claimsOf(ctx, env, allocation.KindWorkload)
	if err != nil {
		return saga.Observation{}, err
	}
	if len(held) == 0 {
		return saga.Observation{Presence: saga.Absent}, nil
	}
	return saga.Observation{Presence: saga.Partial, Why: "deploying again adopts what runs"}, nil
}

// waitReady probes the workloads' state through the agent until all are ready. Between two probes it occupies no
// worker.
func (s *Steps) waitReady(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	_, spec, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	where, err := output[storageOutput](env, StepStorage)
	if err != nil {
		return saga.Outcome{}, err
	}
	row, fresh, err := s.probe(ctx, env, where.NodeID)
	if err != nil {
		return saga.Outcome{}, err
	}
	if row.State != commonv1.TaskState_TASK_STATE_SUCCEEDED {
		why := "waiting for the agent to tell how the workloads are"
		if task.Terminal(row.State) {
			why = "the agent did not tell how the workloads are: " + row.Error
		}
		return waitTask(why), nil
	}
	status := &nodev1.WorkloadStatusOutput{}
	if err := proto.Unmarshal(row.Output, status); err != nil {
		return saga.Outcome{}, fmt.Errorf("read result of workload.status: %w", err)
	}
	var before deployOutput // of a run that was deployed by an earlier version: none
	if _, err := env.Output(StepDeploy, &before); err != nil {
		return saga.Outcome{}, fmt.Errorf("read output of %q: %w", StepDeploy, err)
	}
	found := readiness.Of(spec, status, before.Restarts, s.crashLoop())
	switch {
	case found.Ended != nil && env.Kind == commonv1.OperationKind_OPERATION_KIND_RECREATE:
		return saga.Wait(meanwhile(found.Ended)), nil
	case found.Ended != nil:
		return saga.Outcome{}, found.Ended
	case found.Absent != nil:
		return saga.Outcome{}, found.Absent
	}
	if found.Ready < len(spec.GetWorkloads()) {
		if fresh {
			if err := env.Progress(ctx, fmt.Sprintf("%d/%d workloads ready", found.Ready,
				len(spec.GetWorkloads()))); err != nil {
				return saga.Outcome{}, fmt.Errorf("report progress: %w", err)
			}
		}
		return saga.Wait(saga.WaitFor{For: probeEvery, Why: found.Why, WakeOnSignal: true}), nil
	}
	host := "127.0.0.1"
	if g, ok, err := gate.Get(ctx, s.deps.DB, where.NodeID); err == nil && ok && len(g.Host.GetAddresses()) > 0 &&
		!placement.HasOwnInstance(spec.GetPlacement()) {
		host = g.Host.GetAddresses()[0]
	}
	return saga.Done(readyOutput{Endpoints: endpoints(host, status)}), nil
}

var probeIsDue = pg.Define(pg.RoleLifecycle, "provision.probe_is_due",
	`SELECT mesh.clock() - $1::timestamptz >= $2::interval`)

// probe returns the newest status task of this attempt, and queues the next once the last is old enough. fresh reports
// that its result was not seen before.
func (s *Steps) probe(ctx context.Context, env *saga.Env, nodeID string) (task.Row, bool, error) {
	var out task.Row
	queued, fresh := false, false
	prefix := fmt.Sprintf("%s/status/%d/", env.IdempotencyKey, env.Attempt)
	err := env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		queued, fresh = false, false
		last, ok, err := task.Latest(ctx, tx, env.RunID, prefix)
		if err != nil {
			return err
		}
		out = last
		if ok && !task.Terminal(last.State) {
			return nil
		}
		n := 0
		if ok {
			// One task for each probe: a result is used once, and the next task is queued after probeEvery.
			var old bool
			if err := pg.QueryRow(ctx, tx, probeIsDue, last.StateAt, probeEvery).Scan(&old); err != nil {
				return fmt.Errorf("read clock: %w", err)
			}
			if !old {
				fresh = true
				return nil
			}
			if _, err := fmt.Sscanf(last.IdemKey[len(prefix):], "%d", &n); err != nil {
				return fmt.Errorf("read number of probe: %w", err)
			}
		}
		next, err := s.deps.Tasks.Enqueue(ctx, tx, task.Spec{
			Type: commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS, NodeID: nodeID, WorkspaceID: env.WorkspaceID,
			TenantID: env.TenantID, RunID: env.RunID, Epoch: env.Epoch, OpSeq: env.OpSeq,
			IdempotencyKey: prefix + strconv.Itoa(n+1), Payload: &nodev1.WorkloadRef{Name: "*", LastOutput: true},
			StartWithin: 30 * time.Second, CorrelationID: env.CorrelationID, CreatedBy: "saga",
		})
		if err != nil {
			return err
		}
		out, queued = next, true
		return nil
	})
	if err != nil {
		return task.Row{}, false, fmt.Errorf("probe workloads: %w", err)
	}
	if queued {
		s.deps.Committed()
	}
	return out, fresh, nil
}

func endpoints(host string, status *nodev1.WorkloadStatusOutput) []endpoint {
	var out []endpoint
	for _, w := range status.GetWorkloads() {
		for _, p := range w.GetPorts() {
			name := p.GetName()
			if name == "" {
				name = "port"
			}
			out = append(out, endpoint{
				Workload: w.GetName(), Name: name,
				URL: "http://" + net.JoinHostPort(host, strconv.Itoa(int(p.GetPort()))),
			})
		}
	}
	return out
}

// crashLoop returns how many restarts count as a crash loop by the policy in force.
func (s *Steps) crashLoop() int32 {
	set := policy.Defaults()
	if s.deps.Policy != nil {
		set = s.deps.Policy.Current()
	}
	return int32(set.WorkloadCrashLoopRestarts())
}

// meanwhile returns the wait of a recreation for a workload that has ended. The end is not final in a recreation: the
// undo would remove what the workspace keeps, and after a loss of machines the services that the workload depends on
// may still be starting.
func meanwhile(was *saga.StepError) saga.WaitFor {
	shown := *was
	if was.Reason == commonv1.Reason_REASON_WORKLOAD_CRASH_LOOP {
		shown.Public = strings.Replace(was.Public, "was restarted", "exits again and again: restarted", 1)
	}
	return saga.WaitFor{For: probeEvery, Why: shown.Public, WakeOnSignal: true, Meanwhile: &shown}
}
