package findings

import (
	"strings"
	"testing"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// observedStorage reports the workspace's workload and the directories that the agent has of it; nil as an agent that
// does not report directories.
func (b *bed) observedStorage(node, workspaceID, workload string, storage *nodev1.StorageReport) {
	b.t.Helper()
	b.observe(node, &nodev1.Observation{
		WorkspaceId: workspaceID, Storage: storage,
		Workloads: []*nodev1.WorkloadStatus{{Name: workload, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING}},
	})
}

// TestAnIdentityThatIsClaimedAndRetired finds the claim of a workspace that works while recovery has retired its
// instance's identity, or knows none.
func TestAnIdentityThatIsClaimedAndRetired(t *testing.T) {
	for name, take := range map[string]func(b *bed, node string){
		"recovery has retired it": func(b *bed, node string) {
			_, err := b.world.gates.ApplyFence(t.Context(),
				&lifecyclev1.ApplyFenceRequest{NodeId: node, FenceEpoch: 2, Retired: true})
			if err != nil {
				b.t.Fatal(err)
			}
		},
		"no node has it": func(b *bed, node string) {
			b.as(pg.RoleOwner, `DELETE FROM lifecycle.node_gate WHERE node_id = $1`, node)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			id := b.live("one")
			wantOnly(t, b.seen())
			node := b.text(`SELECT node_id::text FROM lifecycle.instance WHERE workspace_id = $1`, id)
			claim := b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'identity'`, id)
			take(b, node)
			f := wantOnly(t, b.seen(), "claim_without_resource claim "+claim)[0]
			if f.Severity != finding.P1 || f.WorkspaceID != id || f.TenantID == "" || f.NodeID != node ||
				f.NextAction != detect.NextClaimEmpty ||
				!strings.Contains(f.Summary, name) {
				t.Errorf("got %+v", f)
			}
			// The decommission releases the claim, and the finding ends.
			if err := b.operate(t.Context(), kDecommission, id); err != nil {
				t.Fatal(err)
			}
			b.until(id, gone)
			wantOnly(t, b.seen())
		})
	}
}

// TestAStorageDirectoryThatWasWiped finds the claim on a directory that is missing in the report of an agent which
// reports directories.
func TestAStorageDirectoryThatWasWiped(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	allocation := b.text(`SELECT allocation_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	workload := b.text(`SELECT deterministic_name FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind = 'workload'`, id)
	claim := b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'storage'`, id)
	sweepTwice := func(storage *nodev1.StorageReport) map[string]finding.Row {
		for range 2 {
			b.pass(time.Minute + time.Second)
			b.observedStorage(node, id, workload, storage)
			b.sweep()
		}
		return b.open()
	}
	b.observedStorage(node, id, workload, &nodev1.StorageReport{}) // too soon after the claim to count
	wantOnly(t, b.seen())
	wantOnly(t, sweepTwice(nil))
	wantOnly(t, sweepTwice(&nodev1.StorageReport{Names: []string{"data"}}))
	f := wantOnly(t, sweepTwice(&nodev1.StorageReport{Names: []string{"other"}}), "claim_without_resource claim "+claim)[0]
	if f.Severity != finding.P1 || f.WorkspaceID != id || f.NodeID != node || f.AllocationID != allocation ||
		f.NextAction != detect.NextStorageGone ||
		f.Before["directory"] != "/boxes/data" || f.After["reported_at"] == nil {
		t.Errorf("got %+v", f)
	}
	if f.After[finding.Emptied] != false {
		t.Errorf("a machine with another directory and a workload counts as emptied: %+v", f)
	}
	wantOnly(t, sweepTwice(&nodev1.StorageReport{Names: []string{"data"}}))
}

// TestAMachineThatHasNothingOfAWorkspace checks that each claim on such a machine is a finding, which reports that
// nothing is left.
func TestAMachineThatHasNothingOfAWorkspace(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	node := b.text(`SELECT node_id::text FROM lifecycle.allocation WHERE workspace_id = $1`, id)
	claim := func(kind string) string {
		return "claim_without_resource claim " +
			b.text(`SELECT id::text FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = $2`, id, kind)
	}
	for range 2 {
		b.pass(time.Minute + time.Second)
		b.observe(node, &nodev1.Observation{WorkspaceId: id, Epoch: 1, Storage: &nodev1.StorageReport{}})
		b.sweep()
	}
	for _, f := range wantOnly(t, b.open(), claim("storage"), claim("workload")) {
		if f.After[finding.Emptied] != true {
			t.Errorf("got %+v", f)
		}
	}
	e := testkit.Events(t, b.db.Pool(pg.RoleLifecycle), `kind = 'finding.changed'`)
	f := &lifecyclev1.Finding{}
	if err := e[0].Decode(f); err != nil || !f.GetEmptied() {
		t.Errorf("announced as %v (%v)", f, err)
	}
}
