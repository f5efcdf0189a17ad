// Package projecttest writes a synthetic event log: each event is appended by the role that owns it, as the real
// services do.
package projecttest

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// Log is the event log of one test.
type Log struct {
	TB             testing.TB
	DB             *testkit.Database
	Numbered, Wake *events.Signal
	versions       map[string]int64
	sequencer      *events.Sequencer
}

// New returns a log over a database that belongs to the test.
func New(tb testing.TB) *Log {
	tb.Helper()
	l := &Log{TB: tb, DB: testkit.DB(tb), Numbered: &events.Signal{}, Wake: &events.Signal{}, versions: map[string]int64{}}
	var err error
	l.sequencer, err = events.NewSequencer(events.SequencerDeps{
		Pool: l.DB.Pool(pg.RoleSequencer), Wake: l.Wake, Numbered: l.Numbered, Logger: testkit.Logger(tb),
	}, events.SequencerConfig{})
	l.must(err)
	return l
}

// Projector returns a projector over the log.
func (l *Log) Projector() *project.Projector {
	l.TB.Helper()
	p, err := project.New(project.Deps{
		Logger: testkit.Logger(l.TB), DB: l.DB.Pool(pg.RoleReadmodel), Numbered: l.Numbered,
		Wake: l.Wake,
	})
	l.must(err)
	return p
}

// Number assigns all appended events their positions.
func (l *Log) Number() {
	l.TB.Helper()
	l.must(l.sequencer.Drain(testkit.Context(l.TB)))
}

// Put appends the entity as its next version and numbers it. It returns the position token.
func (l *Log) Put(m proto.Message) string {
	l.TB.Helper()
	token := l.Append(m)
	l.Number()
	return token
}

// Append is Put without numbering. It sets the message's version.
func (l *Log) Append(m proto.Message) string {
	l.TB.Helper()
	role, e := event(m)
	e.AggregateVersion = l.versions[e.AggregateType+e.AggregateID] + 1
	return l.write(role, e)
}

// AppendVersion appends the entity with the given version.
func (l *Log) AppendVersion(m proto.Message, version int64) string {
	l.TB.Helper()
	role, e := event(m)
	e.AggregateVersion = version
	return l.write(role, e)
}

// Observe appends what a node's agent reports of a workspace's workloads.
func (l *Log) Observe(nodeID string, m *nodev1.Observation) string {
	l.TB.Helper()
	role, e := event(m)
	e.NodeID, e.AggregateVersion = nodeID, l.versions[e.AggregateType+e.AggregateID]+1
	return l.write(role, e)
}

// AppendRaw appends any event.
func (l *Log) AppendRaw(role string, e events.Event) string {
	l.TB.Helper()
	return l.write(role, e)
}

func (l *Log) write(role string, e events.Event) string {
	l.TB.Helper()
	l.versions[e.AggregateType+e.AggregateID] = max(l.versions[e.AggregateType+e.AggregateID], e.AggregateVersion)
	var token string
	l.must(pg.InTx(testkit.Context(l.TB), l.DB.Pool(role), func(ctx context.Context, tx pgx.Tx) error {
		var err error
		token, err = events.Append(ctx, tx, e)
		return err
	}))
	return token
}

func (l *Log) must(err error) {
	l.TB.Helper()
	if err != nil {
		l.TB.Fatal(err)
	}
}

