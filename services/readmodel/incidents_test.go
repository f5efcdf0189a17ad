package readmodel_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

func (o *owners) ReleaseBrake(ctx context.Context, r *recoveryv1.ReleaseBrakeRequest) (*recoveryv1.ReleaseBrakeResponse,
	error,
) {
	return &recoveryv1.ReleaseBrakeResponse{Brake: &recoveryv1.Brake{ReleaseReason: r.GetReason()}, Pos: "pos"},
		o.note(ctx, r)
}

func (o *owners) CloseIncident(ctx context.Context,
	r *recoveryv1.CloseIncidentRequest,
) (*recoveryv1.CloseIncidentResponse, error) {
	return &recoveryv1.CloseIncidentResponse{
		Incident: &recoveryv1.Incident{IncidentId: r.GetIncidentId(), CloseReason: r.GetReason()}, Pos: "pos",
	}, o.note(ctx, r)
}

func (k *kit) incidents(token string) readmodelv1connect.IncidentServiceClient {
	k.t.Helper()
	return readmodelv1connect.NewIncidentServiceClient(k.http(token, true), k.url())
}

// announce appends an event as the watchdog would.
func (k *kit) announce(kind, aggregate, id string, version int64, m proto.Message) string {
	k.t.Helper()
	return k.AppendRaw(pg.RoleRecovery,
		events.Event{Kind: kind, AggregateType: aggregate, AggregateID: id, AggregateVersion: version, Payload: m})
}

func (k *kit) recovery(of projecttest.Tenant, at time.Time) *recoveryv1.RecoveryRecord {
	k.t.Helper()
	r := &recoveryv1.RecoveryRecord{
		RecordId: ids.New(), WorkspaceId: of.WorkspaceID, TenantId: of.ID, Workspace: of.Name + "/" + of.WorkspaceName,
		DetectedAt: timestamppb.New(at), Trigger: commonv1.RecoveryTrigger_RECOVERY_TRIGGER_STALLED,
		Outcome: commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD, Version: 1,
	}
	k.announce("recovery_record.changed", "recovery_record", r.GetRecordId(), 1, r)
	return r
}

func TestIncidentsRecoveriesAndTheBrake(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	operator, tenant := k.incidents(k.token("", "operator")), k.incidents(k.token(k.A.ID, "tenant", "operator", "viewer"))
	brake, err := operator.GetBrake(ctx, &readmodelv1.GetBrakeRequest{})
	k.check(err)
	if brake.GetBrake() == nil || brake.GetBrake().GetEngaged() {
		t.Fatalf("a brake that never moved: %v", brake)
	}
	now := k.Now()
	own, theirs, old := k.recovery(k.A, now), k.recovery(k.B, now), k.recovery(k.B, now.Add(-3*time.Hour))
	open := &recoveryv1.Incident{
		IncidentId: ids.New(), Kind: commonv1.IncidentKind_INCIDENT_KIND_FLEET_BRAKE, Summary: "too much",
		OpenedAt: timestamppb.New(now), Version: 1, WorkspaceIds: []string{k.A.WorkspaceID, k.B.WorkspaceID},
		TenantIds: []string{k.A.ID, k.B.ID},
	}
	closed := &recoveryv1.Incident{
		IncidentId: ids.New(), Kind: commonv1.IncidentKind_INCIDENT_KIND_STEP_CLASS, OpenedAt: timestamppb.New(now),
		ClosedAt: timestamppb.New(now), Version: 2,
	}
	k.announce("incident.changed", "incident", open.GetIncidentId(), 1, open)
	k.announce("incident.changed", "incident", closed.GetIncidentId(), 2, closed)
	k.announce("incident.changed", "incident", closed.GetIncidentId(), 1,
		&recoveryv1.Incident{IncidentId: closed.GetIncidentId()}) // old news
	pos := k.announce("brake.changed", "brake", "fleet", 1,
		&recoveryv1.Brake{Engaged: true, Affected: 5, Limit: 2, IncidentId: open.GetIncidentId(), Version: 1})
	k.Number()

	list, err := reached(t, func() (*readmodelv1.ListIncidentsResponse, error) {
		return operator.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{MinPos: pos})
	})
	k.check(err)
	// the answer has the names
	open.Workspaces = []string{k.A.Name + "/" + k.A.WorkspaceName, k.B.Name + "/" + k.B.WorkspaceName}
	if len(list.GetItems()) != 1 || !proto.Equal(list.GetItems()[0], open) {
		t.Fatalf("%v", list)
	}
	if list, err = operator.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{IncludeClosed: true}); err != nil ||
		len(list.GetItems()) != 2 {
		t.Fatalf("%v %v", list, err)
	}
	got, err := operator.GetIncident(ctx, &readmodelv1.GetIncidentRequest{IncidentId: open.GetIncidentId()})
	k.check(err)
	if !proto.Equal(got.GetIncident(), open) || len(got.GetRecoveries()) != 2 ||
		!proto.Equal(got.GetRecoveries()[0], theirs) || !proto.Equal(got.GetRecoveries()[1], own) {
		t.Fatalf("%v", got) // not the one of three hours ago
	}
	_, err = operator.GetIncident(ctx, &readmodelv1.GetIncidentRequest{IncidentId: ids.New()})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_NOT_FOUND {
		t.Fatalf("%v", err)
	}
	if brake, err = operator.GetBrake(ctx, &readmodelv1.GetBrakeRequest{}); err != nil || !brake.GetBrake().GetEngaged() ||
		brake.GetBrake().GetAffected() != 5 {
		t.Fatalf("%v %v", brake, err)
	}
	all, err := operator.ListRecoveries(ctx, &readmodelv1.ListRecoveriesRequest{})
	k.check(err)
	if len(all.GetItems()) != 3 {
		t.Fatalf("%v", all)
	}
	of, err := operator.ListRecoveries(ctx, &readmodelv1.ListRecoveriesRequest{Workspace: k.B.WorkspaceName})
	k.check(err)
	if len(of.GetItems()) != 2 || !proto.Equal(of.GetItems()[0], old) {
		t.Fatalf("%v", of)
	}

	// A tenant sees its own recoveries, and no object that concerns other tenants as well.
	mine, err := tenant.ListRecoveries(ctx, &readmodelv1.ListRecoveriesRequest{})
	k.check(err)
	if len(mine.GetItems()) != 1 || !proto.Equal(mine.GetItems()[0], own) {
		t.Fatalf("%v", mine)
	}
	list, err = tenant.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{IncludeClosed: true})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
		t.Fatalf("%v %v", list, err)
	}
	_, err = tenant.GetIncident(ctx, &readmodelv1.GetIncidentRequest{IncidentId: open.GetIncidentId()})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_NOT_FOUND {
		t.Fatalf("%v", err)
	}
	for _, procedure := range []string{"GetBrake", "ReleaseBrake"} {
		answer := k.post(k.http(k.token(k.A.ID, "tenant", "operator"), false),
			"/gpuaas.readmodel.v1.IncidentService/"+procedure, &readmodelv1.ReleaseBrakeRequest{Reason: "x"})
		if answer.Status == http.StatusOK || strings.Contains(answer.Body, "affected") {
			t.Errorf("%s: %+v", procedure, answer)
		}
	}

	// The projection equals a fresh one made from the first event on.
	report, err := k.service.Verify(ctx)
	k.check(err)
	if !report.Equal() {
		t.Fatalf("%+v", report)
	}
}

