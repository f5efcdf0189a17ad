package operation

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
)

// Orphans that cannot be reaped, more than one sweep reads, do not keep a later orphan from being tried.
func TestOrphansThatStayKeepNoOtherBack(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	// Orphans of workspaces that do not exist: each try fails.
	_, err := p.db.OwnerPool().Exec(t.Context(), `
		INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
			epoch, node_id, orphaned_at, orphaned_by, orphan_reason)
		SELECT gen_random_uuid(), gen_random_uuid(), w.tenant_id, w.run_id, 1, 'workload', 'node_local', 'o' || g, 1, $2,
			mesh.clock() - interval '1 hour', 'olga', 'lost'
		FROM lifecycle.workspace w, generate_series(1, $3) g WHERE w.id = $1`, id, node, reap.ReapBatch)
	if err != nil {
		t.Fatal(err)
	}
	claim := ids.New()
	_, err = p.db.OwnerPool().Exec(t.Context(), `
		INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
			epoch, node_id, orphaned_at, orphaned_by, orphan_reason)
		SELECT $2, id, tenant_id, run_id, 1, 'workload', 'node_local', 'demo', epoch - 1, $3, mesh.clock(), 'olga', 'lost'
		FROM lifecycle.workspace WHERE id = $1`, id, claim, node)
	if err != nil {
		t.Fatal(err)
	}
	reaper := p.machineReaper()
	failed := 0
	testkit.Eventually(t, 2*testkit.Patience, func() error {
		if _, err := reaper.Sweep(t.Context()); err != nil {
			failed++
		}
		if p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE id = $1 AND released_at IS NOT NULL`, claim) == 0 {
			return errors.New("the last orphan had no turn")
		}
		return nil
	})
	if failed == 0 {
		t.Error("no orphan failed: this shows nothing")
	}
}

// An orphan that a later sweep comes back to is released by the task that was queued for it before, and another task is
// queued only once that one has failed.
func TestAnOrphanIsReleasedByAnEarlierTask(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	claim := ids.New()
	_, err := p.db.OwnerPool().Exec(t.Context(), `
		INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
			epoch, node_id, orphaned_at, orphaned_by, orphan_reason)
		SELECT $2, id, tenant_id, run_id, 1, 'workload', 'node_local', 'left-behind', epoch, $3, mesh.clock(), 'olga', 'lost'
		FROM lifecycle.workspace WHERE id = $1`, id, claim, node)
	if err != nil {
		t.Fatal(err)
	}
	tasks := func(condition string) int {
		return p.count(`SELECT count(*) FROM lifecycle.task
			WHERE created_by = 'reaper' AND starts_with(idem_key, 'reap/' || $1::text) AND `+condition, claim)
	}
	sweep := func(after time.Duration) int {
		testkit.SetClockOffset(p.db, after)
		released, err := p.machineReaper().Sweep(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return released
	}
	done := func() {
		testkit.Eventually(t, testkit.Patience, func() error {
			if n := tasks("state = 'succeeded'"); n != 1 {
				return fmt.Errorf("%d tasks succeeded", n)
			}
			return nil
		})
	}
	sweep(0)
	done()
	// The first task failed: another is queued, although the sweep is not in the next minute.
	if _, err := p.db.OwnerPool().Exec(t.Context(),
		`UPDATE lifecycle.task SET state = 'failed' WHERE idem_key LIKE 'reap/%'`); err != nil {
		t.Fatal(err)
	}
	if n := sweep(4 * time.Minute); n != 0 || tasks("true") != 2 {
		t.Fatalf("%d released by a task that failed, %d tasks", n, tasks("true"))
	}
	done()
	// The reaper waits for a task that the agent has taken and does not report on, and then queues another.
	if _, err := p.db.OwnerPool().Exec(t.Context(),
		`UPDATE lifecycle.task SET state = 'delivered' WHERE idem_key LIKE 'reap/%' AND state = 'succeeded'`); err != nil {
		t.Fatal(err)
	}
	if n := sweep((4 + reap.ReapLate - 2) * time.Minute); n != 0 || tasks("true") != 2 {
		t.Fatalf("%d released by a task that has not ended, %d tasks", n, tasks("true"))
	}
	if n := sweep((4 + reap.ReapLate + 1) * time.Minute); n != 0 || tasks("true") != 3 {
		t.Fatalf("%d released by a task that has not ended, %d tasks", n, tasks("true"))
	}
	done()
	if n := sweep((8 + reap.ReapLate) * time.Minute); n != 1 || tasks("true") != 3 {
		t.Errorf("%d released by a task of four minutes before, %d tasks", n, tasks("true"))
	}
}
