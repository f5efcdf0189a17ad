package readmodel_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// auditOf returns the entries that an operator gets, newest first, once there are at least n of them.
func auditOf(t *testing.T, k *kit, n int, req *readmodelv1.ListAuditRequest) []*commonv1.AuditEntry {
	t.Helper()
	client := readmodelv1connect.NewAuditServiceClient(k.http(k.token("", "operator"), true), k.url())
	var out []*commonv1.AuditEntry
	testkit.Eventually(t, testkit.Patience, func() error {
		list, err := client.ListAudit(testkit.Context(t), req)
		if err != nil {
			return err
		}
		out = nil
		for _, item := range list.GetItems() {
			out = append(out, item.GetEntry())
		}
		if len(out) < n {
			return fmt.Errorf("%d entries", len(out))
		}
		return nil
	})
	return out
}

// A viewer who calls an operator's method is refused, and the audit log has the person, the action, the object, the
// reason and the correlation id.
func TestWhoIsRefusedForTheRolesIsInTheAuditLog(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	viewer := k.command(k.token("", "viewer"))
	_, err := viewer.OperateWorkspace(ctx, &readmodelv1.OperateWorkspaceRequest{
		Workspace: k.A.Name + "/" + k.A.WorkspaceName, Kind: commonv1.OperationKind_OPERATION_KIND_DECOMMISSION,
		Reason: "I \x1b[31mmay\x00",
	})
	f, ok := fault.As(fault.FromConnect(err))
	if !ok || f.Reason != commonv1.Reason_REASON_PERMISSION_DENIED ||
		!slices.Contains(f.Unmet, "it needs one of the roles operator, tenant; you have viewer") {
		t.Fatalf("the refusal: %v", err)
	}
	got := auditOf(t, k, 1, &readmodelv1.ListAuditRequest{Action: "workspace.decommission"})
	if len(got) != 1 {
		t.Fatalf("entries: %v", got)
	}
	e := got[0]
	if e.GetOutcome() != audit.Refused || e.GetActor() != "person@" || e.GetSubjectType() != "workspace" ||
		e.GetSubjectId() != k.A.Name+"/"+k.A.WorkspaceName ||
		e.GetWorkspaceId() != k.A.WorkspaceID || e.GetTenantId() != k.A.ID ||
		e.GetReason() != "your roles do not allow this" ||
		e.GetCorrelationId() == "" || e.GetCorrelationId() != f.CorrelationID {
		t.Errorf("entry: %v, correlation %s", e, f.CorrelationID)
	}
	details := e.GetDetails().AsMap()
	if details["reason_code"] != "permission_denied" || details["given_reason"] != "I \uFFFD[31mmay\uFFFD" ||
		fmt.Sprint(details["roles"]) != "[viewer]" {
		t.Errorf("details: %v", details)
	}
	// The entry is found by the workspace, whichever reference the request had.
	if got := auditOf(t, k, 1, &readmodelv1.ListAuditRequest{
		Workspace: k.A.WorkspaceID,
		Action:    "workspace.decommission",
	}); len(got) != 1 {
		t.Errorf("by workspace: %v", got)
	}
	// A person of a tenant with an operator's role is refused by the method itself, which is recorded too.
	tenant := readmodelv1connect.NewIncidentServiceClient(k.http(k.token(k.A.ID, "operator"), true), k.url())
	_, err = tenant.ReleaseBrake(ctx, &readmodelv1.ReleaseBrakeRequest{Reason: "mine"})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
		t.Fatalf("a tenant's operator: %v", err)
	}
	if got := auditOf(t, k, 1, &readmodelv1.ListAuditRequest{Action: "brake.release"}); len(got) != 1 ||
		got[0].GetTenantId() != k.A.ID || got[0].GetActor() != "person@"+k.A.ID {
		t.Errorf("a tenant's operator: %v", got)
	}
	// The owner records its own refusals.
	k.owners.refuse(fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "the owner says no"))
	operator := k.command(k.token("", "operator"))
	_, err = operator.OperateWorkspace(ctx,
		&readmodelv1.OperateWorkspaceRequest{Workspace: k.A.WorkspaceID, Kind: commonv1.OperationKind_OPERATION_KIND_CANCEL})
	if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
		t.Fatalf("the owner's refusal: %v", err)
	}
	if _, err := viewer.SetPolicy(ctx, &readmodelv1.SetPolicyRequest{Key: "saga.retry_limit", Value: "4"}); err == nil {
		t.Fatal("a viewer sets policy")
	}
	auditOf(t, k, 1, &readmodelv1.ListAuditRequest{Action: "policy.set"}) // appended after it
	if got := auditOf(t, k, 0, &readmodelv1.ListAuditRequest{Action: "workspace.cancel"}); len(got) != 0 {
		t.Errorf("the owner's refusal is recorded twice: %v", got)
	}
}

