package reap

import (
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
)

// No sweep ends, releases or gives up anything in rollback mode.
func TestSweepsLeaveEverythingInRollbackMode(t *testing.T) {
	m := newMorgue(t)
	b := m.instance(place{
		instance: "ending", run: "failed", claimed: true, orphaned: true, allocation: "releasing",
		occupy: "cleanup",
	})
	m.exec(`UPDATE lifecycle.allocation SET release_deadline_at = mesh.clock() - interval '1 hour'
		WHERE workspace_id = $1`, b.WorkspaceID)
	testkit.SetRollback(m.db, true)
	shared := NewSharedReaper(SharedReaperDeps{
		Logger: testkit.Logger(t), DB: m.db.Pool("lifecycle"), Workloads: m.db.Pool("lifecycle"), Identities: m.people,
		Committed: func() {},
	})
	machines := NewMachineReaper(MachineReaperDeps{
		Logger: testkit.Logger(t), DB: m.db.Pool("lifecycle"),
		Committed: func() {},
	})
	m.sweep(Reaped{})
	if n, err := shared.Sweep(t.Context()); err != nil || n != 0 {
		t.Errorf("the shared sweep released %d, %v", n, err)
	}
	if n, err := machines.Sweep(t.Context()); err != nil || n != 0 {
		t.Errorf("the sweep of machines released %d, %v", n, err)
	}
	if !m.standing()[b.WorkspaceID] || len(m.people.retired) != 0 {
		t.Errorf("standing %v, retired %q", m.standing(), m.people.retired)
	}
	if n := m.count(`SELECT count(*) FROM lifecycle.allocation WHERE state = 'releasing'`); n != 1 {
		t.Error("the release was given up")
	}
	if n := m.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE released_at IS NOT NULL`); n != 0 {
		t.Errorf("%d claims were released", n)
	}
	testkit.SetRollback(m.db, false)
	m.sweep(Reaped{Ended: 1})
	if m.standing()[b.WorkspaceID] {
		t.Error("it stands after the mode")
	}
}
