package findings

import (
	"context"
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// acknowledge acknowledges a finding as a person does.
func (b *bed) acknowledge(f finding.Row) {
	b.t.Helper()
	ctx := rpc.WithPerson(b.t.Context(), rpc.Person{Subject: "ana@example.org", Roles: []string{"operator"}})
	res, err := NewServer(b.sweeper, nil).AcknowledgeFinding(ctx,
		&lifecyclev1.AcknowledgeFindingRequest{FindingId: f.ID, Reason: "looked at"})
	if err != nil {
		b.t.Fatal(err)
	}
	if now := res.GetFinding(); now.GetResolvedAt() == nil || now.GetAcknowledgedBy() != "ana@example.org" ||
		now.GetAcknowledgeReason() != "looked at" || res.GetPos() == "" {
		b.t.Errorf("the acknowledgement answers %+v", res)
	}
}

// byHand runs statements as the administrator does with psql, in one transaction.
func (b *bed) byHand(statements ...string) {
	b.t.Helper()
	if _, err := b.hand(superuser).Exec(b.t.Context(), "BEGIN;"+strings.Join(statements, ";")+";COMMIT"); err != nil {
		b.t.Fatalf("%s: %v", statements, err)
	}
}

// A change by hand that the next operation takes over before a sweep is found nevertheless, and no further operation
// ends the finding.
func TestAChangeByHandThatAnOperationTakesOverAtOnce(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	wantOnly(t, b.seen())
	// A field that every operation rewrites, one that none does, and one of the allocation that the operation ends.
	b.byHand(`UPDATE lifecycle.workspace SET last_error = 'mine', retry_used = 2 WHERE id = '`+id+`'`,
		`UPDATE lifecycle.allocation SET gpus = 7 WHERE workspace_id = '`+id+`'`)
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	if err := b.operate(t.Context(), kRecreate, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, active)
	b.numbered()
	if now := b.text(`SELECT last_error FROM lifecycle.workspace WHERE id = $1`, id); now != "" {
		t.Fatalf("the operation left %q: nothing was shown", now)
	}
	b.sweep()
	found := wantOnly(t, b.open(), "row_changed_outside workspace "+id, "row_changed_outside allocation "+allocation)
	f := found[0]
	if f.Before["last_error"] != "" || f.After["last_error"] != "mine" || f.Before["retry_used"] != 0.0 ||
		f.After["retry_used"] != 2.0 || f.WorkspaceID != id {
		t.Errorf("before %v, after %v", f.Before, f.After)
	}
	if len(f.Before) != 2 || !strings.Contains(f.Summary, "last_error, retry_used; by postgres with psql (") ||
		!strings.Contains(f.NextAction, "findings acknowledge") {
		t.Errorf("it says %q, %q", f.Summary, f.NextAction)
	}
	changes, _ := f.After["changes"].([]any)
	if len(changes) != 1 {
		t.Fatalf("the changes are %v", changes)
	}
	if c := changes[0].(map[string]any); c["by"] != "postgres" || c["application"] != "psql" || c["backend"] == nil ||
		c["transaction"] == "" || c["at"] == "" {
		t.Errorf("the change is %v", c)
	}
	if f := found[1]; f.AllocationID != allocation || f.Before["gpus"] != 1.0 || f.After["gpus"] != 7.0 {
		t.Errorf("before %v, after %v", f.Before, f.After)
	}
	if err := b.operate(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, gone)
	for _, f := range wantOnly(t, b.seen(), "row_changed_outside workspace "+id,
		"row_changed_outside allocation "+allocation) {
		b.acknowledge(f)
	}
	wantOnly(t, b.seen())
	_, err := NewServer(b.sweeper, nil).AcknowledgeFinding(t.Context(),
		&lifecyclev1.AcknowledgeFindingRequest{FindingId: f.ID, Reason: "x"})
	if !fault.Has(err, commonv1.Reason_REASON_STATE_TERMINAL) {
		t.Errorf("a second acknowledgement says %v", err)
	}
}

// Columns that no event carries are guarded like the rest, and what tenants may have put there is hidden.
func TestAColumnThatNoEventCarries(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	b.sweep()
	run := b.text(`SELECT run_id::text FROM lifecycle.workspace WHERE id = $1`, id)
	was := b.text(`SELECT quote_literal(input) FROM lifecycle.saga_run WHERE id = $1`, run)
	b.byHand(`UPDATE lifecycle.saga_run
		SET attempts = 9, signal = signal + 1,
		input = '{"spec": {"workloads": [{"name": "web", "env": {"KEY": "hunter22"}}], "token": "hunter23"}}'
		WHERE id = '` + run + `'`)
	b.sweep()
	f := wantOnly(t, b.open(), "row_changed_outside run "+run)[0]
	if f.Before["attempts"] != 0.0 || f.After["attempts"] != 9.0 || f.WorkspaceID != id ||
		!strings.Contains(f.Summary, "attempts, input, signal; by postgres") {
		t.Errorf("before %v, after %v, %q", f.Before, f.After, f.Summary)
	}
	var all strings.Builder
	all.WriteString(b.text(`SELECT concat(before, after) FROM lifecycle.finding WHERE finding_id = $1`, f.ID))
	for _, e := range testkit.Events(t, b.db.Pool(pg.RoleLifecycle), `kind IN ('finding.changed', 'audit.recorded')`) {
		text, err := json.Marshal(e.Message)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(text)
	}
	printed := all.String()
	if strings.Contains(printed, "hunter2") || !strings.Contains(printed, obs.Redacted) ||
		!strings.Contains(printed, `"web"`) {
		t.Errorf("the finding tells %s", printed)
	}
	// The row is put back in two statements, and the finding ends with the second.
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.saga_run SET attempts = 0, signal = signal - 1 WHERE id = $1`, run)
	b.sweep()
	if f = wantOnly(t, b.open(), "row_changed_outside run "+run)[0]; len(f.Before) != 1 || f.Before["input"] == nil ||
		len(f.After["changes"].([]any)) != 2 {
		t.Errorf("before %v, after %v", f.Before, f.After)
	}
	b.byHand(`UPDATE lifecycle.saga_run SET input = ` + was + ` WHERE id = '` + run + `'`)
	b.sweep()
	wantOnly(t, b.open())
	b.byHand(`UPDATE lifecycle.saga_run SET attempts = attempts WHERE id = '` + run + `'`) // nothing
	b.sweep()
	wantOnly(t, b.open())
}

// A change that was made and taken back between two sweeps is reported once.
func TestAChangeThatIsPutBackBeforeTheScan(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	b.sweep()
	b.byHand(`UPDATE lifecycle.workspace SET state_at = state_at + '1 day' WHERE id = '` + id + `'`)
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.workspace SET state_at = state_at - '1 day'::interval WHERE id = $1`, id)
	b.sweep()
	if f := wantOnly(t, b.open(), "row_changed_outside workspace "+id)[0]; !strings.Contains(f.Summary,
		"state_at, and put back; by lifecycle") {
		t.Errorf("it says %q", f.Summary)
	}
	b.sweep()
	wantOnly(t, b.open())
}

