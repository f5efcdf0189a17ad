package project

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
)

// Kinds of events that are projected. `policy.changed` is none of them: the keys are asked of their owner.
const (
	KindNode        = "node_identity.changed"
	KindSession     = "session.changed"
	KindGate        = "gate.changed"
	KindTenant      = "tenant.changed"
	KindWorkspace   = "workspace.changed"
	KindRun         = "run.changed"
	KindStep        = "step.changed"
	KindAllocation  = "allocation.changed"
	KindInstance    = "instance.changed"
	KindClaim       = "claim.changed"
	KindTask        = "task.changed"
	KindObservation = "workload.observed"
)

// Kinds returns all of them.
func Kinds() []string {
	return []string{
		KindNode, KindSession, KindGate, KindTenant, KindWorkspace, KindRun, KindStep, KindAllocation, KindInstance, KindClaim,
		KindTask, KindObservation, KindFinding, KindRecovery, KindIncident, KindBrake,
	}
}

// applier puts events into one set of tables.
type applier struct{ sql statements }

// row is what one event makes of one table, in the order of columnsOf. The last value is a *content.
type row struct {
	table  string
	values []any
}

// apply implements events.Apply.
func (a applier) apply(ctx context.Context, tx pgx.Tx, r events.Record) error {
	return a.applyAll(ctx, tx, []events.Record{r})
}

// rowsOf is the whole mapping from events to rows.
func rowsOf(r events.Record) ([]row, error) {
	switch r.Kind {
	case KindNode:
		return nodeRow(r)
	case KindSession:
		return sessionRow(r)
	case KindGate:
		m, body, err := decode(r, &lifecyclev1.NodeGate{})
		if err != nil {
			return nil, err
		}
		return one(r, "gate", []any{key(m.GetNodeId()), r.AggregateVersion, body})
	case KindTenant:
		m, body, err := decode(r, &lifecyclev1.Tenant{})
		if err != nil {
			return nil, err
		}
		return one(r, "tenant", []any{key(m.GetTenantId()), r.AggregateVersion, m.GetName(), body})
	case KindWorkspace:
		m, body, err := decode(r, &lifecyclev1.Workspace{})
		if err != nil {
			return nil, err
		}
		body.showNames = true
		return one(r, "workspace", []any{
			key(m.GetWorkspaceId()), r.AggregateVersion, key(m.GetTenantId()), m.GetTenant(), m.GetName(), names.Of(m.GetState()), ref(m.GetNodeId()),
			body,
		})
	case KindRun:
		m, _, err := decode(r, &lifecyclev1.Run{})
		if err != nil {
			return nil, err
		}
		return runRows(r, m)
	case KindStep:
		return stepRow(r)
	case KindAllocation:
		m, body, err := decode(r, &lifecyclev1.Allocation{})
		if err != nil {
			return nil, err
		}
		return one(r, "allocation", []any{key(m.GetAllocationId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), body})
	case KindInstance:
		m, body, err := decode(r, &lifecyclev1.Instance{})
		if err != nil {
			return nil, err
		}
		live := m.GetState() != commonv1.InstanceState_INSTANCE_STATE_ENDED
		return one(r, "instance", []any{key(m.GetInstanceId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), live, body})
	case KindClaim:
		m, body, err := decode(r, &lifecyclev1.Claim{})
		if err != nil {
			return nil, err
		}
		return one(r, "claim", []any{
			key(m.GetClaimId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), m.GetReleasedAt() != nil,
			m.GetOrphanedAt() != nil, body,
		})
	case KindTask:
		return taskRows(r)
	case KindFinding:
		return findingRow(r)
	case KindRecovery, KindIncident, KindBrake:
		return watchdogRows(r)
	case KindObservation:
		m, body, err := decode(r, &nodev1.Observation{})
		if err != nil {
			return nil, err
		}
		// The version is a time in microseconds. A replica of an earlier build took it from its own clock, which may be ahead: what it wrote must not hide
		// what another writes later. Nothing is seen after it was written.
		version := min(r.AggregateVersion, r.CreatedAt.UnixMicro())
		return one(r, "observed", []any{key(m.GetWorkspaceId()), key(r.NodeID), version, body})
	default:
		return nil, nil // nothing of ours
	}
}

func nodeRow(r events.Record) ([]row, error) {
	m, body, err := decode(r, &recoveryv1.NodeIdentity{})
	if err != nil {
		return nil, err
	}
	return one(r, "node", []any{key(m.GetNodeId()), r.AggregateVersion, m.GetName(), names.Of(m.GetState()), ref(m.GetTenantId()), body})
}

