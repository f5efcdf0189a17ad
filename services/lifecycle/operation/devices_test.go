package operation

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
)

// TestADeviceThatIsTakenMeanwhileCostsNoAttempt: two allocations of a machine choose its devices at once. The one that
// comes second takes another device, and its step does not fail.
func TestADeviceThatIsTakenMeanwhileCostsNoAttempt(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 2, lease: time.Hour})
	other := p.create(p.tenant(), "other", byProcess)
	p.mutes(true)
	id, run := p.begin("demo")
	p.parked(run, provision.StepStorage, "waiting for the agent to make")
	const node = `(SELECT node_id FROM lifecycle.instance WHERE workspace_id = $1)`
	p.change(`UPDATE lifecycle.node_gate SET session_epoch = 0 WHERE node_id = `+node, id)
	p.change(`DELETE FROM lifecycle.gpu_hold
		WHERE allocation_id = (SELECT allocation_id FROM lifecycle.allocation WHERE workspace_id = $1)`, id)
	p.wake(id)
	p.parked(run, provision.StepStorage, noAgent)
	tx, err := p.db.OwnerPool().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(testkit.Context(t)) }()
	if _, err := tx.Exec(t.Context(), `INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id)
		SELECT `+node+`, 'gpu-0', allocation_id FROM lifecycle.allocation WHERE workspace_id = $2`, id, other); err != nil {
		t.Fatal(err)
	}
	p.change(`UPDATE lifecycle.node_gate SET session_epoch = 1 WHERE node_id = `+node, id)
	p.wake(id)
	testkit.Eventually(t, testkit.Patience, func() error {
		n := 0
		err := tx.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks
			WHERE transactionid = pg_current_xact_id()::xid AND NOT granted`).Scan(&n)
		if err != nil {
			return err
		}
		if n == 0 {
			return errors.New("no step waits for the device")
		}
		return nil
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.mutes(false)
	p.rests(id, "active")
	if list := p.storageAttempts(run); len(list) != 1 {
		t.Errorf("the step took %d attempts: %s", len(list), fmt.Sprint(list))
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.gpu_hold h JOIN lifecycle.allocation a USING (allocation_id)
		WHERE a.workspace_id = $1 AND h.device_id = 'gpu-1'`, id); n != 1 {
		t.Errorf("the workspace has %d of the device that was free", n)
	}
}
