package audit_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type world struct {
	db  *testkit.Database
	log *audit.Log
}

func newLog(t *testing.T, db *testkit.Database) *audit.Log {
	t.Helper()
	l, err := audit.New(audit.Deps{
		Logger: testkit.Logger(t), Pool: db.Pool("lifecycle"), Schema: "lifecycle",
		Policy: policy.Fixed{}, Wake: &events.Signal{},
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func newWorld(t *testing.T) world {
	t.Helper()
	testkit.IO(t)
	db := testkit.DB(t)
	return world{db: db, log: newLog(t, db)}
}

func (w world) entries(t *testing.T) []*commonv1.AuditEntry {
	t.Helper()
	rows, err := w.db.Pool("lifecycle").Query(testkit.Context(t),
		`SELECT payload FROM events.event WHERE kind = $1 AND source = 'lifecycle' ORDER BY seq`, audit.Kind)
	if err != nil {
		t.Fatal(err)
	}
	raws, err := pgx.CollectRows(rows, pgx.RowTo[json.RawMessage])
	if err != nil {
		t.Fatal(err)
	}
	out := make([]*commonv1.AuditEntry, len(raws))
	for i, raw := range raws {
		out[i] = &commonv1.AuditEntry{}
		if err := protojson.Unmarshal(raw, out[i]); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func person(ctx context.Context) context.Context {
	return obs.With(rpc.WithPerson(ctx, rpc.Person{Subject: "ana@example.org", Roles: []string{"operator"}}),
		obs.Correlation{CorrelationID: "c-1"})
}

func TestADecisionAndItsEntryAreOneTransaction(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	workspace := ids.New()
	entry := audit.Entry{
		Action: "workspace.cancel", Reason: "token=abcdefgh was wrong", SubjectType: "workspace", SubjectID: workspace,
		WorkspaceID: workspace,
		Details: map[string]any{
			"grace": 30 * time.Second, "launch_secret": "gls_12345678", "key": obs.Secret("s"),
			"raw": []byte("xyz"),
		},
	}
	undone := errors.New("undone")
	err := pg.InTx(ctx, w.db.Pool("lifecycle"), func(ctx context.Context, tx pgx.Tx) error {
		if _, err := audit.Record(ctx, tx, entry); err != nil {
			return err
		}
		return undone
	})
	if !errors.Is(err, undone) {
		t.Fatal(err)
	}
	if got := w.entries(t); len(got) != 0 {
		t.Fatalf("a decision that was rolled back has entries: %v", got)
	}
	var pos string
	if err := pg.InTx(ctx, w.db.Pool("lifecycle"), func(ctx context.Context, tx pgx.Tx) error {
		var err error
		pos, err = audit.Record(ctx, tx, entry)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if !ids.Valid(pos) {
		t.Errorf("position token %q", pos)
	}
	got := w.entries(t)
	if len(got) != 1 {
		t.Fatalf("%d entries", len(got))
	}
	e := got[0]
	if e.GetActor() != "ana@example.org" || e.GetOutcome() != audit.Done || e.GetCorrelationId() != "c-1" ||
		e.GetWorkspaceId() != workspace {
		t.Errorf("entry: %v", e)
	}
	raw := protojson.Format(e)
	for _, secret := range []string{"abcdefgh", "gls_12345678", "xyz"} {
		if strings.Contains(raw, secret) {
			t.Errorf("the entry holds the secret %s: %s", secret, raw)
		}
	}
	want := map[string]any{
		"grace": "30s", "launch_secret": obs.Redacted, "key": obs.Redacted,
		"raw": obs.Redacted + " (3 bytes)",
	}
	if diff := cmp.Diff(want, e.GetDetails().AsMap()); diff != "" {
		t.Error(diff)
	}
}

func TestRefusalsAreCounted(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	other := newLog(t, w.db) // another replica
	workspace := ids.New()
	entry := audit.Entry{Action: "workspace.reset", SubjectType: "workspace", SubjectID: workspace, WorkspaceID: workspace}
	refusal := fault.New(commonv1.Reason_REASON_OPERATION_IN_PROGRESS, "an operation is open",
		fault.Unmet("no operation is open"))
	for range 5 {
		if err := w.log.Refuse(ctx, entry, refusal); !errors.Is(err, refusal) {
			t.Fatal(err)
		}
		if err := other.Refuse(ctx, entry, refusal); !errors.Is(err, refusal) {
			t.Fatal(err)
		}
	}
	got := w.entries(t)
	if len(got) != 1 || got[0].GetOutcome() != audit.Refused || got[0].GetCount() != 1 ||
		got[0].GetReason() != "an operation is open" {
		t.Fatalf("the first of its kind is written, and no other: %v", got)
	}
	if got[0].GetDetails().AsMap()["reason_code"] != "operation_in_progress" || got[0].GetDedupeKeyHash() == "" {
		t.Errorf("entry: %v", got[0])
	}
	// Within the window the counts go to the database and nothing is written.
	for _, l := range []*audit.Log{w.log, other} {
		if err := l.RunOnce(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.entries(t); len(got) != 1 {
		t.Fatalf("%d entries within the window", len(got))
	}
	testkit.SetClockOffset(w.db, 301*time.Second)
	for _, l := range []*audit.Log{w.log, other} {
		if err := l.RunOnce(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if got = w.entries(t); len(got) != 2 {
		t.Fatalf("one summary a window for all replicas: %v", got)
	}
	if s := got[1]; s.GetCount() != 10 || !s.GetFirstAt().AsTime().Before(s.GetLastAt().AsTime()) ||
		s.GetDedupeKeyHash() != got[0].GetDedupeKeyHash() {
		t.Errorf("summary: %v", s)
	}
	// The request is accepted: one entry for the decision and one that ends the window.
	if err := w.log.Refuse(ctx, entry, refusal); err == nil {
		t.Fatal("no refusal")
	}
	if err := pg.InTx(ctx, w.db.Pool("lifecycle"), func(ctx context.Context, tx pgx.Tx) error {
		_, err := w.log.Record(ctx, tx, entry)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if got = w.entries(t); len(got) != 4 {
		t.Fatalf("entries after it went through: %v", got)
	}
	if r := got[2]; r.GetOutcome() != audit.Done || r.GetCount() != 11 || r.GetDetails().AsMap()["recovered"] != "true" ||
		r.GetLastAt() == nil {
		t.Errorf("recovery entry: %v", r)
	}
	if d := got[3]; d.GetOutcome() != audit.Done || d.GetCount() != 0 {
		t.Errorf("decision: %v", d)
	}
	// A decision with no refusals before it has one entry, however often it is made.
	for range 2 {
		if err := pg.InTx(ctx, w.db.Pool("lifecycle"), func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.log.Record(ctx, tx, entry)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if got = w.entries(t); len(got) != 6 {
		t.Fatalf("entries of decisions: %d", len(got))
	}
}

// Occurrences that were counted and not yet written are in the entry of the transaction that commits, even if others
// were rolled back before.
func TestCountsOutliveWhatIsUndone(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	entry := audit.Entry{Action: "workspace.reset", SubjectType: "workspace", SubjectID: ids.New()}
	refusal := fault.New(commonv1.Reason_REASON_OPERATION_IN_PROGRESS, "an operation is open")
	for range 5 {
		if err := w.log.Refuse(ctx, entry, refusal); !errors.Is(err, refusal) {
			t.Fatal(err)
		}
	}
	undone := errors.New("undone")
	record := func(end error) error {
		return pg.InTx(ctx, w.db.Pool("lifecycle"), func(ctx context.Context, tx pgx.Tx) error {
			if _, err := w.log.Record(ctx, tx, entry); err != nil {
				return err
			}
			return end
		})
	}
	if err := record(undone); !errors.Is(err, undone) {
		t.Fatal(err)
	}
	// Rolled back to a savepoint of a transaction, and done in the rest of it.
	err := pg.InTx(ctx, w.db.Pool("lifecycle"), func(ctx context.Context, tx pgx.Tx) error {
		part, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := w.log.Record(ctx, part, entry); err != nil {
			return err
		}
		if err := part.Rollback(ctx); err != nil {
			return err
		}
		_, err = w.log.Record(ctx, tx, entry)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	got := w.entries(t)
	if len(got) != 3 || got[1].GetCount() != 5 || got[1].GetDetails().AsMap()["recovered"] != "true" {
		t.Fatalf("entries after it went through: %v", got)
	}
	// The window is over: the next refusal is the first again.
	if err := w.log.Refuse(ctx, entry, refusal); !errors.Is(err, refusal) {
		t.Fatal(err)
	}
	if got = w.entries(t); len(got) != 4 || got[3].GetCount() != 1 {
		t.Fatalf("the first refusal after it: %v", got)
	}
}

// Refusals and rounds run concurrently, and every refusal is counted once.
func TestCountingAndReportingAtOnce(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	entry := audit.Entry{Action: "node.enrol", Outcome: audit.Refused, SubjectType: "node", SubjectID: "n", Reason: "no"}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 25 {
				if err := errors.Join(w.log.Repeated(ctx, entry), w.log.RunOnce(ctx)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := w.log.RunOnce(ctx); err != nil {
		t.Fatal(err)
	}
	var n int64
	if err := w.db.Pool("lifecycle").QueryRow(ctx, `SELECT sum(count) FROM lifecycle.audit_window`).Scan(&n); err != nil ||
		n != 100 {
		t.Fatalf("%d are counted (%v)", n, err)
	}
}

// If the first write of a kind fails, its occurrence and those that came during the write are written later.
func TestAFailedFirstWriteDropsNothing(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	entry := audit.Entry{Action: "node.enrol", Outcome: audit.Refused, SubjectType: "node", SubjectID: "n", Reason: "no"}
	owner, err := w.db.OwnerPool().Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = owner.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := owner.Exec(ctx, "LOCK TABLE lifecycle.audit_window"); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithCancel(ctx)
	first := make(chan error, 1)
	go func() { first <- w.log.Repeated(short, entry) }()
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting bool
		err := w.db.OwnerPool().QueryRow(ctx,
			`SELECT EXISTS (SELECT FROM pg_locks
				WHERE NOT granted AND relation = 'lifecycle.audit_window'::regclass
				AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`).Scan(&waiting)
		if err == nil && !waiting {
			err = errors.New("the first write does not wait")
		}
		return err
	})
	for range 3 {
		if err := w.log.Repeated(ctx, entry); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-first; err == nil {
		t.Fatal("a write that was given up succeeded")
	}
	if err := owner.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if err := w.log.RunOnce(ctx); err != nil {
		t.Fatal(err)
	}
	var n int64
	if err := w.db.Pool("lifecycle").QueryRow(ctx,
		`SELECT coalesce(sum(count), 0) FROM lifecycle.audit_window`).Scan(&n); err != nil || n != 4 {
		t.Fatalf("%d of 4 are counted (%v)", n, err)
	}
	if got := w.entries(t); len(got) != 1 || got[0].GetCount() != 4 {
		t.Errorf("entries: %v", got)
	}
}

func TestWindowsEnd(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	entry := audit.Entry{Action: "node.enrol", Outcome: audit.Refused, SubjectType: "node", SubjectID: "n", Reason: "no"}
	if err := w.log.Repeated(ctx, entry); err != nil {
		t.Fatal(err)
	}
	testkit.SetClockOffset(w.db, 301*time.Second)
	if err := newLog(t, w.db).RunOnce(ctx); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := w.db.Pool("lifecycle").QueryRow(ctx, `SELECT count(*) FROM lifecycle.audit_window`).Scan(&n); err != nil ||
		n != 0 {
		t.Fatalf("%d windows are left (%v)", n, err)
	}
	if got := w.entries(t); len(got) != 1 {
		t.Fatalf("a window in which nothing more happened has a summary: %v", got)
	}
	// Other reasons and other subjects are other kinds.
	for _, change := range []func(*audit.Entry){
		func(e *audit.Entry) { e.Reason = "never" }, func(e *audit.Entry) { e.SubjectID = "m" },
		func(e *audit.Entry) { e.Actor = "node/m" },
	} {
		e := entry
		change(&e)
		if err := w.log.Repeated(ctx, e); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.entries(t); len(got) != 4 {
		t.Fatalf("%d entries", len(got))
	}
}

func TestFailuresAreNoDecisions(t *testing.T) {
	for _, err := range []error{
		errors.New("broken"), fault.New(commonv1.Reason_REASON_UNAVAILABLE, ""),
		fault.New(commonv1.Reason_REASON_NOT_FOUND, ""),
	} {
		if e, ok := (audit.Entry{}).Refusal(err); ok {
			t.Errorf("%v is audited as %v", err, e)
		}
	}
	if _, ok := (audit.Entry{}).Refusal(fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "")); !ok {
		t.Error("a denied permission is not audited")
	}
}

func TestClean(t *testing.T) {
	spec := &lifecyclev1.WorkspaceSpec{Plan: "small", Workloads: []*nodev1.Workload{{
		Name: "web", Command: []string{"/bin/serve"}, Args: []string{"--pass=hunter22", "x"},
		Env: map[string]string{"DB": "hunter22"},
	}}}
	got := audit.Clean(spec)
	w := got.GetWorkloads()[0]
	if w.GetName() != "web" || got.GetPlan() != "small" || w.GetEnv()["DB"] != obs.Redacted || len(w.GetArgs()) != 2 ||
		w.GetCommand()[0] != obs.Redacted {
		t.Errorf("cleaned: %v", got)
	}
	if strings.Contains(protojson.Format(got), "hunter22") {
		t.Errorf("the secret is left: %v", got)
	}
	if spec.GetWorkloads()[0].GetEnv()["DB"] != "hunter22" {
		t.Error("the original was changed")
	}
	details, err := structpb.NewStruct(map[string]any{
		"recovery_token": "abc",
		"deep":           []any{map[string]any{"password": "abc"}}, "url": "https://u:pw123@h/x?q=1", "n": 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	entry := audit.Clean(&commonv1.AuditEntry{Details: details, Reason: "Bearer abcdefghijkl"})
	want := map[string]any{
		"recovery_token": obs.Redacted, "deep": []any{map[string]any{"password": obs.Redacted}},
		"url": "https://u:" + obs.Redacted + "@h/x?" + obs.Redacted, "n": 1.0,
	}
	if diff := cmp.Diff(want, entry.GetDetails().AsMap()); diff != "" {
		t.Error(diff)
	}
	if entry.GetReason() != "Bearer "+obs.Redacted {
		t.Errorf("reason: %s", entry.GetReason())
	}
}

// TestEntriesArePrintable: the text that a person wrote cannot control a terminal that shows it, whether the action was
// done or refused.
func TestEntriesArePrintable(t *testing.T) {
	w := newWorld(t)
	ctx := person(testkit.Context(t))
	const given = "a\x1b[31mb\u202ec\u2066d\u200be\u061cf\r\ng"
	entry := audit.Entry{
		Action: "node.cordon", Reason: given, SubjectType: "node", SubjectID: given, Actor: given,
		Details: map[string]any{"before": given, "all": []string{given}},
	}
	if err := pg.InTx(ctx, w.db.Pool("lifecycle"), func(ctx context.Context, tx pgx.Tx) error {
		_, err := audit.Record(ctx, tx, entry)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, e := range w.entries(t) {
		const want = "a�[31mb�c�d�e�f��g"
		for name, got := range map[string]string{
			"reason": e.GetReason(), "subject": e.GetSubjectId(), "actor": e.GetActor(),
			"details": e.GetDetails().GetFields()["before"].GetStringValue(),
			"list":    e.GetDetails().GetFields()["all"].GetListValue().GetValues()[0].GetStringValue(),
		} {
			if got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
	}
}