func event(m proto.Message) (string, events.Event) {
	e := events.Event{Payload: m}
	role := pg.RoleLifecycle
	switch m := m.(type) {
	case *recoveryv1.NodeIdentity:
		role, e.Kind, e.AggregateType, e.AggregateID, e.NodeID = pg.RoleRecovery, project.KindNode, "node_identity",
			m.GetNodeId(), m.GetNodeId()
		e.TenantID = m.GetTenantId()
	case *nodev1.SessionChanged:
		role, e.Kind, e.AggregateType, e.AggregateID, e.NodeID = pg.RoleNodeAPI, project.KindSession, "session",
			m.GetSessionId(), m.GetNodeId()
	case *nodev1.Observation:
		role, e.Kind, e.AggregateType, e.AggregateID, e.WorkspaceID = pg.RoleNodeAPI, project.KindObservation, "observation",
			m.GetWorkspaceId(), m.GetWorkspaceId()
	case *lifecyclev1.NodeGate:
		e.Kind, e.AggregateType, e.AggregateID, e.NodeID = project.KindGate, "gate", m.GetNodeId(), m.GetNodeId()
	case *lifecyclev1.Tenant:
		e.Kind, e.AggregateType, e.AggregateID, e.TenantID = project.KindTenant, "tenant", m.GetTenantId(), m.GetTenantId()
	case *lifecyclev1.Workspace:
		e.Kind, e.AggregateType, e.AggregateID, e.TenantID = project.KindWorkspace, "workspace", m.GetWorkspaceId(),
			m.GetTenantId()
		e.WorkspaceID = m.GetWorkspaceId()
	case *lifecyclev1.Run:
		e.Kind, e.AggregateType, e.AggregateID, e.TenantID = project.KindRun, "run", m.GetRunId(), m.GetTenantId()
		e.WorkspaceID, e.WorkflowID = m.GetWorkspaceId(), m.GetRunId()
	case *lifecyclev1.StepAttempt:
		e.Kind, e.AggregateType, e.WorkspaceID, e.WorkflowID = project.KindStep, "step", m.GetWorkspaceId(), m.GetRunId()
		e.AggregateID = project.StepID(m)
	case *lifecyclev1.Allocation:
		e.Kind, e.AggregateType, e.AggregateID, e.WorkspaceID = project.KindAllocation, "allocation", m.GetAllocationId(),
			m.GetWorkspaceId()
	case *lifecyclev1.Instance:
		e.Kind, e.AggregateType, e.AggregateID, e.WorkspaceID = project.KindInstance, "instance", m.GetInstanceId(),
			m.GetWorkspaceId()
	case *lifecyclev1.Claim:
		e.Kind, e.AggregateType, e.AggregateID, e.WorkspaceID = project.KindClaim, "claim", m.GetClaimId(), m.GetWorkspaceId()
	case *lifecyclev1.Finding:
		e.Kind, e.AggregateType, e.AggregateID, e.WorkspaceID = project.KindFinding, "finding", m.GetFindingId(),
			m.GetWorkspaceId()
	case *recoveryv1.NodeVerdict:
		role, e.Kind, e.AggregateType, e.AggregateID, e.NodeID = pg.RoleRecovery, project.KindVerdict, "verdict",
			cmp.Or(m.GetNodeId(), project.ControlPlane), m.GetNodeId()
	case *recoveryv1.RecoveryRecord:
		role, e.Kind, e.AggregateType, e.AggregateID, e.WorkspaceID = pg.RoleRecovery, project.KindRecovery, "recovery",
			m.GetRecordId(), m.GetWorkspaceId()
	case *recoveryv1.Incident:
		role, e.Kind, e.AggregateType, e.AggregateID = pg.RoleRecovery, project.KindIncident, "incident", m.GetIncidentId()
	case *lifecyclev1.TaskChanged:
		t := m.GetTask()
		e.Kind, e.AggregateType, e.AggregateID, e.NodeID, e.WorkspaceID = project.KindTask, "task", t.GetTaskId(),
			t.GetNodeId(), t.GetWorkspaceId()
	}
	return role, e
}

// World is a small mesh with two tenants: a node and a workspace each, and a shared machine.
type World struct {
	*Log

	Replica string
	A, B    Tenant
	Shared  string // node id
}

// Tenant is one tenant's part of a World.
type Tenant struct {
	ID, Name                                                        string
	WorkspaceID, WorkspaceName, RunID, NodeID, NodeName, InstanceID string
	TaskID, ClaimID, AllocationID, SessionID                        string
}

// NewWorld writes and numbers the events of a world.
func NewWorld(tb testing.TB) *World {
	tb.Helper()
	w := &World{Log: New(tb), Replica: ids.New(), Shared: ids.New()}
	w.Beat(false)
	w.Append(&recoveryv1.NodeIdentity{
		NodeId: w.Shared, Name: "shared",
		State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
	})
	w.A, w.B = w.tenant("alpha"), w.tenant("beta")
	w.Number()
	return w
}

// Beat writes a beat of the world's replica at the database's time.
func (w *World) Beat(leaving bool) {
	w.TB.Helper()
	w.BeatOf(w.Replica, w.Now().Add(-time.Hour), leaving)
}

// BeatOf writes a beat, at the database's time, of a replica that started at started.
func (w *World) BeatOf(replica string, started time.Time, leaving bool) {
	w.TB.Helper()
	testkit.BeatSince(w.DB, replica, started, leaving)
}

// Now returns the database's time.
func (w *World) Now() time.Time {
	w.TB.Helper()
	now, _, err := testkit.Clock(testkit.Context(w.TB), w.DB.Pool(pg.RoleReadmodel))
	w.must(err)
	return now
}

