package readmodel_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

func (k *kit) notifications(token string) readmodelv1connect.NotificationServiceClient {
	k.t.Helper()
	return readmodelv1connect.NewNotificationServiceClient(k.http(token, true), k.url())
}

// notified waits until the running notifier has worked on all that is projected.
func (k *kit) notified() {
	k.t.Helper()
	k.awaitProjected()
	testkit.Eventually(k.t, testkit.Patience, func() error {
		var due int
		err := k.DB.Pool(pg.RoleReadmodel).QueryRow(testkit.Context(k.t), `SELECT count(*) FROM readmodel.impact_due`).Scan(
			&due)
		if err == nil && due > 0 {
			err = fmt.Errorf("%d are due", due)
		}
		return err
	})
}

// Scenario: recovery is down for a minute. Workspaces and what lasts of their notifications say up to when recovery has
// judged, to their users in plain words, and nothing is written for it. Once it judges again they say nothing of it,
// unless it does not judge their node.
func TestWorkspacesSayThatTheirVerdictIsStale(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	k.marked(k.A)
	k.notified()
	judged := func(ago string) time.Time {
		t.Helper()
		var at time.Time
		k.check(k.DB.Pool(pg.RoleRecovery).QueryRow(ctx, `INSERT INTO mesh.judged (service, through)
			VALUES ('recovery', mesh.clock() - $1::interval) ON CONFLICT (service) DO UPDATE SET through = EXCLUDED.through
			RETURNING through`, ago).Scan(&at))
		return at
	}
	rows := func() (out string) {
		t.Helper()
		k.check(k.DB.OwnerPool().QueryRow(ctx, `SELECT (SELECT string_agg(i::text, ';') FROM readmodel.impact i) ||
			(SELECT string_agg(n.text, ';' ORDER BY n.audience) FROM readmodel.notification n)`).Scan(&out))
		return out
	}
	read := func(token string) (*readmodelv1.Workspace, *readmodelv1.Notification) {
		t.Helper()
		w, err := k.query(token).GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: k.A.WorkspaceID})
		k.check(err)
		list, err := k.notifications(token).ListNotifications(ctx, &readmodelv1.ListNotificationsRequest{})
		k.check(err)
		if len(list.GetItems()) != 1 {
			t.Fatalf("%v", list)
		}
		return w.GetWorkspace(), list.GetItems()[0]
	}
	operator, tenant := k.token("", "viewer"), k.token(k.A.ID, "tenant")
	before := rows()
	for _, ago := range []string{"1 minute", "2 seconds", "2 seconds, but not the node"} {
		span, _, own := strings.Cut(ago, ",")
		at := judged(span)
		if own {
			at = at.Add(-time.Hour)
			k.Append(&recoveryv1.NodeVerdict{
				NodeId: k.A.NodeID, Reason: commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED,
				DetectedAt: timestamppb.New(k.Now()), StaleSince: timestamppb.New(at),
			})
			k.notified()
		}
		stale, text := ago != "2 seconds", "last checked at "+at.UTC().Format(time.RFC3339)
		for _, token := range []string{operator, tenant} {
			w, n := read(token)
			for what, got := range map[string]struct {
				since *timestamppb.Timestamp
				text  string
			}{
				"the workspace":    {w.GetVerdictStaleSince(), w.GetUserText()},
				"the notification": {n.GetVerdictStaleSince(), n.GetText()},
			} {
				if shown := got.since != nil && got.since.AsTime().Equal(at); shown != (stale && token == operator) {
					t.Errorf("%s, judged %s ago: stale since %v", what, ago, got.since)
				}
				if strings.Contains(got.text, text) != stale {
					t.Errorf("%s, judged %s ago: %s", what, ago, got.text)
				}
			}
		}
	}
	if after := rows(); after != before {
		t.Errorf("rows of impacts changed:\n%s\n%s", before, after)
	}
}

