package events_test

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// halves returns the statements of a migration up and down, each by itself: one of them may build an index concurrently
// with writers.
func halves(t *testing.T, name string) ([]string, []string) {
	t.Helper()
	sql, err := fs.ReadFile(migrations.FS, name)
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(sql), "-- +goose Down")
	return statements(up), statements(down)
}

func statements(sql string) []string {
	var out []string
	for part := range strings.SplitSeq(sql, "-- +goose StatementBegin") {
		whole, rest, found := strings.Cut(part, "-- +goose StatementEnd")
		if !found {
			whole, rest = "", part
		}
		for _, s := range append([]string{whole}, strings.Split(rest, ";\n")...) {
			if strings.TrimSpace(s) != "" {
				out = append(out, s)
			}
		}
	}
	return out
}

func execEach(t *testing.T, conn *pgx.Conn, list []string) {
	t.Helper()
	for _, s := range list {
		if _, err := conn.Exec(testkit.Context(t), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// oneTable returns the statements of the migrations to the partitions and back to one table, as tests of earlier
// migrations need them.
func oneTable(t *testing.T) ([]string, []string) {
	t.Helper()
	parts, whole := halves(t, "00220_event_partitions.sql")
	byDay, singly := halves(t, "00221_cut_events_by_day.sql")
	return slices.Concat(parts, byDay), slices.Concat(singly, whole)
}

// TestIDsOfEventsAreStoredAsUUIDs migrates a database with events of the previous build up and down again: their
// correlation is read the same.
func TestIDsOfEventsAreStoredAsUUIDs(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	owner, err := pgx.Connect(ctx, d.URL(pg.RoleOwner))
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close(context.WithoutCancel(ctx))
	up, down := halves(t, "00170_event_ids.sql")
	parts, whole := oneTable(t)
	up, down = slices.Concat(up, parts), slices.Concat(whole, down)
	execEach(t, owner, down)
	of := events.Correlation{
		CorrelationID: ids.New(), TenantID: ids.New(), WorkspaceID: ids.New(), WorkflowID: ids.New(), AllocationID: ids.New(),
		TaskID: ids.New(), NodeID: ids.New(), NodeInstanceID: ids.New(),
	}
	first := ids.New()
	before := `INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, body, body_type,
		correlation_id, tenant_id, workspace_id,
		workflow_id, allocation_id, task_id, node_id, node_instance_id)
			VALUES ($1, 'e', 'probe', 'x', 1, '', '', $2, $3, $4, $5, $6, $7, $8, $9)`
	args := []any{
		first, of.CorrelationID, of.TenantID, of.WorkspaceID, of.WorkflowID, of.AllocationID, of.TaskID,
		of.NodeID, of.NodeInstanceID,
	}
	if _, err := d.Pool(pg.RoleLifecycle).Exec(ctx, before, args...); err != nil {
		t.Fatal(err)
	}
	execEach(t, owner, up)
	appended := func(e events.Event) string {
		t.Helper()
		var pos string
		err := pg.InTx(ctx, d.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
			var err error
			unnamed := e
			unnamed.Unnamed = true
			if _, err = events.Append(ctx, tx, unnamed); err == nil {
				pos, err = events.Append(ctx, tx, unnamed, e)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return pos
	}
	e := event("e", "x", 2)
	e.Correlation = of
	token := appended(e)
	e.CorrelationID, e.AggregateVersion = "of a person's choice", 3
	appended(e)
	if err := newSequencer(t, d, nil, nil, events.SequencerConfig{}).Drain(ctx); err != nil {
		t.Fatal(err)
	}
	read := func() []events.Record {
		t.Helper()
		list, _, err := events.Read(ctx, d.Pool(pg.RoleReadmodel), 0, nil, 100)
		if err != nil || len(list) != 7 {
			t.Fatalf("read %d events, %v", len(list), err)
		}
		return list
	}
	list := read()
	for i, r := range list {
		want := of
		if r.AggregateVersion == 3 {
			want.CorrelationID = "of a person's choice"
		}
		if r.Correlation != want {
			t.Errorf("event %d belongs to %+v, not to %+v", i, r.Correlation, want)
		}
		if named := i == 0 || i == 3 || i == 6; named != (r.ID != "") {
			t.Errorf("event %d has the id %q", i, r.ID)
		}
	}
	if list[0].ID != first || list[3].ID != token {
		t.Errorf("the ids are %s and %s", list[0].ID, list[3].ID)
	}
	var texts, uuids int
	if err := d.Pool(pg.RoleReadmodel).QueryRow(ctx,
		`SELECT count(tenant_id), count(tenant_uuid) FROM events.event`).Scan(&texts, &uuids); err != nil ||
		texts != 4 || uuids != 3 {
		t.Errorf("%d are stored as texts and %d as uuids, %v", texts, uuids, err)
	}

	// A reader of the previous build gets an error for events that it would misread, and reads those that it wrote itself.
	for form, readable := range map[string]int{"protobuf": 1, "": 0} {
		conn, err := pgx.Connect(ctx, d.URL(pg.RoleReadmodel))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(ctx, `SELECT set_config('events.format', $1, false)`, form); err != nil {
			t.Fatal(err)
		}
		var n int
		err = conn.QueryRow(ctx, `SELECT count(*) FROM events.event WHERE aggregate_version = 1`).Scan(&n)
		var refusal *pgconn.PgError
		if readable == 0 && (!errors.As(err, &refusal) || refusal.Code != "0A000") || readable == 1 &&
			(err != nil || n != 1) {
			t.Errorf("format %q: %d are read, %v", form, n, err)
		}
		err = conn.QueryRow(ctx, `SELECT count(*) FROM events.event WHERE aggregate_version = 2`).Scan(&n)
		if !errors.As(err, &refusal) || refusal.Code != "0A000" || !strings.Contains(refusal.Hint, "events.format") {
			t.Errorf("format %q: %v", form, err)
		}
		_ = conn.Close(ctx)
	}

	execEach(t, owner, down)
	if err := d.Pool(pg.RoleReadmodel).QueryRow(ctx,
		`SELECT count(tenant_id) FROM events.event WHERE id IS NOT NULL AND tenant_id = $1`, of.TenantID).
		Scan(&texts); err != nil {
		var refusal *pgconn.PgError // sessions of this build do not announce that they read only bodies
		if !errors.As(err, &refusal) || refusal.Code != "0A000" {
			t.Fatal(err)
		}
	}
	execEach(t, owner, up)
	for i, r := range read() {
		if r.ID == "" || r.TenantID != of.TenantID || r.NodeInstanceID != of.NodeInstanceID {
			t.Errorf("event %d came back as %+v", i, r)
		}
	}
}

// TestTheWayBackSaysWhatKindsSay: the previous build derives neither a task's id from the aggregate nor a message's
// type from the kind; after the migration down the rows have both.
func TestTheWayBackSaysWhatKindsSay(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	owner, err := pgx.Connect(ctx, d.URL(pg.RoleOwner))
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close(context.WithoutCancel(ctx))
	taskID, nodeID := ids.New(), ids.New()
	err = pg.InTx(ctx, d.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		e := events.Event{
			Kind: "task.changed", AggregateType: "task", AggregateID: taskID, AggregateVersion: 1,
			Payload:     &lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{TaskId: taskID, NodeId: nodeID, Version: 1}},
			Correlation: events.Correlation{TaskID: taskID, NodeID: nodeID},
		}
		if _, err := events.Append(ctx, tx, e, event("without.message", "x", 1)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, body,
			body_type)
			SELECT gen_random_uuid(), kind, 'kind', kind, 1, '\x0000', '' FROM unnest($1::text[]) AS u (kind)`,
			slices.Sorted(maps.Keys(events.TypeOfKind)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	_, down := halves(t, "00170_event_ids.sql")
	_, whole := oneTable(t)
	down = slices.Concat(whole, down)
	execEach(t, owner, down)
	conn, err := pgx.Connect(ctx, d.URL(pg.RoleReadmodel))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, `SET events.format = 'protobuf'`); err != nil {
		t.Fatal(err)
	}
	type row struct{ Kind, AggregateType, TaskID, BodyType string }
	rows, err := conn.Query(ctx, `SELECT kind, aggregate_type, coalesce(task_id, ''), body_type FROM events.event`)
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil || len(list) != 2+len(events.TypeOfKind) {
		t.Fatalf("%d events are read, %v", len(list), err)
	}
	for _, r := range list {
		want := row{Kind: r.Kind, AggregateType: r.AggregateType, BodyType: events.TypeOfKind[r.Kind]}
		if r.AggregateType == "task" {
			want.TaskID = taskID
		}
		if r != want {
			t.Errorf("read %+v, want %+v", r, want)
		}
	}
}
