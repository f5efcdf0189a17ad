package findings

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// stands gives a node a session at a live replica, as of ten minutes ago.
func (b *bed) stands(node, replica string) {
	b.t.Helper()
	b.as(pg.RoleLifecycle, `UPDATE lifecycle.node_gate
		SET session_open = true, replica_id = $2, session_ready_at = mesh.clock() - interval '10 minutes'
		WHERE node_id = $1`, node, replica)
	testkit.Beat(b.db, replica, "", 0, false)
}

// An agent's report is written when it changes, and counts as long as its session is open: not after the replica is
// lost, and not when it is stale.
func TestAReportCountsWhileItsSessionStands(t *testing.T) {
	b := newBed(t, Config{})
	id, replica := b.live("one"), ids.New()
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	claim := b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'workload'`, id)
	b.pass(2 * time.Minute)
	b.observed(node, id, "miner")
	want := []string{
		"claim_without_resource claim " + claim,
		"resource_without_claim workload " + node + "/" + id + "/miner",
	}
	sweeps := func() {
		t.Helper()
		for range 2 {
			b.pass(10 * time.Minute)
			b.stands(node, replica)
			b.sweep()
		}
	}
	sweeps()
	wantOnly(t, b.open(), want...)
	// The replica sends no beats: the node's reports do not count now.
	b.pass(10 * time.Minute)
	b.sweep()
	wantOnly(t, b.open())
	sweeps()
	wantOnly(t, b.open(), want...)
	b.observe(node, &nodev1.Observation{
		WorkspaceId: id, StaleSince: timestamppb.Now(),
		Workloads: []*nodev1.WorkloadStatus{{Name: "miner", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING}},
	})
	b.stands(node, replica)
	b.sweep()
	wantOnly(t, b.open())
}

// A report is kept as long as it counts, and empty ones are deleted.
func TestReportsOfSessionsThatStandAreKept(t *testing.T) {
	b := newBed(t, Config{})
	node, gone, id := ids.New(), ids.New(), ids.New()
	b.as(pg.RoleLifecycle, `INSERT INTO lifecycle.node_gate (node_id, name, fence_epoch, admitted, session_open)
		VALUES ($1, 'n', 1, true, true)`, node)
	b.observed(node, id, "main")
	b.observed(node, ids.New())
	b.observed(gone, ids.New(), "main")
	b.sweep()
	b.pass(b.sweeper.cfg.Keep + time.Hour)
	if err := b.sweeper.detect.ForgetReports(t.Context()); err != nil {
		t.Fatal(err)
	}
	if kept := b.text(`SELECT string_agg(workspace_id::text, ' ') FROM lifecycle.observed_workload`); kept != id {
		t.Errorf("kept are the reports on %s, want %s alone", kept, id)
	}
}