func (w *World) tenant(name string) Tenant {
	t := Tenant{
		ID: ids.New(), Name: name, WorkspaceID: ids.New(), WorkspaceName: "ws-" + name, RunID: ids.New(), NodeID: ids.New(),
		NodeName: "box-" + name, InstanceID: ids.New(), TaskID: ids.New(), ClaimID: ids.New(), AllocationID: ids.New(),
		SessionID: ids.New(),
	}
	at := timestamppb.New(w.Now().Add(-time.Minute))
	w.Append(&lifecyclev1.Tenant{TenantId: t.ID, Name: name, Quota: &lifecyclev1.Quota{Workspaces: 3}, CreatedAt: at})
	w.Append(&lifecyclev1.Workspace{
		WorkspaceId: t.WorkspaceID, TenantId: t.ID, Tenant: name, Name: t.WorkspaceName,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, Epoch: 1, RunId: t.RunID, CreatedAt: at, StateAt: at,
		NodeId: t.NodeID, NodeName: t.NodeName,
		CreatedBy: "person-" + name,
	})
	w.Append(&lifecyclev1.Run{
		RunId: t.RunID, WorkspaceId: t.WorkspaceID, TenantId: t.ID, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Round: 1, State: commonv1.RunState_RUN_STATE_RUNNING, Phase: "do", Step: 1, Epoch: 1,
		WhyWaiting: "doing the step \"Allocate storage\"",
		StepNames:  []string{"Validate request", "Allocate storage", "Mark active"}, CreatedAt: at,
	})
	w.Append(&lifecyclev1.StepAttempt{
		RunId: t.RunID, WorkspaceId: t.WorkspaceID, Step: 0, Name: "Validate request",
		Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
		StartedAt:  at,
		FinishedAt: timestamppb.New(at.AsTime().Add(2 * time.Second)),
	})
	w.Append(&lifecyclev1.StepAttempt{
		RunId: t.RunID, WorkspaceId: t.WorkspaceID, Step: 1, Name: "Allocate storage",
		Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_RUNNING,
		StartedAt: at, HeartbeatAt: at, Progress: "half of " + name, Stage: "connect",
		Stalled: true,
	})
	w.Append(&recoveryv1.NodeIdentity{
		NodeId: t.NodeID, Name: t.NodeName, State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, TenantId: t.ID,
		WorkspaceId: t.WorkspaceID, CreatedAt: at, StateAt: at,
	})
	w.Append(&lifecyclev1.NodeGate{
		NodeId: t.NodeID, Name: t.NodeName, Admitted: true, FenceEpoch: 1, SessionEpoch: 1,
		WorkspaceId: t.WorkspaceID,
	})
	w.Append(&nodev1.SessionChanged{
		SessionId: t.SessionID, NodeId: t.NodeID, ReplicaId: w.Replica, Generation: 1,
		State: commonv1.SessionState_SESSION_STATE_ADMITTED, OpenedAt: at, LastSeenAt: at,
	})
	w.Append(&lifecyclev1.Instance{
		InstanceId: t.InstanceID, WorkspaceId: t.WorkspaceID, WorkspaceName: t.WorkspaceName, TenantId: t.ID, Epoch: 1,
		NodeId: t.NodeID, State: commonv1.InstanceState_INSTANCE_STATE_LIVE, ProviderId: "pid-" + name, StartedAt: at,
	})
	w.Append(&lifecyclev1.Allocation{
		AllocationId: t.AllocationID, WorkspaceId: t.WorkspaceID, TenantId: t.ID,
		State: commonv1.AllocationState_ALLOCATION_STATE_ACTIVE, NodeId: t.NodeID,
	})
	w.Append(&lifecyclev1.Claim{
		ClaimId: t.ClaimID, WorkspaceId: t.WorkspaceID, TenantId: t.ID, RunId: t.RunID, Kind: "slot", Name: "slot-" + name,
		IntentAt: at,
	})
	w.Append(&lifecyclev1.Finding{
		FindingId: ids.New(), Kind: commonv1.FindingKind_FINDING_KIND_ROW_CHANGED_OUTSIDE,
		Severity: commonv1.Severity_SEVERITY_P1, SubjectType: "workspace", SubjectId: t.WorkspaceID,
		WorkspaceId: t.WorkspaceID, TenantId: t.ID, Summary: "drift of " + name, NextAction: "repair", FirstSeenAt: at,
		LastSeenAt: at, Count: 1,
	})
	w.Append(&lifecyclev1.TaskChanged{
		Task: &lifecyclev1.Task{
			TaskId: t.TaskID, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeId: t.NodeID, WorkspaceId: t.WorkspaceID,
			TenantId: t.ID, State: commonv1.TaskState_TASK_STATE_QUEUED, Attempt: 1, CreatedAt: at,
			ExpiresAt: timestamppb.New(at.AsTime().Add(time.Hour)),
		},
		Transitions: []*lifecyclev1.TaskTransition{{State: commonv1.TaskState_TASK_STATE_QUEUED, At: at}},
	})
	return t
}
