package events_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// ofEarlierBuild appends an event with the statement of earlier builds, which stored JSON.
func ofEarlierBuild(t *testing.T, q pg.Querier, payload string) {
	t.Helper()
	if _, err := q.Exec(testkit.Context(t),
		`INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload)
		VALUES ($1, 'e', 'probe', 'x', 1, $2::text::jsonb)`, ids.New(), payload); err != nil {
		t.Fatal(err)
	}
}

func object(t *testing.T, fields map[string]any) *structpb.Struct {
	t.Helper()
	m, err := structpb.NewStruct(fields)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestADatabaseOfAnEarlierBuildIsRead takes a database with the events of an earlier build through the migration: they
// stay as they are, and are read together with what is appended afterwards.
func TestADatabaseOfAnEarlierBuildIsRead(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	sql, err := fs.ReadFile(migrations.FS, "00107_event_bodies.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(sql), "-- +goose Down")
	owner, err := pgx.Connect(ctx, d.URL(pg.RoleOwner))
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close(context.WithoutCancel(ctx))
	upIDs, downIDs := halves(t, "00170_event_ids.sql")
	parts, whole := oneTable(t)
	upIDs, downIDs = slices.Concat(upIDs, parts), slices.Concat(whole, downIDs)
	execEach(t, owner, append(downIDs, down))
	earlier, err := pgx.Connect(ctx, d.URL(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	defer earlier.Close(context.WithoutCancel(ctx))
	ofEarlierBuild(t, earlier, `{"n": 1}`)
	ofEarlierBuild(t, earlier, `{"n": 2}`)
	before := rowsOf(t, d, `seq <= 2`)
	execEach(t, owner, append([]string{up}, upIDs...))
	if after := rowsOf(t, d, `seq <= 2 AND body IS NULL AND body_type IS NULL`); after != before || before == "" {
		t.Errorf("the rows were %s, and are %s", before, after)
	}
	ofEarlierBuild(t, earlier, `{"n": 3}`)
	three := event("e", "x", 4)
	three.Payload = object(t, map[string]any{"n": 4})
	appendEvents(t, d.Pool(pg.RoleLifecycle), three)
	if err := newSequencer(t, d, nil, nil, events.SequencerConfig{}).Drain(ctx); err != nil {
		t.Fatal(err)
	}
	var read []float64
	err = newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel)},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel"}).
		Drain(ctx, func(_ context.Context, _ pgx.Tx, r events.Record) error {
			var m structpb.Struct
			if err := r.Decode(&m); err != nil {
				return err
			}
			read = append(read, m.GetFields()["n"].GetNumberValue())
			return nil
		})
	if err != nil || !slices.Equal(read, []float64{1, 2, 3, 4}) {
		t.Errorf("read %v, %v", read, err)
	}
	// Events that are stored as bytes cannot be migrated back.
	if _, err := owner.Exec(ctx, down); err == nil {
		t.Error("the events that are stored as bytes were dropped")
	}
}

// rowsOf returns the events for which a condition holds, as JSON of the columns that every build has.
func rowsOf(t *testing.T, d *testkit.Database, where string) string {
	t.Helper()
	var out string
	conn, err := pgx.Connect(testkit.Context(t), d.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if err := conn.QueryRow(testkit.Context(t),
		`SELECT coalesce(string_agg(concat_ws(' ', xid, seq, id, source, kind, payload, created_at), ';' ORDER BY seq), '')
		FROM events.event WHERE `+where).Scan(&out); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestAConsumerReadsBothFormats checks that events are stored as bytes, and that those of an earlier build and those
// that ask for JSON are read beside them.
func TestAConsumerReadsBothFormats(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	pool := d.Pool(pg.RoleLifecycle)
	ofEarlierBuild(t, pool, `{"from": "an earlier build"}`)
	one, two := event("e", "x", 2), event("e", "x", 3)
	one.Payload, two.Payload, two.JSON = object(t, map[string]any{"from": "this build"}),
		object(t, map[string]any{"from": "the audit log"}), true
	appendEvents(t, pool, one)
	appendEvents(t, pool, two, event("bare", "x", 4))
	if err := newSequencer(t, d, nil, nil, events.SequencerConfig{}).Drain(ctx); err != nil {
		t.Fatal(err)
	}
	var from []string
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel)},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel"})
	err := c.Drain(ctx, func(_ context.Context, _ pgx.Tx, r events.Record) error {
		var m structpb.Struct
		if err := r.Decode(&m); err != nil {
			return err
		}
		raw, err := r.Payload()
		if err != nil {
			return err
		}
		var fields map[string]string
		if err := json.Unmarshal(raw, &fields); err != nil {
			return err
		}
		if got := m.GetFields()["from"].GetStringValue(); got != fields["from"] {
			t.Errorf("decoded from %q, as JSON from %q", got, fields["from"])
		}
		from = append(from, fields["from"])
		return nil
	})
	if got := strings.Join(from, ", "); err != nil || got != "an earlier build, this build, the audit log, " {
		t.Fatalf("read %q, %v", got, err)
	}
	var asBytes, asJSON int
	if err := pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE body IS NOT NULL AND payload IS NULL),
		count(*) FILTER (WHERE payload IS NOT NULL AND body IS NULL)
			FROM events.event`).Scan(&asBytes, &asJSON); err != nil || asBytes != 2 || asJSON != 2 {
		t.Errorf("%d events as bytes, %d as JSON (%v)", asBytes, asJSON, err)
	}
}

// TestAReaderOfAnEarlierBuildWaits checks that a session without the setting that it reads bytes gets an error from the
// statement that it reads with, and that its consumer parks nothing and does not pass over the events; appending goes
// on.
func TestAReaderOfAnEarlierBuildWaits(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	config, err := pgxpool.ParseConfig(d.URL(pg.RoleReadmodel))
	if err != nil {
		t.Fatal(err)
	}
	earlier, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	defer earlier.Close()
	ofEarlierBuild(t, earlier, `{}`)
	seq := newSequencer(t, d, nil, nil, events.SequencerConfig{})
	if err := seq.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	applied := 0
	apply := func(context.Context, pgx.Tx, events.Record) error {
		applied++
		return nil
	}
	cfg := events.ConsumerConfig{Name: "probe", Schema: "readmodel"}
	if err := newConsumer(t, events.ConsumerDeps{Pool: earlier}, cfg).Drain(ctx, apply); err != nil || applied != 1 {
		t.Fatalf("applied %d of its own events, %v", applied, err)
	}
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 2))
	ofEarlierBuild(t, earlier, `{}`)
	if err := seq.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	err = newConsumer(t, events.ConsumerDeps{Pool: earlier}, cfg).Drain(ctx, apply)
	var refusal *pgconn.PgError
	if !errors.As(err, &refusal) || refusal.Code != "0A000" || !strings.Contains(refusal.Hint, "events.format") ||
		applied != 1 {
		t.Fatalf("applied %d, %v", applied, err)
	}
	now := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel)}, cfg)
	if parked, err := now.Parked(ctx); err != nil || len(parked) != 0 {
		t.Fatalf("parked %+v, %v", parked, err)
	}
	if err := now.Drain(ctx, apply); err != nil || applied != 3 {
		t.Fatalf("applied %d, %v", applied, err)
	}
}

// TestWhatIsNotKnownIsKept checks that a message of a type that this build does not know is returned as its name and
// its bytes, that decoding into another type fails, and that fields that a type does not know are kept.
func TestWhatIsNotKnownIsKept(t *testing.T) {
	raw, err := proto.Marshal(wrapperspb.String("hello"))
	if err != nil {
		t.Fatal(err)
	}
	unknown := events.Record{Kind: "e", Body: raw, BodyType: "gpuaas.later.v9.Unheard"}
	got, err := unknown.Payload()
	if want := `{"hex":"` + hex.EncodeToString(raw) + `","type":"gpuaas.later.v9.Unheard"}`; err != nil ||
		string(got) != want {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
	known := events.Record{Kind: "e", Body: raw, BodyType: "google.protobuf.StringValue"}
	if err := known.Decode(&structpb.Struct{}); err == nil ||
		!strings.Contains(err.Error(), "carries a google.protobuf.StringValue") {
		t.Errorf("decoded as another type: %v", err)
	}
	if got, err = known.Payload(); err != nil || string(got) != `"hello"` {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := (events.Record{
		Kind: "e", Body: []byte{0xff},
		BodyType: "google.protobuf.StringValue",
	}).Payload(); err == nil {
		t.Error("bytes that are no message are spelled")
	}
}
