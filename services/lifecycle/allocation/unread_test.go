package allocation

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Of two allocations whose releases are late, and of two instances that no row accounts for, one has a value that this
// build does not know: each reader sets it aside, and goes on with the other.
func TestUnknownValuesStopNoOtherAllocation(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, ctx := db.Pool(pg.RoleLifecycle), testkit.Context(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql, args...); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	in := func(fn func(ctx context.Context, tx pgx.Tx) error) {
		t.Helper()
		if err := pg.InTx(ctx, pool, fn); err != nil {
			t.Fatal(err)
		}
	}
	tenant, odd, plain := ids.New(), ids.New(), ids.New()
	exec(`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 'x')`, tenant)
	for workspace, driver := range map[string]string{odd: "static", plain: "process"} {
		exec(`INSERT INTO lifecycle.workspace (id, tenant_id, name, state, epoch)
			VALUES ($1, $2, $1::uuid::text, 'active', 1)`, workspace, tenant)
		exec(`INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state, placement, occupancy,
				release_deadline_at)
			VALUES ($1, $1, $2, 1, 'releasing', $3, 'cleanup', mesh.clock() - interval '1 hour')`, workspace, tenant, driver)
	}
	testkit.WithoutValue(t, commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC)
	testkit.WithoutValue(t, commonv1.InstanceState_INSTANCE_STATE_ENDED)
	allocations, instances := testkit.SetAside(t, "allocation"), testkit.SetAside(t, "instance")
	// told returns the states of what the events of a kind have told since the last call.
	from := 0
	announced := func(kind string) map[string]string {
		t.Helper()
		list := testkit.Events(t, pool, `kind = $1`, kind)
		out := map[string]string{}
		for _, e := range list[min(from, len(list)):] {
			var a lifecyclev1.Allocation
			if err := e.Decode(&a); err != nil {
				t.Fatal(err)
			}
			out[a.GetWorkspaceId()] = a.GetState().String()
		}
		from = len(list)
		return out
	}

	in(func(ctx context.Context, tx pgx.Tx) error {
		if _, _, err := Live(ctx, tx, odd); err == nil {
			t.Error("the allocation that this build cannot read is returned as another")
		}
		_, _, err := Live(ctx, tx, plain)
		return err
	})
	if n := allocations(); n != 1 {
		t.Errorf("%d allocations were reported as each was read alone", n)
	}
	in(func(ctx context.Context, tx pgx.Tx) error {
		return MoveDeadlines(ctx, tx, []string{odd, plain}, []float64{1, 1})
	})
	if got := announced("allocation.changed"); len(got) != 1 || got[plain] != "ALLOCATION_STATE_RELEASING" {
		t.Errorf("deadlines that were moved were told of %v", got)
	}
	in(func(ctx context.Context, tx pgx.Tx) error {
		for _, workspace := range []string{odd, plain} {
			if err := AnnounceOrphans(ctx, tx, workspace, 1); err != nil {
				return err
			}
		}
		return nil
	})
	if got := announced("allocation.changed"); len(got) != 1 || got[plain] == "" {
		t.Errorf("orphans were told of %v", got)
	}
	if n, err := FailLate(ctx, pool); err != nil || n != 1 {
		t.Errorf("%d releases are late: %v", n, err)
	}
	if got := announced("allocation.changed"); len(got) != 1 || got[plain] != "ALLOCATION_STATE_RELEASE_FAILED" {
		t.Errorf("late releases were told of %v", got)
	}
	for workspace, want := range map[string]string{odd: "releasing", plain: "release_failed"} {
		var state string
		if err := pool.QueryRow(ctx, `SELECT state FROM lifecycle.allocation WHERE workspace_id = $1`,
			workspace).Scan(&state); err != nil || state != want {
			t.Errorf("an allocation is %s, not %s: %v", state, want, err)
		}
	}
	if n := allocations(); n != 1 {
		t.Errorf("%d allocations were reported", n)
	}

	running := func(workspaces ...string) int {
		t.Helper()
		var list []placement.Instance
		for _, workspace := range workspaces {
			list = append(list,
				placement.Instance{WorkspaceID: workspace, Epoch: 1, ProviderID: "p", StartedAt: time.Unix(1, 0)})
		}
		n := 0
		in(func(ctx context.Context, tx pgx.Tx) error {
			var err error
			n, err = NoteUnaccounted(ctx, tx, commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS, list)
			return err
		})
		return n
	}
	if n := running(odd); n != 1 {
		t.Errorf("%d instances are unaccounted for", n)
	}
	if n := running(plain); n != 1 { // the other one has ended
		t.Errorf("%d instances were noted beside one that this build cannot read", n)
	}
	if n := instances(); n != 1 {
		t.Errorf("%d instances were reported", n)
	}
}
