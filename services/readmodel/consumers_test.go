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

// TestAConsumerThatIsGoneIsForgotten: the cursor of a consumer that no present build runs keeps events from being cut.
// The status names it with what to do; an operator's request forgets it once and is recorded in the audit log; a
// consumer that a live replica runs, or may run, is not forgotten.
func TestAConsumerThatIsGoneIsForgotten(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	operator := readmodelv1connect.NewEventServiceClient(k.http(k.token("", "operator"), true), k.url())
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := k.DB.OwnerPool().Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	list := func() []*readmodelv1.EventConsumer {
		t.Helper()
		answer, err := operator.ListConsumers(ctx, &readmodelv1.ListConsumersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetItems()
	}
	// The service reports which consumers it runs, and each of its cursors is one of them.
	testkit.Eventually(t, testkit.Patience, func() error {
		own := 0
		for _, c := range list() {
			if !strings.HasPrefix(c.GetConsumer(), "readmodel/") {
				continue
			}
			if own++; c.GetReplicas() != 1 || c.GetUnknownReplicas() != 0 {
				return fmt.Errorf("%v is run by %d replicas", c, c.GetReplicas())
			}
		}
		if own < 2 {
			return errors.New("no cursor is there yet")
		}
		return nil
	})
	const gone = "lifecycle/row-witness"
	exec(`INSERT INTO lifecycle.event_cursor (name, pos, updated_at)
		VALUES ('row-witness', 0, mesh.clock() - interval '1 hour')`)
	exec(`INSERT INTO lifecycle.parked_event (consumer, pos, kind, error, attempts)
		VALUES ('row-witness', 1, 'x.y', 'it is of no use', 3)`)
	exec(`INSERT INTO lifecycle.parked_event (consumer, pos, kind, error, attempts)
		SELECT 'row-witness', n, 'x.y', 'it is of no use', 3 FROM generate_series(2, 10001) n`)
	forget := func(name string, dry bool) (*readmodelv1.EventConsumer, error) {
		answer, err := operator.ForgetConsumer(ctx,
			&readmodelv1.ForgetConsumerRequest{Consumer: name, Reason: "no build has it", DryRun: dry})
		return answer.GetConsumer(), err
	}
	if _, err := k.DB.Pool("lifecycle").Exec(ctx,
		`INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload)
		VALUES ($1, 'workspace.probed', 'workspace', 'x', 1, '{}')`, ids.New()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		for _, c := range list() {
			if c.GetConsumer() == gone && c.GetBehind() > 0 {
				return nil
			}
		}
		return errors.New("no event is numbered yet")
	})
	status, err := readmodelv1connect.NewRetentionServiceClient(k.http(k.token("", "operator"), true), k.url()).
		GetRetention(ctx, &readmodelv1.GetRetentionRequest{})
	if err != nil || !strings.Contains(status.GetHeld(), gone) ||
		!strings.Contains(status.GetNextAction(), "events forget "+gone) {
		t.Errorf("the status of retention says %q, next %q: %v", status.GetHeld(), status.GetNextAction(), err)
	}
	// A live replica of a build that does not report its consumers may run this one.
	exec(`INSERT INTO mesh.key_replica (service, replica_id, takes, holds, problems, seen_at)
		VALUES ('lifecycle', 'old', '{}', '{}', '{}', mesh.clock())`)
	refused := func(name, why string) {
		t.Helper()
		_, err := forget(name, false)
		if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), why) {
			t.Errorf("forgetting %s: %v", name, err)
		}
	}
	refused(gone, "does not say which consumers")
	exec(`UPDATE mesh.key_replica SET takes = '{consumes,consume:row-witness}' WHERE replica_id = 'old'`)
	refused(gone, "runs the consumer")
	exec(`UPDATE mesh.key_replica SET takes = '{consumes,consume:sessions}' WHERE replica_id = 'old'`)
	for _, c := range list() {
		if strings.HasPrefix(c.GetConsumer(), "readmodel/") {
			refused(c.GetConsumer(), "runs the consumer")
		}
	}
	exec(`UPDATE lifecycle.event_cursor SET updated_at = mesh.clock() - interval '9 minutes' WHERE name = 'row-witness'`)
	refused(gone, "within the last 10 minutes")
	exec(`UPDATE lifecycle.event_cursor SET updated_at = mesh.clock() - interval '11 minutes' WHERE name = 'row-witness'`)
	if c, err := forget(gone, true); err != nil || c.GetParked() != 10001 {
		t.Fatalf("a dry run says %v: %v", c, err)
	}
	for n, parked := range []int64{10001, 1} {
		answer, err := operator.ForgetConsumer(ctx,
			&readmodelv1.ForgetConsumerRequest{Consumer: gone, Reason: "no build has it"})
		if err != nil || answer.GetConsumer().GetConsumer() != gone || answer.GetConsumer().GetParked() != parked ||
			answer.GetParkedLeft() != (n == 0) {
			t.Fatalf("call %d forgot %v: %v", n+1, answer, err)
		}
	}
	if c, err := forget(gone, false); err != nil || c != nil {
		t.Errorf("once more it forgot %v: %v", c, err)
	}
	if slices.ContainsFunc(list(), func(c *readmodelv1.EventConsumer) bool { return c.GetConsumer() == gone }) {
		t.Error("it is listed still")
	}
	var left int
	err = k.DB.OwnerPool().QueryRow(ctx,
		`SELECT count(*) FROM lifecycle.parked_event WHERE consumer = 'row-witness'`).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d events are parked for it: %v", left, err)
	}
	recorded := 0
	testkit.Eventually(t, testkit.Patience, func() error {
		recorded = 0
		page, err := operator.ListEvents(ctx,
			&readmodelv1.ListEventsRequest{Since: 1, Kind: "audit.recorded", PageSize: 1000})
		for _, e := range page.GetItems() {
			if strings.Contains(e.String(), "consumer.forget") && strings.Contains(e.String(), gone) {
				recorded++
			}
		}
		if err == nil && recorded < 2 {
			err = fmt.Errorf("its end is %d times on record", recorded)
		}
		return err
	})
	if recorded != 2 { // one for each call that deleted something
		t.Errorf("its end is %d times on record", recorded)
	}
	tenants := readmodelv1connect.NewEventServiceClient(k.http(k.token("0192f0c1-0000-7000-8000-000000000001", "tenant"),
		true), k.url())
	if _, err := tenants.ForgetConsumer(ctx,
		&readmodelv1.ForgetConsumerRequest{
			Consumer: gone,
			Reason:   "x",
		}); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("a user forgets a consumer: %v", err)
	}
}
