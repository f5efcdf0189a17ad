package findings

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
)

// acknowledge ends a finding on a person's word.
func (b *bed) acknowledge(f row) {
	b.t.Helper()
	ctx := rpc.WithPerson(b.t.Context(), rpc.Person{Subject: "ana@example.org", Roles: []string{"operator"}})
	res, err := NewServer(b.sweeper, nil).AcknowledgeFinding(ctx, &lifecyclev1.AcknowledgeFindingRequest{FindingId: f.id, Reason: "looked at"})
	if err != nil {
		b.t.Fatal(err)
	}
	if now := res.GetFinding(); now.GetResolvedAt() == nil || now.GetAcknowledgedBy() != "ana@example.org" || now.GetAcknowledgeReason() != "looked at" || res.GetPos() == "" {
		b.t.Errorf("the acknowledgement answers %+v", res)
	}
}

// byHand runs statements as the administrator does with psql, in one transaction.
func (b *bed) byHand(statements ...string) {
	b.t.Helper()
	conn, err := pgx.Connect(b.t.Context(), b.db.AdminURL()+"&application_name=psql&timezone=Asia/Kolkata")
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(b.t.Context())) }()
	if _, err := conn.Exec(b.t.Context(), "BEGIN;"+strings.Join(statements, ";")+";COMMIT"); err != nil {
		b.t.Fatalf("%s: %v", statements, err)
	}
}

// A change by hand that the next operation takes over before anybody looked is found all the same, and no further operation ends the finding.
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
	if f.Before["last_error"] != "" || f.After["last_error"] != "mine" || f.Before["retry_used"] != 0.0 || f.After["retry_used"] != 2.0 || f.WorkspaceID != id {
		t.Errorf("before %v, after %v", f.Before, f.After)
	}
	if len(f.Before) != 2 || !strings.Contains(f.Summary, "last_error, retry_used; by postgres with psql (") || !strings.Contains(f.NextAction, "findings acknowledge") {
		t.Errorf("it says %q, %q", f.Summary, f.NextAction)
	}
	changes, _ := f.After["changes"].([]any)
	if len(changes) != 1 {
		t.Fatalf("the changes are %v", changes)
	}
	if c := changes[0].(map[string]any); c["by"] != "postgres" || c["application"] != "psql" || c["backend"] == nil || c["transaction"] == "" || c["at"] == "" {
		t.Errorf("the change is %v", c)
	}
	if f := found[1]; f.AllocationID != allocation || f.Before["gpus"] != 1.0 || f.After["gpus"] != 7.0 {
		t.Errorf("before %v, after %v", f.Before, f.After)
	}
	if err := b.operate(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, gone)
	for _, f := range wantOnly(t, b.seen(), "row_changed_outside workspace "+id, "row_changed_outside allocation "+allocation) {
		b.acknowledge(f)
	}
	wantOnly(t, b.seen())
	_, err := NewServer(b.sweeper, nil).AcknowledgeFinding(t.Context(), &lifecyclev1.AcknowledgeFindingRequest{FindingId: f.id, Reason: "x"})
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
	b.byHand(`UPDATE lifecycle.saga_run SET attempts = 9, signal = signal + 1, input = '{"spec": {"workloads": [{"name": "web", "env": {"KEY": "hunter22"}}], "token": "hunter23"}}'
		WHERE id = '` + run + `'`)
	b.sweep()
	f := wantOnly(t, b.open(), "row_changed_outside run "+run)[0]
	if f.Before["attempts"] != 0.0 || f.After["attempts"] != 9.0 || f.WorkspaceID != id || !strings.Contains(f.Summary, "attempts, input, signal; by postgres") {
		t.Errorf("before %v, after %v, %q", f.Before, f.After, f.Summary)
	}
	told := b.text(`SELECT concat(before, after) FROM lifecycle.finding WHERE finding_id = $1`, f.id)
	for _, e := range testkit.Events(t, b.db.Pool(pg.RoleLifecycle), `kind IN ('finding.changed', 'audit.recorded')`) {
		text, err := json.Marshal(e.Message)
		if err != nil {
			t.Fatal(err)
		}
		told += string(text)
	}
	if strings.Contains(told, "hunter2") || !strings.Contains(told, obs.Redacted) || !strings.Contains(told, `"web"`) {
		t.Errorf("the finding tells %s", told)
	}
	// Put back in two turns, and the finding ends with the second.
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.saga_run SET attempts = 0, signal = signal - 1 WHERE id = $1`, run)
	b.sweep()
	if f = wantOnly(t, b.open(), "row_changed_outside run "+run)[0]; len(f.Before) != 1 || f.Before["input"] == nil || len(f.After["changes"].([]any)) != 2 {
		t.Errorf("before %v, after %v", f.Before, f.After)
	}
	b.byHand(`UPDATE lifecycle.saga_run SET input = ` + was + ` WHERE id = '` + run + `'`)
	b.sweep()
	wantOnly(t, b.open())
	b.byHand(`UPDATE lifecycle.saga_run SET attempts = attempts WHERE id = '` + run + `'`) // nothing
	b.sweep()
	wantOnly(t, b.open())
}

// A change that was made and taken back between two sweeps is told once.
func TestAChangeThatIsPutBackBeforeAnybodyLooks(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	b.sweep()
	b.byHand(`UPDATE lifecycle.workspace SET state_at = state_at + '1 day' WHERE id = '` + id + `'`)
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.workspace SET state_at = state_at - '1 day'::interval WHERE id = $1`, id)
	b.sweep()
	if f := wantOnly(t, b.open(), "row_changed_outside workspace "+id)[0]; !strings.Contains(f.Summary, "state_at, and put back; by lifecycle") {
		t.Errorf("it says %q", f.Summary)
	}
	b.sweep()
	wantOnly(t, b.open())
}

