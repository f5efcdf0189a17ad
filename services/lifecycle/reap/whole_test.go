package reap

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// countingDriver counts how often the list of everything that was ever launched is read.
type countingDriver struct {
	placement.Driver

	lists atomic.Int32
}

func (d *countingDriver) List(ctx context.Context) ([]placement.Instance, error) {
	d.lists.Add(1)
	return d.Driver.List(ctx)
}

// TestASweepDecidesAboutWhatStands: instances that have ended are judged by the first sweep, after a sweep that left an
// orphan unended, where they were given up, and now and then.
func TestASweepDecidesAboutWhatStands(t *testing.T) {
	m := newMorgue(t)
	d := &countingDriver{Driver: m.driver}
	m.reaper.deps.Drivers = map[commonv1.PlacementDriver]placement.Driver{byProcess: d}
	sweep := func(what string, want Reaped, lists int32) {
		t.Helper()
		d.lists.Store(0)
		m.sweep(want)
		if n := d.lists.Load(); n != lists {
			t.Errorf("%s: %d lists of everything that was ever launched, want %d", what, n, lists)
		}
	}
	ended := func(p place) placement.LaunchRequest {
		t.Helper()
		b := m.instance(p)
		if err := m.driver.End(t.Context(), b.WorkspaceID, b.Epoch); err != nil {
			t.Fatal(err)
		}
		return b
	}
	ended(place{instance: "ended", run: "failed"})
	sweep("the first sweep", Reaped{}, 1)
	sweep("one of a fleet at rest", Reaped{}, 0)
	m.instance(place{run: "failed"})
	sweep("one that finds an orphan", Reaped{Ended: 1}, 0)
	ended(place{instance: "ending", run: "failed", claimed: true, orphaned: true})
	sweep("one after a box that has ended was given up", Reaped{Ended: 1}, 1)
	sweep("the next", Reaped{}, 0)
	ended(place{run: "failed"})
	sweep("one after an end without a row", Reaped{}, 0)
	giveUp := func(epoch int64) {
		t.Helper()
		m.exec(`INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope,
			deterministic_name, epoch, orphaned_at)
			SELECT gen_random_uuid(), id, tenant_id, run_id, 1, 'instance', 'shared', 'instance', $1, mesh.clock()
				FROM lifecycle.workspace LIMIT 1`, epoch)
	}
	giveUp(7)
	sweep("one after a box that was never launched was given up", Reaped{}, 1)
	sweep("the next", Reaped{}, 0)
	giveUp(8)
	m.exec(`INSERT INTO lifecycle.instance (instance_id, workspace_id, tenant_id, epoch, state, placement)
		SELECT gen_random_uuid(), workspace_id, tenant_id, 8, 'ended', 'docker' FROM lifecycle.resource_claim
			WHERE epoch = 8`)
	sweep("one after a box of another placement was given up", Reaped{}, 0)
	m.reaper.whole[byProcess] = time.Now().Add(-wholeEvery)
	sweep("one after ten minutes", Reaped{Ended: 1}, 1)
	sweep("the one after that", Reaped{}, 0)
}
