package provision

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/runbook"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// The steps of provisioning, by the names that the timeline shows.
const (
	StepValidate = "Validate request"
	StepStorage  = runbook.StepInstance
	StepHandle   = "Allocate workflow handle"
	StepSchema   = "Apply per-tenant schema"
	StepDeploy   = "Deploy tenant workloads"
	StepReady    = "Wait for workloads ready"
	StepActive   = "Mark active"
	// StepPrevious stands before StepStorage in a recreation.
	StepPrevious = "End previous box"
)

// LaunchLog compares what placements have launched with this database.
type LaunchLog interface {
	// Compared reports whether a comparison is done and recovery has all its results.
	Compared() bool
	// Check compares again.
	Check(ctx context.Context) error
}

// StepDeps are the dependencies of the steps.
type StepDeps struct {
	Logger    *slog.Logger
	DB        *pgxpool.Pool
	Workloads *pgxpool.Pool // the workload database, as its administrator
	// Committed is called after each commit that wrote events or woke a run.
	Committed  func()
	Tasks      *dispatch.Server
	Identities allocation.Identities
	Drivers    map[commonv1.PlacementDriver]placement.Driver
	Catalogue  spec.Catalogue
	// EpochRefusals counts refusals of epochs that have been passed. May be nil.
	EpochRefusals *EpochRefusals
	// LaunchLog compares launch logs with the database; nothing is launched before it has done so. May be nil.
	LaunchLog LaunchLog
	// Secret derives launch secrets and database passwords, so that none is stored.
	Secret []byte
	// Secrets seals the environment values of a deploy, and opens them to check that they can be opened.
	Secrets *secretenv.Keys
	// ReleaseDeadline is how long a release may take before its allocation is release_failed; zero means two minutes.
	// ForceGrace is how long a forced release tries each undo; zero means ten seconds.
	ReleaseDeadline, ForceGrace time.Duration
	// Policy sets how long steps and runs may show no progress. May be nil: then the values of the definitions apply.
	Policy policy.Reader
}

// Steps are the functions of the sagas.
type Steps struct{ deps StepDeps }

// NewSteps returns the functions with the given dependencies.
func NewSteps(deps StepDeps) *Steps { return &Steps{deps: deps} }

// Stalls returns how long a step, or with an empty step a run, may show no progress by the policy in force; zero
// without a policy.
func (s *Steps) Stalls(_, step string) time.Duration {
	if s.deps.Policy == nil {
		return 0
	}
	p := s.deps.Policy.Current()
	switch step {
	case "":
		return p.SagaStall()
	case StepReady:
		return p.SagaWaitReadyStall()
	default:
		return p.SagaStepStall()
	}
}

// PostponeDeadlines postpones the time limits of workspaces whose runs go on after rollback mode: the deadlines of
// their releases, and the last moments at which their tasks may start.
func (s *Steps) PostponeDeadlines(ctx context.Context, tx pgx.Tx, runs []saga.Resumed) error {
	var ids, workspaces []string
	var stood []float64
	for _, r := range runs {
		ids, workspaces, stood = append(ids, r.RunID), append(workspaces, r.WorkspaceID), append(stood, r.Stood.Seconds())
	}
	if err := allocation.MoveDeadlines(ctx, tx, workspaces, stood); err != nil {
		return err
	}
	return task.Extend(ctx, tx, ids, stood)
}

// derive returns a secret for a purpose, derived from the service's own.
func (s *Steps) derive(purpose, id string) []byte {
	m := hmac.New(sha256.New, s.deps.Secret)
	m.Write([]byte(purpose + "\x00" + id))
	return m.Sum(nil)
}

// launchSecret returns the token that a launched instance enrols with.
func (s *Steps) launchSecret(instanceID string) string {
	return "gls_" + strings.ReplaceAll(instanceID, "-", "") + "_" +
		base64.RawURLEncoding.EncodeToString(s.derive("launch", instanceID))
}

