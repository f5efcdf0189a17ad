package findings

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func TestRowsThatWereChangedOutside(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.live("two") // beside it, and never in what is found
	b.numbered()
	wantOnly(t, b.seen())
	run := b.text(`SELECT run_id::text FROM lifecycle.workspace WHERE id = $1`, id)
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)

	for _, tc := range []struct {
		name, as, change, repair string
		arg                      string
		key, says                string
		before, after            map[string]any
	}{
		{
			name: "the administrator flips a state", as: pg.RoleOwner, arg: id,
			change: `UPDATE lifecycle.workspace SET state = 'failed' WHERE id = $1`,
			repair: `UPDATE lifecycle.workspace SET state = 'active' WHERE id = $1`, key: "workspace",
			says: "state; by gpuaas_owner with psql", before: map[string]any{"state": "active"},
			after: map[string]any{"state": "failed"},
		},
		{
			name: "a person in lifecycle's role moves it elsewhere", as: pg.RoleLifecycle, arg: id,
			change: `UPDATE lifecycle.workspace SET node_name = 'mine', epoch = epoch + 1 WHERE id = $1`,
			repair: `UPDATE lifecycle.workspace SET node_name = (SELECT before->>'node_name' FROM lifecycle.row_evidence
				WHERE row_id = workspace.id ORDER BY evidence_id DESC LIMIT 1), epoch = epoch - 1 WHERE id = $1`,
			key: "workspace", says: "epoch, node_name; by lifecycle with psql", before: map[string]any{"epoch": 1.0},
			after: map[string]any{"epoch": 2.0, "node_name": "mine"},
		},
		{
			name: "with a version of its own", as: pg.RoleOwner, arg: id,
			change: `UPDATE lifecycle.workspace SET last_error = 'x', version = version + 1 WHERE id = $1`,
			repair: `UPDATE lifecycle.workspace SET last_error = '', version = version - 1 WHERE id = $1`,
			key:    "workspace", says: "last_error, version; by ", before: map[string]any{"last_error": ""},
			after: map[string]any{"last_error": "x"},
		},
		{
			name: "back in time", as: pg.RoleLifecycle, arg: id,
			change: `UPDATE lifecycle.workspace SET version = version - 1, retry_used = 2 WHERE id = $1`,
			repair: `UPDATE lifecycle.workspace SET version = version + 1, retry_used = 0 WHERE id = $1`,
			key:    "workspace", says: "retry_used, version; by lifecycle", before: map[string]any{"retry_used": 0.0},
			after: map[string]any{"retry_used": 2.0},
		},
		{
			name: "what cannot be read", as: pg.RoleOwner, arg: id,
			change: `UPDATE lifecycle.workspace SET endpoints = '[1]' WHERE id = $1`,
			repair: `UPDATE lifecycle.workspace SET endpoints = (SELECT before->'endpoints' FROM lifecycle.row_evidence
				WHERE row_id = workspace.id ORDER BY evidence_id DESC LIMIT 1) WHERE id = $1`,
			key: "workspace", says: "endpoints; by ",
		},
		{
			name: "a run that ended is brought back", as: pg.RoleOwner, arg: run,
			change: `UPDATE lifecycle.saga_run
				SET state = 'stuck', finished_at = NULL, stuck_reason = 'by hand', why_waiting = 'by hand' WHERE id = $1`,
			repair: `UPDATE lifecycle.saga_run SET state = 'succeeded', stuck_reason = '', why_waiting = '',
				finished_at = (SELECT (before->>'finished_at')::timestamptz FROM lifecycle.row_evidence WHERE row_id = saga_run.id
					ORDER BY evidence_id DESC LIMIT 1) WHERE id = $1`,
			key: "run", says: "finished_at, state, stuck_reason, why_waiting; by", before: map[string]any{"state": "succeeded"},
			after: map[string]any{"state": "stuck"},
		},
		{
			name: "an allocation is freed by hand", as: pg.RoleLifecycle, arg: allocation,
			change: `UPDATE lifecycle.allocation SET state = 'released', occupancy = 'none' WHERE allocation_id = $1`,
			repair: `UPDATE lifecycle.allocation SET state = 'active', occupancy = 'in_use' WHERE allocation_id = $1`,
			key:    "allocation", says: "occupancy, state; by lifecycle", before: map[string]any{"state": "active"},
			after: map[string]any{"state": "released"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b.as(tc.as, tc.change, tc.arg)
			b.sweep() // one scan is enough: no work under way looks like it
			found := without(without(without(b.open(), "node_occupied"), "claim_without"), "allocation_without")
			f := wantOnly(t, found, "row_changed_outside "+tc.key+" "+tc.arg)[0]
			if f.Severity != finding.P1 || f.WorkspaceID != id || !strings.Contains(f.Summary, tc.says) ||
				!strings.Contains(f.NextAction, "set the row back") {
				t.Errorf("it says %q, %q of workspace %s", f.Summary, f.NextAction, f.WorkspaceID)
			}
			for k, v := range tc.before {
				if f.Before[k] != v {
					t.Errorf("before, %s was %v, not %v", k, f.Before[k], v)
				}
			}
			for k, v := range tc.after {
				if f.After[k] != v {
					t.Errorf("after, %s is %v, not %v", k, f.After[k], v)
				}
			}
			b.as(tc.as, tc.repair, tc.arg)
			b.sweep()
			wantOnly(t, without(b.open(), "node_occupied"))
		})
	}
}

