package findings

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// appliesScan applies a scan of a source that saw the given contradictions.
func (b *bed) appliesScan(source string, seen ...finding.Seen) Swept {
	b.t.Helper()
	var out Swept
	if err := b.sweeper.applyScan(b.t.Context(), source, seen, &out); err != nil {
		b.t.Fatal(err)
	}
	return out
}

// suspected returns the sources that see a subject now.
func (b *bed) suspected(subjectID string) []string {
	b.t.Helper()
	return strings.Fields(b.text(`SELECT coalesce(string_agg(s.source, ' ' ORDER BY s.source), '')
		FROM lifecycle.suspicion s WHERE s.subject_id = $1`, subjectID))
}

// Scenario: two detectors see a machine occupied, each by reasons of its own. Each needs two scans of its own; what one
// no longer sees takes nothing from the other; the finding and its cordon end with the last of them.
func TestTwoDetectorsKeepTheirOwnSuspicions(t *testing.T) {
	b := newBed(t, Config{})
	node := ids.New()
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.node_gate (node_id, name, fence_epoch, admitted)
		VALUES ($1, 'n', 1, true)`, node)
	subject := "node_occupied_without_allocation node " + node
	sight := func(what string) finding.Seen {
		return detect.Occupied(node, []detect.Record{{What: what, WorkspaceID: ids.New(), NodeID: node, Is: "a test"}})
	}
	later := func() { b.pass(b.sweeper.cfg.Grace + time.Second) }
	cordonOf := func() string {
		t.Helper()
		g, _, err := gate.Get(t.Context(), b.db.Pool(pg.RoleLifecycle), node)
		if err != nil {
			t.Fatal(err)
		}
		return g.CordonedBy
	}

	// One scan of each is no second scan of either.
	b.appliesScan("records", sight("gpu_hold"))
	later()
	if got := b.appliesScan("agents", sight("workload")); got.Open != 0 || got.Suspected != 1 {
		t.Errorf("the first scan of the second detector makes %+v", got)
	}
	if got := b.suspected(node); !slices.Equal(got, []string{"agents", "records"}) {
		t.Errorf("%v suspect the machine, want both", got)
	}
	wantOnly(t, b.open())

	// What the first no longer sees is not taken from the second, which needs no further grace.
	b.appliesScan("records")
	if got := b.suspected(node); !slices.Equal(got, []string{"agents"}) {
		t.Errorf("%v suspect the machine, want agents alone", got)
	}
	later()
	b.appliesScan("agents", sight("workload"))
	first := wantOnly(t, b.open(), subject)[0]
	if first.Source != "agents" || cordonOf() != finding.CordonBy(first.ID) {
		t.Errorf("the finding of %q cordons the machine, which is cordoned by %q", first.Source, cordonOf())
	}

	// The one that opened it sees it no longer, the other does: it stays, with its cordon.
	b.appliesScan("records", sight("gpu_hold"))
	if got := b.appliesScan("agents"); got.Resolved != 0 {
		t.Errorf("a finding is over that another detector sees: %+v", got)
	}
	held := wantOnly(t, b.open(), subject)[0]
	if held.ID != first.ID || held.Source != "records" || cordonOf() != finding.CordonBy(first.ID) {
		t.Errorf("finding %s of %q, cordon by %q; want %s of records, and its cordon", held.ID, held.Source, cordonOf(),
			first.ID)
	}
	later()
	b.appliesScan("records", sight("gpu_hold"))
	if again := wantOnly(t, b.open(), subject)[0]; again.ID != first.ID || !strings.Contains(again.Summary, "devices") {
		t.Errorf("it is told as before: %+v", again)
	}

	// The last one sees it no longer.
	if got := b.appliesScan("records"); got.Resolved != 1 {
		t.Errorf("no detector sees it and %+v", got)
	}
	wantOnly(t, b.open())
	if by := cordonOf(); by != "" {
		t.Errorf("the finding is over and the machine is cordoned by %q", by)
	}
	if n := b.text(`SELECT count(*)::text FROM lifecycle.finding`); n != "1" {
		t.Errorf("%s findings were made of one machine", n)
	}
}

// Scenario: a sweep after the repair of all that two detectors saw ends their finding at once, whichever of the
// two opened it.
func TestAFindingOfTwoDetectorsEndsInOneSweep(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	if err := b.operate(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	b.until(id, gone)
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id) VALUES ($1, 'gpu-7', $2)`,
		node, allocation)
	report := func(workloads ...string) {
		b.pass(b.sweeper.cfg.Grace + time.Second)
		b.observed(node, id, workloads...)
		b.sweep()
	}
	subject := "node_occupied_without_allocation node " + node
	report("main")
	report("main")
	first := wantOnly(t, without(b.open(), "row_changed_outside"), subject)[0]
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.gpu_hold WHERE allocation_id = $1`, allocation)
	report("main")
	held := wantOnly(t, without(b.open(), "row_changed_outside"), subject)[0]
	if held.ID != first.ID || !strings.Contains(held.Summary, "running workloads") {
		t.Errorf("finding %s, want %s, told by the detector that sees it: %s", held.ID, first.ID, held.Summary)
	}
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id) VALUES ($1, 'gpu-7', $2)`,
		node, allocation)
	report("main")
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.gpu_hold WHERE allocation_id = $1`, allocation)
	report()
	wantOnly(t, without(b.open(), "row_changed_outside"))
	if got := b.suspected(node); len(got) != 0 {
		t.Errorf("%v still suspect the machine", got)
	}
}

// Scenario: an ended instance was refused a session and its processes were found on its host. Both are certain at once,
// by sweeps of their own; the finding ends an hour after the later of them.
func TestAWokenInstanceThatBothSweepsSeeIsOneFinding(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	subject := "ended_instance_woke instance " + id + ":7"
	var at time.Time
	if err := b.db.OwnerPool().QueryRow(t.Context(), `SELECT mesh.clock()`).Scan(&at); err != nil {
		t.Fatal(err)
	}
	b.refused(pg.RoleRecovery, &recoveryv1.InstanceRefused{
		InstanceId: ids.New(), WorkspaceId: id, Epoch: 7, NodeId: ids.New(), RemoteAddress: "192.0.2.7:1",
		RefusedAt: timestamppb.New(at), Version: 1,
	})
	b.sweepWoken()
	first := wantOnly(t, b.open(), subject)[0]
	b.world.mu.Lock()
	b.world.strays, b.world.straysAt = map[instanceOf]int{{id, 7}: 3}, at.Add(30*time.Minute)
	b.world.mu.Unlock()
	b.sweep()
	b.pass(61 * time.Minute)
	b.sweepWoken()
	held := wantOnly(t, b.open(), subject)[0]
	if held.ID != first.ID || held.Source != "boxes/process" {
		t.Errorf("finding %s of %q, want %s, that the driver's list still has", held.ID, held.Source, first.ID)
	}
	b.pass(30 * time.Minute)
	b.sweep()
	wantOnly(t, b.open())

	// The sweep of refusals is idle only once it has taken back what it saw beside another's finding.
	b.world.mu.Lock()
	b.world.straysAt = at.Add(91 * time.Minute)
	b.world.mu.Unlock()
	b.sweep()
	b.refused(pg.RoleRecovery, &recoveryv1.InstanceRefused{
		InstanceId: ids.New(), WorkspaceId: id, Epoch: 7, NodeId: ids.New(), RemoteAddress: "192.0.2.7:1",
		RefusedAt: timestamppb.New(at.Add(40 * time.Minute)), Version: 1,
	})
	b.sweepWoken()
	if got := b.suspected(id + ":7"); !slices.Equal(got, []string{"boxes/process", "woken"}) {
		t.Errorf("%v see the instance, want both", got)
	}
	b.pass(15 * time.Minute)
	b.sweepWoken()
	if got := b.suspected(id + ":7"); !slices.Equal(got, []string{"boxes/process"}) {
		t.Errorf("%v see the instance, want the driver's list alone", got)
	}
	wantOnly(t, b.open(), subject)
}
