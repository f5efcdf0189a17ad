package readmodel_test

import (
	"errors"
	"slices"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestEventsAreShownToOperators checks that the log is listed by pages, in its order and with its messages, that one
// event is found by its position, that a message that an earlier build stored as JSON is withheld, and which people and
// requests are refused.
func TestEventsAreShownToOperators(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	client := func(tenant string, roles ...string) readmodelv1connect.EventServiceClient {
		return readmodelv1connect.NewEventServiceClient(k.http(k.token(tenant, roles...), true), k.url())
	}
	operator := client("", "operator")
	if _, err := k.DB.Pool("lifecycle").Exec(ctx,
		`INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload)
		VALUES ($1, 'workspace.probed', 'workspace', 'x', 1, '{"env": {"TOKEN": "s3cret"}}')`, ids.New()); err != nil {
		t.Fatal(err)
	}
	var all []*readmodelv1.EventRow
	testkit.Eventually(t, testkit.Patience, func() error {
		all = nil
		for token := ""; ; {
			page, err := operator.ListEvents(ctx, &readmodelv1.ListEventsRequest{PageSize: 3, PageToken: token})
			if err != nil {
				return err
			}
			all = append(all, page.GetItems()...)
			if token = page.GetNextPageToken(); token == "" {
				break
			}
		}
		if !slices.ContainsFunc(all, func(e *readmodelv1.EventRow) bool { return e.GetKind() == "workspace.probed" }) {
			return errors.New("the event is not numbered yet")
		}
		return nil
	})
	if !slices.IsSortedFunc(all, func(a, b *readmodelv1.EventRow) int { return int(a.GetPosition() - b.GetPosition()) }) {
		t.Error("the events are not in the order of their positions")
	}
	var changed int
	for _, e := range all {
		switch {
		case e.GetKind() == "workspace.probed":
			if e.GetBody() != nil || e.GetWithheld() == "" {
				t.Errorf("what an earlier build stored is shown: %v", e)
			}
		case e.GetKind() == "workspace.changed":
			changed++
			if e.GetBody().GetFields()["workspace_id"].GetStringValue() != e.GetWorkspaceId() || e.GetWorkspaceId() == "" {
				t.Errorf("the body is %v", e.GetBody())
			}
		}
	}
	if changed == 0 {
		t.Fatal("no workspace is in the log")
	}
	from := all[1].GetPosition()
	some, err := operator.ListEvents(ctx,
		&readmodelv1.ListEventsRequest{Since: from, Kind: "workspace.changed", PageSize: 1})
	if err != nil || len(some.GetItems()) != 1 || some.GetItems()[0].GetPosition() < from ||
		some.GetItems()[0].GetKind() != "workspace.changed" {
		t.Errorf("since %d come %v, %v", from, some, err)
	}
	one, err := operator.ListEvents(ctx, &readmodelv1.ListEventsRequest{Position: from})
	if err != nil || len(one.GetItems()) != 1 || one.GetItems()[0].GetPosition() != from {
		t.Errorf("at %d is %v, %v", from, one, err)
	}
	for want, req := range map[commonv1.Reason][]*readmodelv1.ListEventsRequest{
		commonv1.Reason_REASON_NOT_FOUND: {{Position: all[len(all)-1].GetPosition() + 1_000_000}},
		commonv1.Reason_REASON_INVALID_ARGUMENT: {
			{Position: 1, Since: 1},
			{Position: 1, Kind: "run.changed"},
			{PageToken: "page two"},
			{PageToken: "-4"},
			{Kind: "'; DROP"},
			{Since: -1},
			{PageSize: 5000},
		},
	} {
		for _, r := range req {
			if _, err := operator.ListEvents(ctx, r); !fault.Has(fault.FromConnect(err), want) {
				t.Errorf("%v: %v, want %v", r, err, want)
			}
		}
	}
	for who, c := range map[string]readmodelv1connect.EventServiceClient{
		"a viewer": client("", "viewer"), "security": client("", "security"),
		"an operator of a tenant": client(k.A.ID, "operator"),
	} {
		if _, err := c.ListEvents(ctx, &readmodelv1.ListEventsRequest{}); !fault.Has(fault.FromConnect(err),
			commonv1.Reason_REASON_PERMISSION_DENIED) {
			t.Errorf("%s: %v", who, err)
		}
	}
}
