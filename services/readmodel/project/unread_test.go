package project_test

import (
	"slices"
	"testing"

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
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// newer is a number that no enum of this build has.
const newer = 9999

// Of each kind of events one has the number of an enum value that this build does not know, and one behind it has not.
// The projection makes a row of the first one, which keeps the number, or parks it where its table must have a known
// value; it makes a row of every other one.
func TestUnknownValuesStopNoOtherEvent(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	parks := []string{project.KindNode, project.KindSession, project.KindWorkspace, project.KindTask, project.KindFinding}
	for _, of := range []struct {
		kind, table string
		event       func(id string, value int32) proto.Message
	}{
		{project.KindNode, "node", func(id string, v int32) proto.Message {
			return &recoveryv1.NodeIdentity{NodeId: id, Name: id, State: commonv1.NodeIdentityState(v)}
		}},
		{project.KindSession, "session", func(id string, v int32) proto.Message {
			return &nodev1.SessionChanged{SessionId: id, NodeId: id, State: commonv1.SessionState(v)}
		}},
		{project.KindObservation, "observed", func(id string, v int32) proto.Message {
			return &nodev1.Observation{
				WorkspaceId: id, Workloads: []*nodev1.WorkloadStatus{{Name: "w", Phase: nodev1.WorkloadPhase(v)}},
			}
		}},
		{project.KindWorkspace, "workspace", func(id string, v int32) proto.Message {
			return &lifecyclev1.Workspace{WorkspaceId: id, TenantId: id, Name: id, State: commonv1.WorkspaceState(v)}
		}},
		{project.KindRun, "run", func(id string, v int32) proto.Message {
			return &lifecyclev1.Run{
				RunId: id, WorkspaceId: id, State: commonv1.RunState(v), Kind: commonv1.OperationKind(v),
				ErrorLayer: commonv1.OwnerLayer(v),
			}
		}},
		{project.KindStep, "step", func(id string, v int32) proto.Message {
			return &lifecyclev1.StepAttempt{
				RunId: id, WorkspaceId: id, Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
				State: commonv1.AttemptState(v),
			}
		}},
		{project.KindAllocation, "allocation", func(id string, v int32) proto.Message {
			return &lifecyclev1.Allocation{
				AllocationId: id, WorkspaceId: id, State: commonv1.AllocationState(v), Placement: commonv1.PlacementDriver(v),
			}
		}},
		{project.KindInstance, "instance", func(id string, v int32) proto.Message {
			return &lifecyclev1.Instance{InstanceId: id, WorkspaceId: id, State: commonv1.InstanceState(v)}
		}},
		{project.KindClaim, "claim", func(id string, v int32) proto.Message {
			return &lifecyclev1.Claim{ClaimId: id, WorkspaceId: id, Scope: commonv1.ClaimScope(v)}
		}},
		{project.KindTask, "task", func(id string, v int32) proto.Message {
			return &lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{
				TaskId: id, NodeId: id, State: commonv1.TaskState(v), Type: commonv1.TaskType(v),
				Reason: commonv1.Reason(v),
			}}
		}},
		{project.KindFinding, "finding", func(id string, v int32) proto.Message {
			return &lifecyclev1.Finding{
				FindingId: id, Kind: commonv1.FindingKind(v), Severity: commonv1.Severity(v),
			}
		}},
		{project.KindRecovery, "recovery_record", func(id string, v int32) proto.Message {
			return &recoveryv1.RecoveryRecord{
				RecordId: id, WorkspaceId: id, Trigger: commonv1.RecoveryTrigger(v), Outcome: commonv1.RecoveryOutcome(v),
			}
		}},
		{project.KindIncident, "incident", func(id string, v int32) proto.Message {
			return &recoveryv1.Incident{
				IncidentId: id, Kind: commonv1.IncidentKind(v), Severity: commonv1.Severity(v),
			}
		}},
		{project.KindVerdict, "verdict", func(id string, v int32) proto.Message {
			return &recoveryv1.NodeVerdict{
				NodeId: id, Reason: commonv1.DriftReason(v), Severity: commonv1.Severity(v), DetectedAt: timestamppb.Now(),
			}
		}},
	} {
		role := pg.RoleLifecycle
		switch of.kind {
		case project.KindNode, project.KindRecovery, project.KindIncident, project.KindVerdict:
			role = pg.RoleRecovery
		case project.KindSession, project.KindObservation:
			role = pg.RoleNodeAPI
		}
		for _, value := range []int32{newer, 1} {
			id := ids.New()
			l.AppendRaw(role, events.Event{
				Kind: of.kind, AggregateType: of.table, AggregateID: id, AggregateVersion: 1, Payload: of.event(id, value),
				Correlation: events.Correlation{NodeID: id},
			})
		}
		l.Number()
		must(t, p.Drain(ctx))
		parked, err := p.Parked(ctx)
		must(t, err)
		rows := text(t, l, `SELECT count(*)::text FROM readmodel.`+of.table)
		switch is := slices.ContainsFunc(parked, func(e events.ParkedEvent) bool { return e.Kind == of.kind }); {
		case is != slices.Contains(parks, of.kind):
			t.Errorf("%s is parked: %t: %+v", of.kind, is, parked)
		case is && rows != "1", !is && rows != "2":
			t.Errorf("%s has %s rows", of.kind, rows)
		}
		if kept := text(t, l, `SELECT count(*)::text FROM readmodel.`+of.table+` x
			WHERE x::text LIKE '%9999%'`); kept == "0" && !slices.Contains(parks, of.kind) {
			t.Errorf("%s does not keep the number", of.kind)
		}
	}
	if report, err := p.Verify(ctx); err != nil || !report.Equal() || report.Parked != len(parks) {
		t.Errorf("the projections are not what the events are: %+v, %v", report, err)
	}
}