// databasePassword returns the password of a workspace's role in the workload database, a new one for each epoch.
func (s *Steps) databasePassword(role string, epoch int64) string {
	return hex.EncodeToString(s.derive("database", fmt.Sprintf("%s/%d", role, epoch))[:24])
}

// taskSpec is a task that a step wants done.
type taskSpec struct {
	suffix  string // tells apart the tasks of one step
	kind    commonv1.TaskType
	nodeID  string
	payload proto.Message
	within  time.Duration
}

// ensure has a task done once for this step and direction: it returns the task that is under way or has succeeded,
// whichever attempt queued it; a task that ended otherwise is queued anew by a later attempt, and is this attempt's
// failure if this attempt queued it. Of a task that is queued anew the cordon of the node is that of the one before: of
// the first it is read with the next wait.
func (s *Steps) ensure(ctx context.Context, env *saga.Env, spec taskSpec) (task.Row, error) {
	var out task.Row
	queued := false
	prefix := env.IdempotencyKey + "/" + spec.suffix + "/"
	err := env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		queued = false
		last, ok, err := task.Latest(ctx, tx, env.RunID, prefix)
		if err != nil {
			return err
		}
		mine := prefix + fmt.Sprint(env.Attempt)
		if ok && (!task.Terminal(last.State) || last.State == commonv1.TaskState_TASK_STATE_SUCCEEDED ||
			last.IdemKey == mine) {
			out = last
			return nil
		}
		out, err = s.deps.Tasks.Enqueue(ctx, tx, task.Spec{
			Type: spec.kind, NodeID: spec.nodeID, WorkspaceID: env.WorkspaceID, TenantID: env.TenantID, RunID: env.RunID,
			Epoch: env.Epoch, OpSeq: env.OpSeq, IdempotencyKey: mine, Payload: spec.payload, StartWithin: spec.within,
			CorrelationID: env.CorrelationID,
			CreatedBy:     "saga",
		})
		out.NodeCordoned = last.NodeCordoned
		queued = true
		return err
	})
	if err != nil {
		return task.Row{}, fmt.Errorf("queue %s: %w", names.Of(spec.kind), err)
	}
	if queued {
		s.deps.Committed()
	}
	return out, nil
}

// do calls ensure and judges the task: it returns the task, and whether it is done or still under way. A failure is an
// error with its owner.
func (s *Steps) do(ctx context.Context, env *saga.Env, spec taskSpec) (task.Row, bool, error) {
	row, err := s.ensure(ctx, env, spec)
	if err != nil {
		return row, false, err
	}
	switch row.State {
	case commonv1.TaskState_TASK_STATE_SUCCEEDED:
		return row, true, nil
	case commonv1.TaskState_TASK_STATE_SUPERSEDED:
		return row, false, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_TASK_SUPERSEDED,
			"the agent has seen a later operation on this workspace", errors.New(row.Error))
	case commonv1.TaskState_TASK_STATE_FAILED, commonv1.TaskState_TASK_STATE_EXPIRED,
		commonv1.TaskState_TASK_STATE_CANCELLED,
		commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN:
		reason := commonv1.Reason_REASON_WORKLOAD_FAILED
		if r, err := names.Parse[commonv1.Reason](row.Reason); err == nil && row.Reason != "" {
			reason = r
		}
		text := fmt.Sprintf("%s ended as %s", names.Of(spec.kind), names.Of(row.State))
		if row.Error != "" {
			text += ": " + row.Error
		}
		if row.State == commonv1.TaskState_TASK_STATE_EXPIRED {
			if why, err := s.keptFrom(ctx, row, spec.kind); err != nil || why != "" {
				return row, false, err // an attempt after the end of the cordon queues it again
			}
			// An agent without room for its ledger takes no task, and its disk is why this one was not begun.
			g, _, err := gate.Get(ctx, s.deps.DB, spec.nodeID)
			if err != nil {
				return row, false, fmt.Errorf("read gate: %w", err)
			}
			if disk := g.Host.GetStateDisk(); disk.GetFull() {
				reason = commonv1.Reason_REASON_NODE_DISK_FULL
				text += ": the node's state directory has no room: " + disk.GetPath() + ": " + disk.GetDetail()
			}
		}
		if reason == commonv1.Reason_REASON_INVALID_ARGUMENT || reason == commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED ||
			reason == commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE {
			// The agent would refuse the same again.
			return row, false, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, reason, text, nil)
		}
		return row, false, saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, reason, text, nil)
	default:
		return row, false, nil
	}
}

