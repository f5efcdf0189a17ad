package lease_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// A run that this build cannot drive is stuck as any other: OnStuck of its definition is called, the audit has it, and
// the verbs that are offered for it work.
func TestARunThatIsPutAsideIsStuckAsAnyOther(t *testing.T) {
	testkit.IO(t)
	notified := make(chan *saga.StepError, 1)
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States(),
		OnStuck: func(_ context.Context, _ pgx.Tx, _ string, why *saga.StepError) error { notified <- why; return nil },
	})
	ws, id := b.Create("toy")
	b.Exec(`UPDATE lifecycle.saga_run SET step_names = '{other}' WHERE id = $1`, id)
	stop := b.Drive(b.Config("a"))
	r := b.Await(id, testkit.Patience, "stuck")
	stop()
	select {
	case why := <-notified:
		if why.Public == "" || why.Layer == commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED {
			t.Errorf("told %+v", why)
		}
	default:
		t.Error("OnStuck of its definition was not called")
	}
	var reason string
	err := b.DB.Pool(pg.RoleLifecycle).QueryRow(t.Context(),
		`SELECT payload->>'reason' FROM events.event WHERE kind = $1 AND payload->>'action' = 'tenant.provisioning.stuck'`,
		audit.Kind).Scan(&reason)
	if err != nil || !strings.Contains(reason, "unreadable") {
		t.Errorf("on sagatest.Record is %q, %v", reason, err)
	}
	refused := func(what string, err error) {
		t.Helper()
		if f, ok := fault.As(err); !ok || len(f.Unmet) == 0 || !strings.Contains(f.Remedy, "decommission") ||
			strings.Contains(f.Remedy, "retry the undo") {
			t.Errorf("%s = %+v", what, err)
		}
	}
	if b.Core.Drives(&r) {
		t.Error("it would be driven")
	}
	refused(
		"retry-undo", b.Tx(
			func(ctx context.Context, tx pgx.Tx) error { _, err := b.Core.RetryUndo(ctx, tx, id, "op"); return err },
		),
	)
	refused("skip-undo", b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := b.Core.SkipUndo(ctx, tx, id, "op", "why not")
		return err
	}))
	refused(
		"cancel", b.Tx(
			func(ctx context.Context, tx pgx.Tx) error { _, err := b.Core.Cancel(ctx, tx, id, "op", ""); return err },
		),
	)
	refused(
		"reset", b.Tx(func(ctx context.Context, tx pgx.Tx) error { _, _, err := b.Core.Reset(ctx, tx, ws); return err }),
	)
	if err := b.Tx(
		func(ctx context.Context, tx pgx.Tx) error { _, err := b.Core.CloseStuck(ctx, tx, id); return err },
	); err != nil {
		t.Errorf("what a decommission begins with: %v", err)
	}
}

// The refusal of a reset has a remedy: for an operation that cannot be cancelled it is to wait, and an open attempt is
// named.
func TestARefusedResetSaysWhatHelps(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States()},
		saga.Definition{
			Name: "teardown", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States(), Uncancellable: true,
		})
	reset := func(ws string) *fault.Error {
		t.Helper()
		f, ok := fault.As(
			b.Tx(func(ctx context.Context, tx pgx.Tx) error { _, _, err := b.Core.Reset(ctx, tx, ws); return err }),
		)
		if !ok || len(f.Unmet) == 0 || f.RetryAfter != saga.ResetAdvice {
			t.Fatalf("reset = %+v", f)
		}
		return f
	}
	ws, id := b.Create("toy")
	if f := reset(ws); !strings.HasPrefix(f.Remedy, "cancel it") {
		t.Errorf("of what can be cancelled it says %q", f.Remedy)
	}
	teardown, _ := b.Create("teardown")
	if f := reset(teardown); !strings.Contains(f.Remedy, "cannot be cancelled: wait") {
		t.Errorf("of what cannot be cancelled it says %q", f.Remedy)
	}
	b.Exec(`UPDATE lifecycle.saga_run SET state = 'failed', finished_at = mesh.clock() WHERE id = $1`, id)
	b.Exec(`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq,
		state, idem_key, stall_after)
		VALUES ($1, 0, 'one', 'do', 3, $2, $3, 1, 1, 'running', 'k', '5 min')`, id, ws, b.Tenant)
	if f := reset(ws); len(f.Unmet) != 1 ||
		!strings.Contains(f.Unmet[0], `attempt 3 at doing the step "one" of operation `+id) {
		t.Errorf("of an attempt that is open it says %q", f.Unmet)
	}
}
