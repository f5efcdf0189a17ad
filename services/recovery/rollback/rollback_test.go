package rollback_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	ahead  = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_AHEAD
	behind = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_BEHIND
	node   = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_NODE_AHEAD
)

type kit struct {
	t      *testing.T
	ctx    context.Context
	db     *testkit.Database
	pool   *pgxpool.Pool
	server *rollback.Server
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{t: t, ctx: testkit.Context(t), db: testkit.DB(t)}
	k.pool = k.db.Pool(pg.RoleRecovery)
	var err error
	if k.server, err = rollback.New(rollback.Deps{Logger: testkit.Logger(t), Pool: k.pool}); err != nil {
		t.Fatal(err)
	}
	return k
}

func (k *kit) report(kind recoveryv1.RollbackEvidenceKind, subject string, remembered,
	known int64,
) *recoveryv1.RollbackMode {
	k.t.Helper()
	out, err := k.server.ReportRollback(k.ctx, &recoveryv1.ReportRollbackRequest{
		Kind: kind, Subject: subject, Detail: "the launch log has another epoch", Remembered: remembered, Known: known,
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return out.GetRollback()
}

func (k *kit) accept() (*recoveryv1.AcceptRollbackResponse, error) {
	ctx := rpc.WithPerson(k.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	return k.server.AcceptRollback(ctx, &recoveryv1.AcceptRollbackRequest{Reason: "compared"})
}

func (k *kit) mustAccept() *recoveryv1.AcceptRollbackResponse {
	k.t.Helper()
	out, err := k.accept()
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

// declare does what `gpuaas migrate restored` does, with no other connection to the database.
func (k *kit) declare() schema.Rollback {
	k.t.Helper()
	testkit.Disconnect(k.db, pg.RoleRecovery)
	out, err := schema.DeclareRestored(k.ctx, k.db.URL(pg.RoleOwner), "the disk was lost")
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

func (k *kit) want(what, sql, want string) {
	k.t.Helper()
	var got string
	if err := k.pool.QueryRow(k.ctx, sql).Scan(&got); err != nil {
		k.t.Fatal(err)
	}
	if got != want {
		k.t.Fatalf("%s: %s, want %s", what, got, want)
	}
}

func (k *kit) wantMode(active bool) {
	k.t.Helper()
	k.want("rollback mode", `SELECT mesh.rolled_back()::text`, fmt.Sprint(active))
}

func (k *kit) wantEra(era int) {
	k.t.Helper()
	k.want("era", `SELECT era::text FROM mesh.era`, fmt.Sprint(era))
}

// wantIncidents requires that there were all incidents in total, and that open of them are open.
func (k *kit) wantIncidents(all, open int) {
	k.t.Helper()
	k.want("incidents", `SELECT count(*) || ' ' || count(*) FILTER (WHERE closed_at IS NULL) FROM recovery.incident`,
		fmt.Sprintf("%d %d", all, open))
}

// The same report sets the mode once, opens one incident and is counted; the acceptance ends both, and raises the era
// so that the same report sets no mode.
func TestALaunchLogThatRemembersMore(t *testing.T) {
	k := newKit(t)
	first := k.report(ahead, "process", 3, 2)
	if !first.GetActive() || first.GetDeclared() || first.GetIncidentId() == "" || first.GetSince() == nil ||
		len(first.GetEvidence()) != 1 {
		t.Fatalf("%v", first)
	}
	again := k.report(ahead, "process", 3, 2)
	if again.GetEvidenceTotal() != 1 || again.GetEvidence()[0].GetCount() != 1 ||
		again.GetIncidentId() != first.GetIncidentId() {
		t.Fatalf("%v", again)
	}
	k.wantMode(true)
	k.wantIncidents(1, 1)
	k.want("events", `SELECT count(*)::text FROM events.event WHERE kind = 'incident.changed'`, "1")
	testkit.SetClockOffset(k.db, 2*time.Minute)
	if m := k.report(ahead, "process", 3, 2); m.GetEvidenceTotal() != 1 || m.GetEvidence()[0].GetCount() != 2 {
		t.Fatalf("two minutes later: %v", m)
	}
	k.want("audit", `SELECT string_agg(payload ->> 'action', ' ' ORDER BY seq) FROM events.event WHERE kind LIKE 'audit%'`,
		"incident.open rollback.enter")
	out := k.mustAccept()
	if m := out.GetRollback(); m.GetActive() || m.GetAcceptedBy() != "ada" || m.GetAcceptReason() != "compared" ||
		m.GetEra() != 1 || out.GetPos() == "" {
		t.Fatalf("%v", out)
	}
	k.wantMode(false)
	k.wantEra(1)
	k.wantIncidents(1, 0)
	k.want("who closed it", `SELECT closed_by FROM recovery.incident`, "ada")
	if m := k.report(ahead, "process", 3, 2); m.GetActive() {
		t.Fatalf("what was accepted sets the mode again: %v", m)
	}
	k.wantMode(false)
	// A number of the present era belongs to a history that has not been declared lost.
	if m := k.report(ahead, "process", 1<<40+1, 2); !m.GetActive() {
		t.Fatalf("%v", m)
	}
	k.wantIncidents(2, 1)
	k.mustAccept()
	k.wantEra(2)
}

// A launch log that is older than the database sets the mode as well: the numbers that would be given twice are those
// that the database has.
func TestALaunchLogThatIsOlder(t *testing.T) {
	k := newKit(t)
	if m := k.report(behind, "process", 0, 4); !m.GetActive() {
		t.Fatalf("%v", m)
	}
	k.want("summary", `SELECT (summary LIKE '%the launch log lacks what the database knows%')::text FROM
		recovery.incident`, "true")
	k.mustAccept()
	k.wantEra(1)
	if m := k.report(behind, "process", 0, 4); m.GetActive() {
		t.Fatalf("%v", m)
	}
}

// A declared restore has one incident, which recovery opens, and no second one for numbers of the lost history that
// nodes and logs still report.
func TestADeclaredRestoreHasOneIncident(t *testing.T) {
	k := newKit(t)
	if state := k.declare(); state.Era != 1 || !state.Active || !state.Declared || state.Since.IsZero() {
		t.Fatalf("%+v", state)
	}
	k.wantMode(true)
	k.wantIncidents(0, 0)
	var replicas sync.WaitGroup
	for range 4 {
		replicas.Go(func() {
			if err := k.server.Sync(k.ctx); err != nil {
				t.Error(err)
			}
		})
	}
	replicas.Wait()
	k.wantIncidents(1, 1)
	k.want("summary", `SELECT (summary LIKE '%restored from a backup (the disk was lost)%')::text FROM recovery.incident`,
		"true")
	if m := k.report(ahead, "process", 3, 2); !m.GetDeclared() || m.GetEvidenceTotal() != 1 {
		t.Fatalf("%v", m)
	}
	k.wantIncidents(1, 1)
	k.mustAccept()
	k.wantEra(1) // the era is above that of all evidence already
	k.wantIncidents(1, 0)
	if err := k.server.Sync(k.ctx); err != nil {
		t.Fatal(err)
	}
	if m := k.report(ahead, "static", 3, 2); m.GetActive() {
		t.Fatalf("%v", m)
	}
	k.wantIncidents(1, 0)
}

// The dump may be older than an earlier restore: its era was given before, and the acceptance raises the era above the
// evidence of that.
func TestADumpFromBeforeAnEarlierRestore(t *testing.T) {
	k := newKit(t)
	k.declare()
	k.report(ahead, "process", 5<<40+3, 2)
	k.wantMode(true)
	k.mustAccept()
	k.wantEra(6)
}

// An undeclared rollback may be declared afterwards: it is one mode with one incident, and the era goes above the
// evidence.
func TestDeclaringAfterTheEvidence(t *testing.T) {
	k := newKit(t)
	before := k.report(ahead, "process", 3<<40, 2)
	if state := k.declare(); state.Era != 4 || !state.Declared {
		t.Fatalf("%+v", state)
	}
	if err := k.server.Sync(k.ctx); err != nil {
		t.Fatal(err)
	}
	k.wantIncidents(1, 1)
	got, err := k.server.GetRollback(k.ctx, &recoveryv1.GetRollbackRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m := got.GetRollback(); m.GetIncidentId() != before.GetIncidentId() || m.GetEvidenceTotal() != 1 ||
		!m.GetDeclared() {
		t.Fatalf("%v", m)
	}
	k.mustAccept()
	k.wantEra(4)
	k.wantIncidents(1, 0)
}

func TestAcceptingWhatIsNotActiveIsRefused(t *testing.T) {
	k := newKit(t)
	if _, err := k.accept(); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Fatal(err)
	}
	ctx := rpc.WithPerson(k.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	if _, err := k.server.AcceptRollback(ctx, &recoveryv1.AcceptRollbackRequest{Reason: "  "}); !fault.Has(err,
		commonv1.Reason_REASON_REASON_REQUIRED) {
		t.Fatal(err)
	}
	if _, err := k.server.ReportRollback(k.ctx, &recoveryv1.ReportRollbackRequest{
		Kind: node, Subject: "x",
		Detail: "y",
	}); !fault.Has(err,
		commonv1.Reason_REASON_INVALID_ARGUMENT) {
		t.Fatal(err)
	}
	k.wantEra(0)
}

// Evidence from a whole fleet leaves a row and an incident of bounded size.
func TestEvidenceIsBounded(t *testing.T) {
	k := newKit(t)
	list := make([]rollback.Evidence, 100)
	for i := range list {
		list[i] = rollback.Evidence{Kind: node, Subject: ids.New(), Detail: strings.Repeat("x", 100), Remembered: 9}
	}
	for range 2 {
		for part := range 10 {
			err := pg.InTx(k.ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
				_, _, err := rollback.Record(ctx, tx, list[part*10:part*10+10]...)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	k.want("kept", `SELECT jsonb_array_length(evidence)::text FROM recovery.rollback`, "32")
	k.want("nodes", `SELECT cardinality(node_ids)::text FROM recovery.incident`, "32")
	k.want("many events", `SELECT (count(*) <= 8)::text FROM events.event WHERE kind = 'incident.changed'`, "true")
}

// Scenario: 100 nodes and a launch log report twice each, three times as much as the row keeps. Each is counted once,
// is shown since its first report, and the summary names the launch log although its report is older than the 32
// newest. In the next mode all are new.
func TestEvidenceThatIsReportedAgainIsNotAnother(t *testing.T) {
	k := newKit(t)
	k.report(ahead, "process", 3, 2)
	list := make([]rollback.Evidence, 100)
	for i := range list {
		list[i] = rollback.Evidence{Kind: node, Subject: ids.New(), Detail: "x", Remembered: 9}
	}
	record := func() {
		t.Helper()
		err := pg.InTx(k.ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
			_, _, err := rollback.Record(ctx, tx, list...)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	const counts = `SELECT evidence_total || ' ' || jsonb_array_length(evidence) || ' '
		|| (SELECT string_agg(DISTINCT e ->> 'count', ',') FROM jsonb_array_elements(evidence) e
			WHERE e ->> 'kind' = 'node_ahead')
		|| ' ' || (SELECT string_agg(DISTINCT ((e ->> 'first')::timestamptz < (e ->> 'last')::timestamptz)::text, ',')
			FROM jsonb_array_elements(evidence) e WHERE e ->> 'kind' = 'node_ahead') FROM recovery.rollback`
	record()
	k.want("reported once", counts, "101 32 1 false")
	testkit.SetClockOffset(k.db, time.Minute)
	record()
	k.want("reported twice", counts, "101 32 2 true")
	if m := k.report(ahead, "process", 3, 2); m.GetEvidenceTotal() != 101 || m.GetEvidence()[0].GetCount() != 2 {
		t.Errorf("the launch log again: %d in total, first %v", m.GetEvidenceTotal(), m.GetEvidence()[0])
	}
	record()
	k.want("summary", `SELECT (summary LIKE 'nodes and the launch log remember more%')::text
		FROM recovery.incident`, "true")
	k.mustAccept()
	k.want("kept after the acceptance", `SELECT count(*)::text FROM recovery.rollback_seen`, "0")
	for i := range list {
		list[i].Remembered, list[i].Era = 1<<40+9, 1
	}
	record()
	k.want("the next mode", counts, "100 32 1 false")
}

// countingTx counts the statements of a transaction.
type countingTx struct {
	pgx.Tx

	statements int
}

func (c *countingTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	c.statements++
	return c.Tx.Exec(ctx, sql, args...)
}

func (c *countingTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	c.statements++
	return c.Tx.Query(ctx, sql, args...)
}

func (c *countingTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	c.statements++
	return c.Tx.QueryRow(ctx, sql, args...)
}

// record records evidence and returns how many statements that took.
func (k *kit) record(list ...rollback.Evidence) int {
	k.t.Helper()
	statements := 0
	err := pg.InTx(k.ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
		counted := &countingTx{Tx: tx}
		_, _, err := rollback.Record(ctx, counted, list...)
		statements = counted.statements
		return err
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return statements
}

// Scenario: a fleet connects in batches after a restore. The row that every batch locks is locked for the same number
// of statements whether one node of the batch is evidence or each of them, also if one is in the batch twice.
func TestABatchOfEvidenceIsWrittenTogether(t *testing.T) {
	k := newKit(t)
	evidence := func(remembered int64) rollback.Evidence {
		return rollback.Evidence{Kind: node, Subject: ids.New(), Detail: "x", Remembered: remembered}
	}
	k.record(evidence(1))
	one := k.record(evidence(2))
	list := make([]rollback.Evidence, 101)
	for i := range list {
		list[i] = evidence(3)
	}
	twice := &list[100]
	*twice = list[50]
	twice.Remembered = 4
	if got := k.record(list...); got != one {
		t.Errorf("a batch of 101 takes %d statements, one of 1 takes %d", got, one)
	}
	k.want("counted", `SELECT evidence_total || ' ' || (SELECT count(*) || ' ' || max(count) FROM recovery.rollback_seen)
		FROM recovery.rollback`, "102 102 1")
	k.want("the newest", `SELECT evidence -> 0 ->> 'subject' || ' ' || (evidence -> 0 ->> 'remembered')
		FROM recovery.rollback`, twice.Subject+" 4")
}

// Scenario: nodes show the same numbers again. Within a minute nothing is written; another number is written at once,
// of that node alone; later each is counted once more.
func TestUnchangedEvidenceIsWrittenOnceAMinute(t *testing.T) {
	k := newKit(t)
	list := make([]rollback.Evidence, 50)
	for i := range list {
		list[i] = rollback.Evidence{Kind: node, Subject: ids.New(), Detail: "x", Remembered: 9}
	}
	written := func() string {
		t.Helper()
		var out string
		if err := k.pool.QueryRow(k.ctx, `SELECT r.version || ' ' || r.xmin || ' ' ||
			(SELECT string_agg(DISTINCT s.xmin::text, ',')
			FROM recovery.rollback_seen s) FROM recovery.rollback r`).Scan(&out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	const counts = `SELECT string_agg(n || 'x' || count, ' ' ORDER BY count)
		FROM (SELECT count, count(*) AS n FROM recovery.rollback_seen GROUP BY count) c`
	k.record(list...)
	before := written()
	k.record(list...)
	if after := written(); after != before {
		t.Errorf("the same numbers again: version and writers %s, before %s", after, before)
	}
	list[0].Remembered, list[49].Known = 10, 1 // the row keeps the newest 32 alone, which the first is not of
	k.record(list...)
	k.want("other numbers of two", counts, "48x1 2x2")
	testkit.SetClockOffset(k.db, 2*time.Minute)
	k.record(list...)
	k.want("two minutes later", counts, "48x2 2x3")
	k.want("in total", `SELECT evidence_total::text FROM recovery.rollback`, "50")
}

// Evidence that comes while a person accepts is either part of what was accepted or sets the mode anew: it is never
// lost between the two.
func TestEvidenceMeetsTheAcceptance(t *testing.T) {
	k := newKit(t)
	k.report(ahead, "process", 3, 2)
	var both sync.WaitGroup
	both.Go(func() {
		if _, err := k.accept(); err != nil {
			t.Error(err)
		}
	})
	both.Go(func() { k.report(ahead, "static", 7<<40, 2) })
	both.Wait()
	var active bool
	var era int64
	if err := k.pool.QueryRow(k.ctx, `SELECT mesh.rolled_back(), era FROM mesh.era`).Scan(&active, &era); err != nil {
		t.Fatal(err)
	}
	if !active && era <= 7 {
		t.Fatalf("the mode has ended in era %d, and a number of era 7 was shown", era)
	}
}

// In the mode agents wait where they would be told to stop, or to wait for a person; other reasons are unchanged.
func TestSoften(t *testing.T) {
	for reason, want := range map[commonv1.Reason]bool{
		commonv1.Reason_REASON_EPOCH_SUPERSEDED: true, commonv1.Reason_REASON_EPOCH_ENDED: true,
		commonv1.Reason_REASON_IDENTITY_RETIRED: true,
		commonv1.Reason_REASON_IDENTITY_UNKNOWN: true, commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED: true,
		commonv1.Reason_REASON_TOKEN_INVALID:   true,
		commonv1.Reason_REASON_JOIN_STATE_LOST: true, commonv1.Reason_REASON_SERIAL_UNKNOWN: true,
		commonv1.Reason_REASON_IDENTITY_HELD: false, commonv1.Reason_REASON_MINT_CONSUMED: false,
		commonv1.Reason_REASON_SESSION_SUPERSEDED: false,
	} {
		if got := rollback.Soften(reason, false); got != reason {
			t.Errorf("outside of the mode %v becomes %v", reason, got)
		}
		got := rollback.Soften(reason, true)
		if (got == commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) != want || (!want && got != reason) {
			t.Errorf("%v becomes %v", reason, got)
		}
		if want && fault.RowOf(got).Action != commonv1.Action_ACTION_WAIT {
			t.Errorf("%v is answered %v", reason, fault.RowOf(got).Action)
		}
	}
}
