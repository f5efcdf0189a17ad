package project

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/readmodel/project/rowbody"
)

// Kinds of events that are projected. `policy.changed` is not among them, because policy keys are read from their
// owner.
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
	KindFinding     = "finding.changed"         // of lifecycle's sweeps
	KindRecovery    = "recovery_record.changed" // this and the next two are of recovery's watchdog
	KindIncident    = "incident.changed"
	KindBrake       = "brake.changed"
	KindVerdict     = "verdict.changed"
)

// Kinds returns all kinds of events that are projected.
func Kinds() []string {
	return []string{
		KindNode, KindSession, KindGate, KindTenant, KindWorkspace, KindRun, KindStep, KindAllocation, KindInstance,
		KindClaim, KindTask, KindObservation, KindFinding, KindRecovery, KindIncident, KindBrake,
		KindVerdict,
	}
}

// applier applies events to one set of tables.
type applier struct {
	sql    statements
	queues bool // what may be touched is queued for the notifier
}

// row is one row that an event writes to a table, its values in the order of columnsOf. The last value is a
// *rowbody.Content.
type row struct {
	table  string
	values []any
}

// apply implements events.Apply.
func (a applier) apply(ctx context.Context, tx pgx.Tx, r events.Record) error {
	return a.applyAll(ctx, tx, []events.Record{r})
}

// rowsOf has the rows that the events of each kind write. It is the whole mapping from events to rows; events of other
// kinds write none.
var rowsOf = map[string]func(r events.Record) ([]row, error){
	KindNode: into("node", func(r events.Record, m *recoveryv1.NodeIdentity, body *rowbody.Content) []any {
		return []any{
			key(m.GetNodeId()), r.AggregateVersion, m.GetName(), names.Of(m.GetState()), ref(m.GetTenantId()), body,
		}
	}),
	KindSession: into("session", func(r events.Record, m *nodev1.SessionChanged, body *rowbody.Content) []any {
		return []any{
			key(m.GetSessionId()), r.AggregateVersion, key(m.GetNodeId()), ref(m.GetReplicaId()), m.GetGeneration(),
			names.Of(m.GetState()), Serving(m), r.CreatedAt, body,
		}
	}),
	KindGate: into("gate", func(r events.Record, m *lifecyclev1.NodeGate, body *rowbody.Content) []any {
		return []any{key(m.GetNodeId()), r.AggregateVersion, body}
	}),
	KindTenant: into("tenant", func(r events.Record, m *lifecyclev1.Tenant, body *rowbody.Content) []any {
		return []any{key(m.GetTenantId()), r.AggregateVersion, m.GetName(), body}
	}),
	KindWorkspace: into("workspace", func(r events.Record, m *lifecyclev1.Workspace, body *rowbody.Content) []any {
		body.ShowNames = true
		return []any{
			key(m.GetWorkspaceId()), r.AggregateVersion, key(m.GetTenantId()), m.GetTenant(), m.GetName(),
			names.Of(m.GetState()), ref(m.GetNodeId()), body,
		}
	}),
	KindRun: runRows,
	KindStep: into("step", func(r events.Record, m *lifecyclev1.StepAttempt, body *rowbody.Content) []any {
		return attempt(m, r.AggregateVersion, body)
	}),
	KindAllocation: into("allocation", func(r events.Record, m *lifecyclev1.Allocation, body *rowbody.Content) []any {
		return []any{
			key(m.GetAllocationId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), body,
		}
	}),
	KindInstance: into("instance", func(r events.Record, m *lifecyclev1.Instance, body *rowbody.Content) []any {
		return []any{
			key(m.GetInstanceId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()),
			m.GetState() != commonv1.InstanceState_INSTANCE_STATE_ENDED, body,
		}
	}),
	KindClaim: into("claim", func(r events.Record, m *lifecyclev1.Claim, body *rowbody.Content) []any {
		return []any{
			key(m.GetClaimId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), m.GetReleasedAt() != nil,
			m.GetOrphanedAt() != nil, body,
		}
	}),
	KindTask: taskRows,
	// The version is a time in microseconds. A replica of an earlier build took it from its own clock, which may be
	// ahead: what it wrote must not hide what another replica writes later. An observation cannot be later than the event
	// that carries it.
	KindObservation: into("observed", func(r events.Record, m *nodev1.Observation, body *rowbody.Content) []any {
		return []any{key(m.GetWorkspaceId()), key(r.NodeID), min(r.AggregateVersion, r.CreatedAt.UnixMicro()), body}
	}),
	KindFinding: into("finding", func(r events.Record, m *lifecyclev1.Finding, body *rowbody.Content) []any {
		return []any{
			key(m.GetFindingId()), r.AggregateVersion, ref(m.GetWorkspaceId()), ref(m.GetTenantId()),
			names.Of(m.GetSeverity()), m.GetResolvedAt() == nil, body,
		}
	}),
	KindRecovery: into("recovery_record",
		func(r events.Record, m *recoveryv1.RecoveryRecord, body *rowbody.Content) []any {
			return []any{
				key(m.GetRecordId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()),
				cmp.Or(moment(m.GetDetectedAt()), any(r.CreatedAt)), body,
			}
		}),
	KindIncident: into("incident", func(r events.Record, m *recoveryv1.Incident, body *rowbody.Content) []any {
		return []any{key(m.GetIncidentId()), r.AggregateVersion, m.GetClosedAt() == nil, body}
	}),
	KindBrake: into("brake", func(r events.Record, m *recoveryv1.Brake, body *rowbody.Content) []any {
		return []any{r.AggregateID, r.AggregateVersion, m.GetEngaged(), body}
	}),
	KindVerdict: verdictRows,
}