// Scenario: the machines of two tenants are suspected to be copied. The running service notifies each of its own
// workspace, in plain words, and people of the operator of both, with reason and node. Which text was shown first, and
// when, is recorded for tenants and operators apart.
func TestPeopleAreNotifiedOfTheirOwnWorkspaces(t *testing.T) {
	k := newKit(t)
	k.marked(k.A)
	k.marked(k.B)
	k.notified()
	ctx := testkit.Context(t)
	operator, tenant := k.notifications(k.token("", "viewer")), k.notifications(k.token(k.A.ID, "tenant", "operator"))

	all, err := operator.ListNotifications(ctx, &readmodelv1.ListNotificationsRequest{OpenOnly: true})
	k.check(err)
	if len(all.GetItems()) != 2 {
		t.Fatalf("%v", all)
	}
	for _, n := range all.GetItems() {
		if n.GetOperatorReason() != hiddenReason || n.GetNodeName() != hiddenNode || n.GetNodeId() == "" ||
			len(n.GetEvidence()) == 0 || !strings.Contains(n.GetText(), hiddenReason) || n.GetFirstShownAt() == nil ||
			n.GetChannel() != "api" {
			t.Errorf("%v", n)
		}
	}
	own, err := tenant.ListNotifications(ctx, &readmodelv1.ListNotificationsRequest{})
	k.check(err)
	if len(own.GetItems()) != 1 {
		t.Fatalf("%v", own)
	}
	got := own.GetItems()[0]
	if got.GetFirstShownAt() == nil || got.GetBeganAt() == nil || got.GetCreatedAt() == nil ||
		!strings.HasPrefix(got.GetText(), "Security has to look at what it runs on.") {
		t.Errorf("%v", got)
	}
	want := &readmodelv1.Notification{
		ImpactId: got.GetImpactId(), WorkspaceId: k.A.WorkspaceID, Workspace: k.A.Name + "/" + k.A.WorkspaceName,
		TenantId: k.A.ID, AllocationId: k.A.AllocationID, Layer: readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME,
		UserState: commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED,
		Event:     readmodelv1.ImpactEvent_IMPACT_EVENT_BEGAN, Text: got.GetText(), BeganAt: got.GetBeganAt(), Count: 1,
		CreatedAt: got.GetCreatedAt(), Channel: "api", FirstShownAt: got.GetFirstShownAt(), Version: got.GetVersion(),
	}
	if !proto.Equal(want, got) {
		t.Errorf("the tenant sees %v", got)
	}
	again, err := tenant.ListNotifications(ctx, &readmodelv1.ListNotificationsRequest{Workspace: k.A.WorkspaceName})
	k.check(err)
	if len(again.GetItems()) != 1 || !proto.Equal(again.GetItems()[0], got) {
		t.Errorf("it was shown first at another time: %v", again)
	}

	for req, reason := range map[*readmodelv1.ListNotificationsRequest]commonv1.Reason{
		{Workspace: k.B.WorkspaceID}: commonv1.Reason_REASON_NOT_FOUND,
		{IncidentId: ids.New()}:      commonv1.Reason_REASON_PERMISSION_DENIED,
		{PageToken: "none of this"}:  commonv1.Reason_REASON_INVALID_ARGUMENT,
	} {
		if _, err := tenant.ListNotifications(ctx, req); rpctest.ReasonOfWire(err) != reason {
			t.Errorf("%v: %v", req, err)
		}
	}
	first, err := operator.ListNotifications(ctx, &readmodelv1.ListNotificationsRequest{PageSize: 1})
	k.check(err)
	second, err := operator.ListNotifications(ctx,
		&readmodelv1.ListNotificationsRequest{PageSize: 1, PageToken: first.GetNextPageToken()})
	k.check(err)
	if len(first.GetItems()) != 1 || len(second.GetItems()) != 1 || second.GetNextPageToken() != "" ||
		first.GetItems()[0].GetImpactId() <= second.GetItems()[0].GetImpactId() {
		t.Errorf("%v, then %v", first, second)
	}
	// A tenant cannot go on with an operator's page token among what is not its own.
	third, err := tenant.ListNotifications(ctx,
		&readmodelv1.ListNotificationsRequest{PageSize: 1, PageToken: first.GetNextPageToken()})
	k.check(err)
	for _, n := range third.GetItems() {
		if n.GetTenantId() != k.A.ID {
			t.Errorf("%v", n)
		}
	}
}