func sessionRow(r events.Record) ([]row, error) {
	m, body, err := decode(r, &nodev1.SessionChanged{})
	if err != nil {
		return nil, err
	}
	return one(r, "session", []any{
		key(m.GetSessionId()), r.AggregateVersion, key(m.GetNodeId()), ref(m.GetReplicaId()), m.GetGeneration(), names.Of(m.GetState()),
		Serving(m), r.CreatedAt, body,
	})
}

func stepRow(r events.Record) ([]row, error) {
	m, body, err := decode(r, &lifecyclev1.StepAttempt{})
	if err != nil {
		return nil, err
	}
	return attempt(r, m, r.AggregateVersion, body)
}

func attempt(r events.Record, m *lifecyclev1.StepAttempt, version int64, body *content) ([]row, error) {
	return one(r, "step", []any{
		key(m.GetRunId()), m.GetStep(), names.Of(m.GetDirection()), m.GetAttempt(), version, key(m.GetWorkspaceId()),
		m.GetStalled() && OpenAttempt(m.GetState()), body,
	})
}

// runRows splits a run's event into the run and the attempts that changed with it.
func runRows(r events.Record, m *lifecyclev1.Run) ([]row, error) {
	steps := m.GetChangedSteps()
	m.ChangedSteps = nil
	out, err := one(r, "run", []any{
		key(m.GetRunId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), LiveRun(m.GetState()), &content{message: m},
	})
	if err != nil {
		return nil, err
	}
	for _, s := range steps {
		rows, err := attempt(r, s, s.GetVersion(), &content{message: s})
		if err != nil {
			return nil, err
		}
		out = append(out, rows...)
	}
	return out, nil
}

func taskRows(r events.Record) ([]row, error) {
	m, _, err := decode(r, &lifecyclev1.TaskChanged{})
	if err != nil {
		return nil, err
	}
	task := m.GetTask()
	id := key(task.GetTaskId())
	rows, err := one(r, "task", []any{
		id, r.AggregateVersion, key(task.GetNodeId()), ref(task.GetWorkspaceId()), ref(task.GetTenantId()), names.Of(task.GetState()),
		moment(task.GetExpiresAt()), &content{message: task},
	})
	if err != nil {
		return nil, err
	}
	for n, t := range m.GetTransitions() {
		rows = append(rows, row{table: "task_transition", values: []any{id, r.AggregateVersion, n, &content{message: t}}})
	}
	return rows, nil
}

// one makes the rows of an event that has one. A payload without its own id is poison.
func one(r events.Record, name string, values []any) ([]row, error) {
	if r.AggregateVersion <= 0 {
		return nil, errors.New("the event has no version")
	}
	for i := range tables[name].key {
		if values[i] == nil {
			return nil, fmt.Errorf("the payload has no %s", tables[name].key[i])
		}
	}
	return []row{{table: name, values: values}}, nil
}

// key is an id that must be there and must be one; otherwise it is nil, which the column refuses.
func key(id string) any { return ref(id) }

// ref is an id that may be missing. One that is malformed is left to the column to refuse.
func ref(id string) any {
	if id == "" {
		return nil
	}
	if parsed, err := uuid.Parse(id); err == nil {
		return parsed.String()
	}
	return id
}

func moment(t *timestamppb.Timestamp) any {
	if t == nil {
		return nil
	}
	return t.AsTime().Truncate(time.Microsecond) // what the column holds
}

// Serving says whether a session carries its node: it is admitted, or drains after it was, and is on time.
func Serving(s *nodev1.SessionChanged) bool {
	switch s.GetState() { //nolint:exhaustive // the others do not serve
	case commonv1.SessionState_SESSION_STATE_ADMITTED, commonv1.SessionState_SESSION_STATE_DRAINING:
		return !s.GetLate()
	default:
		return false
	}
}

// LiveRun says whether a run still owns its workspace.
func LiveRun(state commonv1.RunState) bool {
	return state != commonv1.RunState_RUN_STATE_SUCCEEDED && state != commonv1.RunState_RUN_STATE_FAILED
}

// OpenAttempt says whether an attempt is under way.
func OpenAttempt(state commonv1.AttemptState) bool {
	return state == commonv1.AttemptState_ATTEMPT_STATE_RUNNING || state == commonv1.AttemptState_ATTEMPT_STATE_WAITING
}

// StepID is the aggregate id of an attempt, as lifecycle spells it.
func StepID(m *lifecyclev1.StepAttempt) string {
	return fmt.Sprintf("%s/%d/%s/%d", m.GetRunId(), m.GetStep(), names.Of(m.GetDirection()), m.GetAttempt())
}