func TestReleasingTheBrakeIsItsOwnersDecision(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	k.owners.take()
	out, err := k.incidents(k.token("", "operator")).ReleaseBrake(ctx,
		&readmodelv1.ReleaseBrakeRequest{Reason: "the switch was replaced"})
	k.check(err)
	heard := k.owners.take()
	if len(heard) != 1 || heard[0].person.Subject == "" || out.GetPos() == "" ||
		out.GetBrake().GetReleaseReason() != "the switch was replaced" {
		t.Fatalf("%v after %v", out, heard)
	}
	k.owners.refuse(fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the fleet brake is not engaged"))
	_, err = k.incidents(k.token("", "operator")).ReleaseBrake(ctx, &readmodelv1.ReleaseBrakeRequest{Reason: "again"})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Fatalf("%v", err)
	}
	k.owners.refuse(nil)
	if _, err = k.incidents(k.token("", "operator")).ReleaseBrake(ctx, &readmodelv1.ReleaseBrakeRequest{}); err == nil {
		t.Fatal("without a reason")
	}
	if _, err = k.incidents(k.token("", "viewer")).ReleaseBrake(ctx,
		&readmodelv1.ReleaseBrakeRequest{Reason: "x"}); err == nil {
		t.Fatal("a viewer releases the brake")
	}
}

// TestClosingAnIncidentIsItsOwnersDecision checks that the request goes on to recovery under the person's name, that a
// refusal of recovery comes back, and that it needs an id, a reason and one of two roles.
func TestClosingAnIncidentIsItsOwnersDecision(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	id := ids.New()
	req := &readmodelv1.CloseIncidentRequest{IncidentId: id, Reason: "the rack is being moved"}
	for _, role := range []string{"operator", "security"} {
		k.owners.take()
		out, err := k.incidents(k.token("", role)).CloseIncident(ctx, req)
		k.check(err)
		heard := k.owners.take()
		if len(heard) != 1 || heard[0].person.Subject == "" || out.GetPos() == "" ||
			out.GetIncident().GetIncidentId() != id || out.GetIncident().GetCloseReason() != req.GetReason() {
			t.Fatalf("%v after %v", out, heard)
		}
	}
	k.owners.refuse(fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the incident is closed"))
	_, err := k.incidents(k.token("", "operator")).CloseIncident(ctx, req)
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Fatalf("%v", err)
	}
	k.owners.refuse(nil)
	for what, r := range map[string]*readmodelv1.CloseIncidentRequest{
		"no reason": {IncidentId: id}, "no id": {IncidentId: "n1", Reason: "x"},
	} {
		if _, err = k.incidents(k.token("", "operator")).CloseIncident(ctx, r); err == nil {
			t.Errorf("%s", what)
		}
	}
	k.owners.take()
	if _, err = k.incidents(k.token("", "viewer")).CloseIncident(ctx, req); err == nil || len(k.owners.take()) != 0 {
		t.Fatalf("a viewer closes an incident: %v", err)
	}
}
