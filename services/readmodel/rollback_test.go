package readmodel_test

import (
	"context"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

func (o *owners) GetRollback(ctx context.Context, r *recoveryv1.GetRollbackRequest) (*recoveryv1.GetRollbackResponse,
	error,
) {
	return &recoveryv1.GetRollbackResponse{Rollback: &recoveryv1.RollbackMode{Active: true}}, o.note(ctx, r)
}

func (o *owners) AcceptRollback(ctx context.Context,
	r *recoveryv1.AcceptRollbackRequest,
) (*recoveryv1.AcceptRollbackResponse, error) {
	return &recoveryv1.AcceptRollbackResponse{Rollback: &recoveryv1.RollbackMode{AcceptReason: r.GetReason()}, Pos: "pos"},
		o.note(ctx, r)
}

func (k *kit) rollbacks(token string) readmodelv1connect.RollbackServiceClient {
	k.t.Helper()
	return readmodelv1connect.NewRollbackServiceClient(k.http(token, true), k.url())
}

func TestAcceptingARollbackIsItsOwnersDecision(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	k.owners.take()
	got, err := k.rollbacks(k.token("", "viewer")).GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
	k.check(err)
	if !got.GetRollback().GetActive() {
		t.Fatalf("%v", got)
	}
	k.owners.take()
	out, err := k.rollbacks(k.token("", "operator")).AcceptRollback(ctx,
		&readmodelv1.AcceptRollbackRequest{Reason: "compared"})
	k.check(err)
	heard := k.owners.take()
	if len(heard) != 1 || heard[0].person.Subject == "" || out.GetPos() == "" ||
		out.GetRollback().GetAcceptReason() != "compared" {
		t.Fatalf("%v after %v", out, heard)
	}
	k.owners.refuse(fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "rollback mode is not active"))
	_, err = k.rollbacks(k.token("", "operator")).AcceptRollback(ctx, &readmodelv1.AcceptRollbackRequest{Reason: "again"})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Fatalf("%v", err)
	}
	k.owners.refuse(nil)
	for name, client := range map[string]readmodelv1connect.RollbackServiceClient{
		"a viewer": k.rollbacks(k.token("", "viewer")), "a person of a tenant": k.rollbacks(k.token(k.A.ID, "tenant",
			"operator")),
	} {
		if _, err := client.AcceptRollback(ctx,
			&readmodelv1.AcceptRollbackRequest{Reason: "x"},
		); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
			t.Errorf("%s: %v", name, err)
		}
	}
	if heard := k.owners.take(); len(heard) != 1 {
		t.Errorf("recovery heard %v", heard)
	}
}

// The status is not ok while rollback mode is active. It reads the mode from its row, so that no event is needed.
func TestStatusInRollbackMode(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	operator := k.query(k.token("", "operator"))
	set := func(state string) {
		t.Helper()
		_, err := k.DB.OwnerPool().Exec(ctx, `UPDATE recovery.rollback SET state = $1, since = mesh.clock()`, state)
		k.check(err)
	}
	for _, state := range []string{"none", "active", "none"} {
		set(state)
		status, err := operator.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
		k.check(err)
		first := status.GetComponents()[0]
		shown := first.GetName() == "control_plane" && !first.GetOk() &&
			first.GetState() == commonv1.PartState_PART_STATE_DOWN &&
			first.GetReason() == "control_plane_rollback" && strings.Contains(first.GetNextAction(), "gpuaas rollback accept")
		if shown != (state == "active") {
			t.Errorf("%s: %v", state, first)
		}
	}
}

// Scenario: the database was restored, and not every service runs yet. A consumer that looks gone is not forgotten
// before the rollback is accepted, and is after that.
func TestAConsumerIsNotForgottenInRollbackMode(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	if _, err := k.DB.OwnerPool().Exec(ctx, `INSERT INTO lifecycle.event_cursor (name, pos, updated_at)
		VALUES ('row-witness', 0, mesh.clock() - interval '1 hour')`); err != nil {
		t.Fatal(err)
	}
	operator := readmodelv1connect.NewEventServiceClient(k.http(k.token("", "operator"), true), k.url())
	req := &readmodelv1.ForgetConsumerRequest{Consumer: "lifecycle/row-witness", Reason: "no build has it"}
	testkit.SetRollback(k.DB, true)
	if _, err := operator.ForgetConsumer(ctx, req); rpctest.ReasonOfWire(err) !=
		commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK {
		t.Errorf("in rollback mode: %v", err)
	}
	testkit.SetRollback(k.DB, false)
	if answer, err := operator.ForgetConsumer(ctx, req); err != nil || answer.GetConsumer() == nil {
		t.Errorf("after it: %v, %v", answer, err)
	}
}