// Each method that refuses a role leaves an entry that names what was tried; none of them needs a request that is
// valid.
func TestEveryRefusalByRoleHasAnAction(t *testing.T) {
	k := newKit(t)
	walked := 0
	actions := map[string]bool{}
	for i, p := range policies(t, k) {
		role := slices.IndexFunc(rpc.Roles(), func(r string) bool { return !slices.Contains(p.Roles, r) })
		if role < 0 {
			continue
		}
		// Each method has another person, because the number of single entries of one person is bounded.
		tenant := ""
		if rpc.Roles()[role] == "tenant" {
			tenant = ids.New()
		}
		token := k.tokenOf(fmt.Sprintf("walker-%d", i), tenant, rpc.Roles()[role])
		if err := rpctest.Call(t.Context(), k.http(token, true), k.url(),
			p); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
			t.Errorf("%s as %s: %v", p.Procedure, rpc.Roles()[role], err)
		}
		walked++
	}
	// There are entries of other people in between, so only those of the walkers are counted.
	var entries []*commonv1.AuditEntry
	by := map[string]int{}
	testkit.Eventually(t, testkit.Patience, func() error {
		entries = auditOf(t, k, walked, &readmodelv1.ListAuditRequest{PageSize: 200})
		clear(by)
		for _, e := range entries {
			if strings.HasPrefix(e.GetActor(), "walker-") {
				by[e.GetActor()]++
			}
		}
		if len(by) < walked {
			return fmt.Errorf("%d methods refused, %d are on record", walked, len(by))
		}
		return nil
	})
	for _, e := range entries {
		if !strings.HasPrefix(e.GetActor(), "walker-") {
			continue
		}
		actions[e.GetAction()] = true
		if noun, verb, ok := strings.Cut(e.GetAction(), "."); !ok || noun == "" || verb == "" ||
			e.GetOutcome() != audit.Refused || e.GetCorrelationId() == "" {
			t.Errorf("entry: %v", e)
		}
	}
	if len(by) != walked || walked < 20 {
		t.Errorf("%d methods refused, %d are on record", walked, len(by))
	}
	for _, want := range []string{
		"tenant.create", "workspace.create", "node.bootstrap.issue", "policy.set", "brake.release",
		"allocation.force_release", "allocation.retry_release", "node.probe", "audit.verify_audit", "instance.end",
		"person.create", "person.end", "consumer.forget", "projections.rebuild", "finding.acknowledge", "key.rotate",
		"rollback.accept", "parked_event.replay", "parked_event.drop", "token.revoke", "token.extend", "ca.preflight",
		"authority.rotate", "authority.repair",
	} {
		if !actions[want] {
			t.Errorf("no entry of %s among %v", want, actions)
		}
	}
}

// A person who is refused a thousand names that do not exist leaves a bounded number of entries, which give the number
// of those left out.
func TestAFloodOfRefusalsIsBounded(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	viewer := readmodelv1connect.NewCommandServiceClient(k.http(k.token("", "viewer"), true), k.url(), connect.WithGRPC())
	const tries = 60
	for i := range tries {
		_, err := viewer.ChangeTask(ctx,
			&readmodelv1.ChangeTaskRequest{
				TaskId: fmt.Sprintf("no-such-task-%d", i), Verb: "cancel",
				Reason: strings.Repeat("x", 4096),
			})
		if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PERMISSION_DENIED {
			t.Fatal(err)
		}
	}
	left := auditOf(t, k, 1, &readmodelv1.ListAuditRequest{Action: audit.LeftOut})
	single := auditOf(t, k, 20, &readmodelv1.ListAuditRequest{Action: "task.cancel", PageSize: 200})
	if len(left) != 1 || left[0].GetActor() != "person@" || len(single) != 20 ||
		len(single[0].GetDetails().AsMap()["given_reason"].(string)) > 200 {
		t.Fatalf("%d written one by one; left out: %v", len(single), left)
	}
}

// TestRefusalsNameWhatIsNotFound checks that a reference to nothing is in the refusal, for each kind of object.
func TestRefusalsNameWhatIsNotFound(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	q, c, id := k.query(k.token("", "operator")), k.command(k.token("", "operator")), ids.New()
	for want, call := range map[string]func() error{
		`there is no node "n9"`: func() error {
			_, err := q.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: "n9"})
			return err
		},
		`there is no node "n8"`: func() error {
			_, err := c.SetCordon(ctx, &readmodelv1.SetCordonRequest{Node: "n8", Cordoned: true, Reason: "x"})
			return err
		},
		`there is no workspace "acme/none"`: func() error {
			_, err := q.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: "acme/none"})
			return err
		},
		`there is no task "` + id + `"`: func() error {
			_, err := q.GetTask(ctx, &readmodelv1.GetTaskRequest{TaskId: id})
			return err
		},
		`there is no incident "` + id + `"`: func() error {
			_, err := k.incidents(k.token("", "operator")).GetIncident(ctx, &readmodelv1.GetIncidentRequest{IncidentId: id})
			return err
		},
		`there is no reason "none_such"`: func() error {
			_, err := q.ExplainReason(ctx, &readmodelv1.ExplainReasonRequest{Code: "none_such"})
			return err
		},
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