func TestARowThatVanishesAndOneThatAppears(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	wantOnly(t, b.seen())
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	b.as(pg.RoleOwner, `DELETE FROM lifecycle.gpu_hold WHERE allocation_id = $1`, allocation)
	b.as(pg.RoleOwner, `DELETE FROM lifecycle.allocation WHERE allocation_id = $1`, allocation)
	ghost := ids.New()
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.workspace (id, tenant_id, name, state)
		SELECT $1, tenant_id, 'ghost', 'failed' FROM lifecycle.workspace WHERE id = $2`, ghost, id)
	b.sweep()
	found := wantOnly(t, b.open(), "row_changed_outside allocation "+allocation, "row_changed_outside workspace "+ghost)
	if f := found[0]; f.Before["state"] != "active" || f.Before["placement"] != "process" ||
		!strings.Contains(f.Summary, "it was deleted; by ") || f.WorkspaceID != id {
		t.Errorf("got %+v", f)
	}
	if f := found[1]; f.After["name"] != "ghost" || !strings.Contains(f.Summary, "it was inserted; by lifecycle") {
		t.Errorf("got %+v", f)
	}
	// The finding of a deleted row cannot be acknowledged; it ends when the row is inserted again as it was, and that of
	// an inserted row when the row is deleted again.
	if _, err := NewServer(b.sweeper, nil).AcknowledgeFinding(t.Context(),
		&lifecyclev1.AcknowledgeFindingRequest{FindingId: found[0].ID, Reason: "x"}); !fault.Has(err,
		commonv1.Reason_REASON_PRECONDITION_FAILED) ||
		!strings.Contains(err.Error(), "it is gone") {
		t.Errorf("the acknowledgement says %v", err)
	}
	b.as(pg.RoleOwner, `INSERT INTO lifecycle.allocation
		SELECT (jsonb_populate_record(NULL::lifecycle.allocation, e.before)).* FROM lifecycle.row_evidence e
		WHERE e.op = 'delete' AND e.row_id = $1`, allocation)
	b.as(pg.RoleOwner, `INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id)
		SELECT d.value::uuid, substr(d.key, 8), e.row_id
		FROM lifecycle.row_evidence e, jsonb_each_text(e.before) d WHERE e.row_id = $1 AND d.key LIKE 'device %'`, allocation)
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.workspace WHERE id = $1`, ghost)
	b.sweep()
	wantOnly(t, b.open())
	b.byHand(`TRUNCATE lifecycle.allocation CASCADE`)
	b.sweep()
	if f := b.open()["row_changed_outside allocation "+allocation]; !strings.Contains(f.Summary,
		"it was deleted; by postgres with psql") || f.Before["placement"] != "process" {
		t.Errorf("got %+v", f)
	}
}

// A change by hand that an operation takes over is in the event log as the operation's own, and is found nevertheless.
func TestWhatAnOperationTookOver(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	second := b.live("two")
	b.numbered()
	b.sweep()
	b.as(pg.RoleOwner, `UPDATE lifecycle.workspace SET last_error = 'x', version = version + 1 WHERE id = $1`, id)
	b.as(pg.RoleOwner, `UPDATE lifecycle.workspace SET created_by = 'somebody else' WHERE id = $1`, second)
	err := pg.InTx(t.Context(), b.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		for _, w := range []string{id, second} {
			if _, err := tx.Exec(ctx, `UPDATE lifecycle.workspace SET register_failures = 1, version = version + 1
				WHERE id = $1`, w); err != nil {
				return err
			}
			if _, _, err := workspace.Announce(ctx, tx, w); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	b.numbered()
	b.sweep()
	found := wantOnly(t, b.open(), "row_changed_outside workspace "+id, "row_changed_outside workspace "+second)
	if f := found[0]; !strings.Contains(f.Summary, "last_error, version; by") ||
		!strings.Contains(f.NextAction, "findings acknowledge") || f.After["last_error"] != "x" {
		t.Errorf("got %q, %q", f.Summary, f.NextAction)
	}
	if f := found[1]; f.After["created_by"] != "somebody else" {
		t.Errorf("got %v", f.After)
	}
	b.pass(25 * time.Hour)
	for _, f := range wantOnly(t, b.seen(), "row_changed_outside workspace "+id, "row_changed_outside workspace "+second) {
		b.acknowledge(f)
	}
	wantOnly(t, b.seen())
}