// A write while the trigger is turned off leaves a row that does not fit its seal; a session setting that stops other
// triggers does not stop this one.
func TestAChangeWhileTheTriggerDoesNotFire(t *testing.T) {
	b := newBed(t, Config{})
	quiet, taken, put, replica := b.live("one"), b.live("two"), b.live("three"), b.live("four")
	b.numbered()
	b.sweep()
	change := func(id string) string {
		return `UPDATE lifecycle.workspace SET retry_window_start = '2020-01-01T12:00Z', register_failures = 3 WHERE id = '` +
			id + `'`
	}
	off := func(statements ...string) {
		statements = append([]string{`ALTER TABLE lifecycle.workspace DISABLE TRIGGER seal_row`}, statements...)
		b.byHand(append(statements, `ALTER TABLE lifecycle.workspace ENABLE ALWAYS TRIGGER seal_row`)...)
	}
	b.byHand(`SET LOCAL session_replication_role = 'replica'`, change(replica))
	off(change(quiet), change(taken), change(put))
	// An operation takes one of them over at once.
	if err := b.operate(t.Context(), kRecreate, taken); err != nil {
		t.Fatal(err)
	}
	b.until(taken, active)
	b.numbered()
	b.sweep()
	found := wantOnly(t, b.open(), "row_changed_outside workspace "+quiet, "row_changed_outside workspace "+taken,
		"row_changed_outside workspace "+put, "row_changed_outside workspace "+replica)
	for i, f := range found {
		if after, _ := f.After["retry_window_start"].(string); !strings.HasPrefix(after, "2020-01-01") ||
			f.After["register_failures"] != 3.0 {
			t.Errorf("%d: after %v", i, f.After)
		}
		if want := []string{
			"its seal does not fit", "noticed at", "its seal does not fit",
			"by postgres with psql",
		}[i]; !strings.Contains(f.Summary, want) {
			t.Errorf("%d says %q, not %q", i, f.Summary, want)
		}
	}
	if f := found[3]; len(f.Before) != 2 || f.Before["register_failures"] != 0.0 {
		t.Errorf("before %v", f.Before)
	}
	// One is put back as it was changed; what the others were before is not known, so that they can be acknowledged as
	// they are.
	off(`UPDATE lifecycle.workspace SET retry_window_start = NULL, register_failures = 0 WHERE id = '` + put + `'`)
	b.byHand(`UPDATE lifecycle.workspace SET retry_window_start = NULL, register_failures = 0 WHERE id = '` + replica +
		`'`)
	b.sweep()
	for _, f := range wantOnly(t, b.open(), "row_changed_outside workspace "+quiet,
		"row_changed_outside workspace "+taken) {
		b.acknowledge(f)
	}
	wantOnly(t, b.seen())
	// A row that fits now is not read again, and a process that starts finds what the one before it did not.
	off(change(put))
	fresh, err := New(Deps{
		Logger: b.sweeper.deps.Logger, DB: b.sweeper.deps.DB, Workloads: b.workloads, Drivers: b.sweeper.deps.Drivers,
		Metrics: prometheus.NewRegistry(), Committed: func() {},
	}, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fresh.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantOnly(t, b.open(), "row_changed_outside workspace "+put)
}

// A scan reads no row as long as the triggers are not changed, however many rows there are.
func TestAQuietScanReadsNoRow(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	b.sweep()
	lock, err := b.db.OwnerPool().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := lock.Exec(t.Context(),
		`LOCK TABLE lifecycle.workspace, lifecycle.saga_run, lifecycle.allocation IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	if seen, err := b.sweeper.guard.Scan(t.Context()); err != nil || len(seen) != 0 {
		t.Fatalf("%v, %v", seen, err)
	}
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A row that was ended by hand while the trigger was off is scanned with the live ones.
	b.byHand(`ALTER TABLE lifecycle.workspace DISABLE TRIGGER ALL`,
		`UPDATE lifecycle.workspace SET state = 'decommissioned' WHERE id = '`+id+`'`,
		`ALTER TABLE lifecycle.workspace ENABLE TRIGGER ALL`,
		`ALTER TABLE lifecycle.workspace ENABLE ALWAYS TRIGGER seal_row`)
	if seen, err := b.sweeper.guard.Scan(t.Context()); err != nil || len(seen) != 1 || seen[0].SubjectID != id {
		t.Errorf("%v, %v", seen, err)
	}
}

// An acknowledgement settles the evidence that the finding names, and none that came after.
func TestAnAcknowledgementSettlesWhatWasListed(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	b.sweep()
	b.byHand(`UPDATE lifecycle.workspace SET retry_window_start = '2020-01-01T12:00Z' WHERE id = '` + id + `'`)
	b.sweep()
	f := wantOnly(t, b.open(), "row_changed_outside workspace "+id)[0]
	b.byHand(`UPDATE lifecycle.workspace SET retry_window_start = '2021-01-01T12:00Z' WHERE id = '` + id + `'`)
	b.acknowledge(f)
	b.sweep()
	again := wantOnly(t, b.open(), "row_changed_outside workspace "+id)[0]
	if again.ID == f.ID || !strings.HasPrefix(again.Before["retry_window_start"].(string), "2020-01-01") {
		t.Errorf("got %+v", again)
	}
	b.acknowledge(again)
	wantOnly(t, b.seen())
	// Other findings end when the contradiction is gone, and cannot be acknowledged.
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	for _, f := range b.seen() {
		_, err := NewServer(b.sweeper, nil).AcknowledgeFinding(t.Context(),
			&lifecyclev1.AcknowledgeFindingRequest{FindingId: f.ID, Reason: "x"})
		if !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
			t.Errorf("%s: %v", f.Summary, err)
		}
	}
}

// Only the triggers add evidence, and no role may change it.
func TestEvidenceIsAddedAndNeverChanged(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.byHand(`UPDATE lifecycle.workspace SET retry_used = 1 WHERE id = '` + id + `'`)
	for _, role := range []string{pg.RoleOwner, pg.RoleLifecycle} {
		pool := b.db.OwnerPool()
		if role != pg.RoleOwner {
			pool = b.db.Pool(role)
		}
		for _, sql := range []string{
			`UPDATE lifecycle.row_evidence SET db_user = 'x'`, `DELETE FROM lifecycle.row_evidence`,
			`TRUNCATE lifecycle.row_evidence CASCADE`,
		} {
			if _, err := pool.Exec(t.Context(), sql); err == nil {
				t.Errorf("%s may: %s", role, sql)
			}
		}
	}
	_, err := b.db.Pool(pg.RoleLifecycle).Exec(t.Context(),
		`INSERT INTO lifecycle.row_evidence (op, row_type, row_id) VALUES ('update', 'run', $1)`, id)
	if !testkit.IsPrivilege(err) {
		t.Errorf("lifecycle may add evidence: %v", err)
	}
	if _, err := b.db.Pool(pg.RoleLifecycle).Exec(t.Context(),
		`SELECT lifecycle.leave_evidence('delete', 'workspace', jsonb_build_object('id', $1::text), NULL)`,
		id); !testkit.IsPrivilege(err) {
		t.Errorf("lifecycle may have evidence left: %v", err)
	}
}

// No statement of the product names the seal but the acknowledgement's: the session's setting marks writes as the
// product's.
func TestNoStatementNamesTheSeal(t *testing.T) {
	names := regexp.MustCompile(`\bseal\b *(=|,)`)
	for _, st := range pg.Statements() {
		if names.MatchString(st.SQL()) && st.Name() != "guard.seal_row" {
			t.Errorf("%s names the seal", st.Name())
		}
	}
}