// Whoever keeps the trigger from firing leaves a row that does not fit its seal.
func TestAChangeWhileTheTriggerDoesNotFire(t *testing.T) {
	b := newBed(t, Config{})
	quiet, taken, put := b.live("one"), b.live("two"), b.live("three")
	b.numbered()
	b.sweep()
	change := func(id string) string {
		return `UPDATE lifecycle.workspace SET retry_window_start = '2020-01-01T12:00Z', register_failures = 3 WHERE id = '` + id + `'`
	}
	b.byHand(`SET LOCAL session_replication_role = 'replica'`, change(quiet), change(taken))
	b.byHand(`ALTER TABLE lifecycle.workspace DISABLE TRIGGER seal_row`, change(put), `ALTER TABLE lifecycle.workspace ENABLE TRIGGER seal_row`)
	// An operation takes one of them over at once.
	if err := b.operate(t.Context(), kRecreate, taken); err != nil {
		t.Fatal(err)
	}
	b.until(taken, active)
	b.numbered()
	b.sweep()
	found := wantOnly(t, b.open(), "row_changed_outside workspace "+quiet, "row_changed_outside workspace "+taken, "row_changed_outside workspace "+put)
	for i, f := range found {
		if f.Before["retry_window_start"] != nil || !strings.HasPrefix(f.After["retry_window_start"].(string), "2020-01-01") || f.Before["register_failures"] != 0.0 || f.After["register_failures"] != 3.0 {
			t.Errorf("%d: before %v, after %v", i, f.Before, f.After)
		}
		if want := []string{"its seal does not fit", "noticed at", "its seal does not fit"}[i]; !strings.Contains(f.Summary, want) {
			t.Errorf("%d says %q, not %q", i, f.Summary, want)
		}
	}
	// One is put back as it was changed; one is set right as the log says, and acknowledged; one has gone on, and is.
	b.byHand(`SET LOCAL session_replication_role = 'replica'`, `UPDATE lifecycle.workspace SET retry_window_start = NULL, register_failures = 0 WHERE id = '`+put+`'`)
	b.sweep()
	found = wantOnly(t, b.open(), "row_changed_outside workspace "+quiet, "row_changed_outside workspace "+taken)
	ack := &lifecyclev1.AcknowledgeFindingRequest{FindingId: found[0].id, Reason: "x"}
	if _, err := NewServer(b.sweeper, nil).AcknowledgeFinding(t.Context(), ack); !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) || !strings.Contains(err.Error(), "register_failures") {
		t.Errorf("what contradicts the log is acknowledged: %v", err)
	}
	b.byHand(`SET LOCAL session_replication_role = 'replica'`, `UPDATE lifecycle.workspace SET register_failures = 0 WHERE id = '`+quiet+`'`)
	b.sweep()
	for _, f := range wantOnly(t, b.open(), "row_changed_outside workspace "+quiet, "row_changed_outside workspace "+taken) {
		b.acknowledge(f)
	}
	wantOnly(t, b.seen())
}