// into returns what makes the row of a table of an event whose message is that row: values returns its columns.
func into[T any, M interface {
	*T
	proto.Message
}](table string, values func(r events.Record, m M, body *rowbody.Content) []any) func(events.Record) ([]row, error) {
	return func(r events.Record) ([]row, error) {
		m, body, err := rowbody.Of(r, M(new(T)))
		if err != nil {
			return nil, err
		}
		return one(r, table, values(r, m, body))
	}
}

func attempt(m *lifecyclev1.StepAttempt, version int64, body *rowbody.Content) []any {
	return []any{
		key(m.GetRunId()), m.GetStep(), names.Of(m.GetDirection()), m.GetAttempt(), version, key(m.GetWorkspaceId()),
		m.GetStalled() && OpenAttempt(m.GetState()), body,
	}
}

// runRows returns the rows of a run's event: the run, and the attempts that changed with it.
func runRows(r events.Record) ([]row, error) {
	m, _, err := rowbody.Of(r, &lifecyclev1.Run{})
	if err != nil {
		return nil, err
	}
	steps := m.GetChangedSteps()
	m.ChangedSteps = nil
	out, err := one(r, "run", []any{
		key(m.GetRunId()), r.AggregateVersion, key(m.GetWorkspaceId()), ref(m.GetTenantId()), LiveRun(m.GetState()),
		&rowbody.Content{Message: m},
	})
	if err != nil {
		return nil, err
	}
	for _, s := range steps {
		rows, err := one(r, "step", attempt(s, s.GetVersion(), &rowbody.Content{Message: s}))
		if err != nil {
			return nil, err
		}
		out = append(out, rows...)
	}
	return out, nil
}

func taskRows(r events.Record) ([]row, error) {
	m, _, err := rowbody.Of(r, &lifecyclev1.TaskChanged{})
	if err != nil {
		return nil, err
	}
	task := m.GetTask()
	id := key(task.GetTaskId())
	rows, err := one(r, "task", []any{
		id, r.AggregateVersion, key(task.GetNodeId()), ref(task.GetWorkspaceId()), ref(task.GetTenantId()),
		names.Of(task.GetState()), moment(task.GetExpiresAt()), &rowbody.Content{Message: task},
	})
	if err != nil {
		return nil, err
	}
	for n, t := range m.GetTransitions() {
		body := &rowbody.Content{Message: t}
		rows = append(rows, row{table: "task_transition", values: []any{id, r.AggregateVersion, n, body}})
	}
	return rows, nil
}

// one returns the row of an event that writes a single row. An event whose payload lacks its own id cannot be applied
// and is parked.
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

// key returns a required id as an argument. An empty id becomes nil, which the column refuses.
func key(id string) any { return ref(id) }

// ref returns an optional id as an argument: nil if it is empty. A malformed id is passed on, and the column refuses
// it.
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
	return t.AsTime().Truncate(time.Microsecond) // the precision of the column
}

// Serving reports whether a session serves its node: it is admitted, or drains after it was admitted, and is not late.
func Serving(s *nodev1.SessionChanged) bool {
	switch s.GetState() { // the others do not serve
	case commonv1.SessionState_SESSION_STATE_ADMITTED, commonv1.SessionState_SESSION_STATE_DRAINING:
		return !s.GetLate()
	default:
		return false
	}
}

// LiveRun reports whether a run in this state still owns its workspace.
func LiveRun(state commonv1.RunState) bool {
	return state != commonv1.RunState_RUN_STATE_SUCCEEDED && state != commonv1.RunState_RUN_STATE_FAILED
}

// OpenAttempt reports whether an attempt in this state is under way.
func OpenAttempt(state commonv1.AttemptState) bool {
	return state == commonv1.AttemptState_ATTEMPT_STATE_RUNNING || state == commonv1.AttemptState_ATTEMPT_STATE_WAITING
}

// StepID returns the aggregate id of an attempt, in lifecycle's format.
func StepID(m *lifecyclev1.StepAttempt) string {
	return fmt.Sprintf("%s/%d/%s/%d", m.GetRunId(), m.GetStep(), names.Of(m.GetDirection()), m.GetAttempt())
}
