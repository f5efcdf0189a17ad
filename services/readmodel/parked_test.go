package readmodel_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Scenario: consumers have parked events. An operator lists them, has the running consumer apply them again, and gives
// up the one that cannot be applied. What no live replica would carry out is refused, and each act is in the audit log.
func TestParkedEventsAreReplayedAndDropped(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	operator := readmodelv1connect.NewEventServiceClient(k.http(k.token("", "operator"), true), k.url())
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := k.DB.OwnerPool().Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := k.DB.Pool("lifecycle").Exec(ctx,
		`INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload)
		VALUES ($1, 'workspace.probed', 'workspace', 'x', 1, '{}')`, ids.New()); err != nil {
		t.Fatal(err)
	}
	var pos int64
	testkit.Eventually(t, testkit.Patience, func() error {
		answer, err := operator.ListEvents(ctx, &readmodelv1.ListEventsRequest{Since: 1, Kind: "workspace.probed"})
		if err != nil {
			return err
		}
		if len(answer.GetItems()) == 0 {
			return errors.New("the event has no position yet")
		}
		pos = answer.GetItems()[0].GetPosition()
		list, err := operator.ListConsumers(ctx, &readmodelv1.ListConsumersRequest{})
		if err == nil && !slices.ContainsFunc(list.GetItems(), func(c *readmodelv1.EventConsumer) bool {
			return c.GetConsumer() == projections && c.GetReplicas() == 1
		}) {
			err = errors.New("no replica reports that it runs the projections")
		}
		return err
	})
	const lost = 1 << 50 // no event has this position
	park := func(schema, consumer string, pos int64) {
		t.Helper()
		exec(fmt.Sprintf(`INSERT INTO %s.parked_event (consumer, pos, kind, error, attempts) VALUES ($1, $2, 'x.y', $3, 3)`,
			schema), consumer, pos, "it is of no use")
	}
	park("recovery", "gone", 5)
	park("readmodel", "projections", pos)
	park("readmodel", "projections", lost)
	park("lifecycle", "gone", 6)

	list := func(consumer string) []*readmodelv1.ParkedEvent {
		t.Helper()
		var out []*readmodelv1.ParkedEvent
		for token := ""; ; {
			answer, err := operator.ListParked(ctx,
				&readmodelv1.ListParkedRequest{Consumer: consumer, PageSize: 1, PageToken: token})
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, answer.GetItems()...)
			if token = answer.GetNextPageToken(); token == "" {
				return out
			}
		}
	}
	var got []string
	for _, e := range list("") {
		got = append(got, fmt.Sprint(e.GetConsumer(), " ", e.GetPosition()))
	}
	want := []string{
		"lifecycle/gone 6", fmt.Sprint(projections, " ", pos), fmt.Sprint(projections, " ", int64(lost)), "recovery/gone 5",
	}
	if !slices.Equal(got, want) {
		t.Fatalf("parked are %q, want %q", got, want)
	}

	component := func() *readmodelv1.ComponentStatus {
		t.Helper()
		status, err := readmodelv1connect.NewQueryServiceClient(k.http(k.token("", "operator"), true), k.url()).
			GetStatus(ctx, &readmodelv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range status.GetComponents() {
			if c.GetName() == "parked_events" {
				return c
			}
		}
		return nil
	}
	if c := component(); c.GetOk() || !strings.Contains(c.GetDetail(), "2 events could not be applied by "+projections) ||
		!strings.Contains(c.GetNextAction(), "events replay "+projections) {
		t.Errorf("the status says %v", c)
	}

	shown, err := readmodelv1connect.NewProjectionServiceClient(k.http(k.token("", "operator"), true), k.url()).
		GetProjections(ctx, &readmodelv1.GetProjectionsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if shown.GetParkedEvents() != 2 || shown.GetPosition() == 0 {
		t.Errorf("the projections have %d parked events and are at %d", shown.GetParkedEvents(), shown.GetPosition())
	}
	var tables []string
	for _, table := range shown.GetTables() {
		if table.GetBytes() == 0 || table.GetRows() < -1 {
			t.Errorf("%s has %d rows and %d bytes", table.GetTable(), table.GetRows(), table.GetBytes())
		}
		tables = append(tables, table.GetTable())
	}
	for _, table := range []string{"node", "run", "workspace"} {
		if !slices.Contains(tables, table) {
			t.Errorf("%s is not among the tables %q", table, tables)
		}
	}

	replay := func(consumer string, pos int64) (int64, error) {
		answer, err := operator.ReplayParked(ctx,
			&readmodelv1.ReplayParkedRequest{Consumer: consumer, Position: pos, Reason: "repaired"})
		return answer.GetAsked(), err
	}
	if _, err := replay("recovery/gone", 5); connect.CodeOf(err) != connect.CodeFailedPrecondition ||
		!strings.Contains(err.Error(), "no live replica runs") {
		t.Errorf("a replay that nothing would carry out: %v", err)
	}
	for _, none := range []int64{pos + 1, lost - 1} {
		if _, err := replay(projections, none); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("a replay of an event that is not parked: %v", err)
		}
	}
	if n, err := replay(projections, 0); err != nil || n != 2 {
		t.Fatalf("a replay of all asks for %d: %v", n, err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		left := list(projections)
		if len(left) != 1 || left[0].GetAskedAt() != nil {
			return fmt.Errorf("parked are %v", left)
		}
		if left[0].GetPosition() != lost || left[0].GetAttempts() != 4 || left[0].GetError() == "it is of no use" {
			t.Errorf("what cannot be applied is left as %v", left[0])
		}
		return nil
	})

	drop := func(dry bool) error {
		_, err := operator.DropParked(ctx,
			&readmodelv1.DropParkedRequest{Consumer: projections, Position: lost, Reason: "it is lost", DryRun: dry})
		return err
	}
	if err := drop(true); err != nil || len(list(projections)) != 1 {
		t.Errorf("a dry run: %v, parked are %v", err, list(projections))
	}
	if err := drop(false); err != nil || len(list(projections)) != 0 {
		t.Errorf("the drop: %v, parked are %v", err, list(projections))
	}
	if c := component(); c != nil {
		t.Errorf("the status says %v", c)
	}
	if err := drop(false); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("a second drop: %v", err)
	}
	records := readmodelv1connect.NewAuditServiceClient(k.http(k.token("", "security"), true), k.url())
	testkit.Eventually(t, testkit.Patience, func() error {
		found := map[string]int{}
		for _, action := range []string{"parked_event.replay", "parked_event.drop"} {
			answer, err := records.ListAudit(ctx, &readmodelv1.ListAuditRequest{Action: action})
			if err != nil {
				return err
			}
			for _, e := range answer.GetItems() {
				if e.GetEntry().GetOutcome() == "done" {
					found[action]++
				}
			}
		}
		if found["parked_event.replay"] != 1 || found["parked_event.drop"] != 1 {
			return fmt.Errorf("the audit log has %v", found)
		}
		return nil
	})
	if _, err := operator.ListParked(ctx, &readmodelv1.ListParkedRequest{PageToken: "x"}); connect.CodeOf(err) !=
		connect.CodeInvalidArgument {
		t.Errorf("a page token of another list: %v", err)
	}
}

// projections is the consumer that makes the projections.
const projections = "readmodel/projections"