// An acknowledgement settles what the finding spoke of, and nothing that came after.
func TestAnAcknowledgementSettlesWhatWasTold(t *testing.T) {
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
	if again.id == f.id || !strings.HasPrefix(again.Before["retry_window_start"].(string), "2020-01-01") {
		t.Errorf("got %+v", again)
	}
	b.acknowledge(again)
	wantOnly(t, b.seen())
	// Other findings end when what they saw is no more, and not on anybody's word.
	if err := b.world.End(t.Context(), id, 1); err != nil {
		t.Fatal(err)
	}
	for _, f := range b.seen() {
		_, err := NewServer(b.sweeper, nil).AcknowledgeFinding(t.Context(), &lifecyclev1.AcknowledgeFindingRequest{FindingId: f.id, Reason: "x"})
		if !fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) {
			t.Errorf("%s: %v", f.Summary, err)
		}
	}
}

// Evidence is added by the triggers alone, and changed by nobody.
func TestEvidenceIsAddedAndNeverChanged(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.byHand(`UPDATE lifecycle.workspace SET retry_used = 1 WHERE id = '` + id + `'`)
	for _, role := range []string{pg.RoleOwner, pg.RoleLifecycle} {
		pool := b.db.OwnerPool()
		if role != pg.RoleOwner {
			pool = b.db.Pool(role)
		}
		for _, sql := range []string{`UPDATE lifecycle.row_evidence SET db_user = 'x'`, `DELETE FROM lifecycle.row_evidence`, `TRUNCATE lifecycle.row_evidence CASCADE`} {
			if _, err := pool.Exec(t.Context(), sql); err == nil {
				t.Errorf("%s may: %s", role, sql)
			}
		}
	}
	if _, err := b.db.Pool(pg.RoleLifecycle).Exec(t.Context(), `INSERT INTO lifecycle.row_evidence (op, row_type, row_id) VALUES ('update', 'run', $1)`, id); !pg.IsPrivilege(err) {
		t.Errorf("lifecycle may add evidence: %v", err)
	}
	if _, err := b.db.Pool(pg.RoleLifecycle).Exec(t.Context(), `SELECT lifecycle.leave_evidence('delete', 'workspace', jsonb_build_object('id', $1::text), NULL)`, id); !pg.IsPrivilege(err) {
		t.Errorf("lifecycle may have evidence left: %v", err)
	}
}

// Every statement of the product that writes a guarded row breaks its seal: one that does not would look like a hand.
func TestEveryWriteOfTheProductBreaksTheSeal(t *testing.T) {
	statement := regexp.MustCompile("(?s)(UPDATE|INSERT INTO|DELETE FROM|MERGE INTO)\\s+lifecycle\\.(workspace|saga_run|allocation)\\b[^`]*")
	marked := regexp.MustCompile(`^UPDATE\s+\S+(\s+(AS\s+)?\w+)?\s+SET seal = NULL,|^INSERT INTO\s+\S+(\s+AS\s+\w+)?\s*\(seal, `)
	found := 0
	err := filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path) //nolint:gosec // the product's own sources
		if err != nil {
			return err
		}
		for _, sql := range statement.FindAllString(string(text), -1) {
			found++
			if !marked.MatchString(sql) {
				t.Errorf("%s: %.160s", path, sql)
			}
		}
		return nil
	})
	if err != nil || found < 25 {
		t.Errorf("%d statements looked at (%v)", found, err)
	}
}