// keptFrom returns the end of a text about a step that waits for a task of a type: why that is not leased to its node,
// because the node's host is not as it was accepted. It is empty if that does not keep the task from the node. Of a
// node that is not cordoned it reads nothing.
func (s *Steps) keptFrom(ctx context.Context, row task.Row, kind commonv1.TaskType) (string, error) {
	if !row.NodeCordoned || task.StartsNothing(names.Of(kind)) {
		return "", nil
	}
	why, err := gate.DiagnosisOnly(ctx, s.deps.DB, row.NodeID)
	if why != "" {
		why = "; the node is " + why
	}
	return why, err
}

// waitTask parks the step until one of its tasks changes state.
func waitTask(what string) saga.Outcome {
	return saga.Wait(saga.WaitFor{For: 5 * time.Second, Why: what, WakeOnSignal: true})
}

// untilRecovery returns the outcome of a step whose call to recovery failed with err. A recovery that cannot be
// reached, gives no answer in time or has no room has decided nothing about the instance: the attempt waits for it,
// within the step's budget, and shows the error meanwhile. A failure would undo the operation, which in a recreation
// takes the workspace's storage with it. Any other error is returned unchanged.
func untilRecovery(ctx context.Context, err error) (saga.Outcome, error) {
	e, ok := errors.AsType[*saga.StepError](err)
	if !ok || e.Layer != commonv1.OwnerLayer_OWNER_LAYER_CERT || ctx.Err() != nil || saga.Interrupted(err) {
		return saga.Outcome{}, err
	}
	switch e.Reason { // every other reason is an answer of recovery
	case commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED,
		commonv1.Reason_REASON_OVERLOADED, commonv1.Reason_REASON_SERVER_DRAINING:
	default:
		return saga.Outcome{}, err
	}
	return saga.Wait(saga.WaitFor{
		For: recoveryEvery, Why: "waiting for recovery, which could not be asked: " + e.Public, WakeOnSignal: true,
		Meanwhile: e,
	}), nil
}

// recoveryEvery is how often a step that waits for recovery asks it again.
const recoveryEvery = 5 * time.Second

// withdraw requests the cancellation of every task that the run's other steps queued on the way forward and that is not
// done: an undo must not race it. A cancel has done so already, except for a task that a step queued at the same
// moment. The agent refuses a task that still arrives, since the undo carries a higher op_seq.
func (s *Steps) withdraw(ctx context.Context, env *saga.Env) error {
	var rows []task.Row
	err := env.TxAfter(ctx, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		rows, err = s.deps.Tasks.CancelOfRun(ctx, tx, env.RunID, env.IdempotencyKey, "the operation is being undone")
		return err
	}, nil)
	if err != nil {
		return fmt.Errorf("withdraw tasks: %w", err)
	}
	if len(rows) > 0 {
		s.deps.Committed()
		s.deps.Tasks.Announce(rows, "the operation is being undone")
	}
	return nil
}

// lockNodes locks the gates of the nodes on which the step's workspace has something: a step whose rows cordon one of
// them, or end a cordon, takes it before the run's lock.
func lockNodes(env *saga.Env) saga.TxFunc {
	return func(ctx context.Context, tx pgx.Tx) error {
		return gate.LockOfWorkspace(ctx, tx, env.WorkspaceID)
	}
}

// claimsOf returns the live claims of the step's kinds, those of this epoch and of earlier ones.
func claimsOf(ctx context.Context, env *saga.Env, kinds ...string) ([]claims.Claim, error) {
	held, err := env.Claims(ctx, kinds...)
	if err != nil {
		return nil, fmt.Errorf("read claims: %w", err)
	}
	return held, nil
}
