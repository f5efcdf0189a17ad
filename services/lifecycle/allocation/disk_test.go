package allocation

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAMachineWithoutRoomIsNotPicked checks that a full disk excludes a machine, cordoned or not, and that the failure
// to place names the disk.
func TestAMachineWithoutRoomIsNotPicked(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, replica := db.Pool(pg.RoleLifecycle), ids.New()
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Beat(db, replica, "", 0, false)
	node := ids.New()
	exec(`INSERT INTO lifecycle.node_gate (node_id, fence_epoch, admitted, session_open, replica_id, slots)
		VALUES ($1, 1, true, true, $2, 4)`, node, replica)
	pick := func() (string, error) {
		var picked string
		err := pg.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			var err error
			picked, _, err = TakeSlot(ctx, tx, 0)
			return err
		})
		return picked, err
	}
	if picked, err := pick(); err != nil || picked != node {
		t.Fatalf("with room: %q, %v", picked, err)
	}
	exec(`UPDATE lifecycle.node_gate SET host = '{"stateDisk": {"full": true, "path": "/var/lib/gpuaas"}}'
		WHERE node_id = $1`, node)
	_, err := pick()
	if err == nil || !strings.Contains(err.Error(), "no_capacity") ||
		!strings.Contains(err.Error(), "1 connected machines") || !strings.Contains(err.Error(), "no room") {
		t.Errorf("without room: %v", err)
	}
	exec(`UPDATE lifecycle.node_gate SET host = '{"stateDisk": {"path": "/var/lib/gpuaas"}}' WHERE node_id = $1`, node)
	if picked, err := pick(); err != nil || picked != node {
		t.Errorf("with room again: %q, %v", picked, err)
	}
}
