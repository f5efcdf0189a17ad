package gate_test

import (
	"fmt"
	"slices"
	"testing"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// allocated makes a workspace with one allocation.
func (k *kit) allocated(tenant, state, placement string, epoch int64, node, slot any) string {
	k.t.Helper()
	id := ids.New()
	occupancy := map[string]string{"released": "none", "release_failed": "cleanup"}[state]
	if occupancy == "" {
		occupancy = "in_use"
	}
	for _, statement := range []struct {
		sql  string
		args []any
	}{
		{
			`INSERT INTO lifecycle.workspace (id, tenant_id, name, state, epoch) VALUES ($1, $2, $3, 'active', $4)`,
			[]any{id, tenant, id, epoch},
		},
		{
			`INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state, placement, node_id, slot,
				occupancy)
				VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)`,
			[]any{ids.New(), id, tenant, epoch, state, placement, node, slot, occupancy},
		},
	} {
		if _, err := k.db.OwnerPool().Exec(k.ctx, statement.sql, statement.args...); err != nil {
			k.t.Fatal(err)
		}
	}
	return id
}

// TestASessionGetsWhatMayRun: a workspace with a slot of the machine, or the epoch that an instance was launched for,
// while its allocation lasts; none that was released or was never there.
func TestASessionGetsWhatMayRun(t *testing.T) {
	k := newKit(t)
	tenant := ids.New()
	if _, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 'acme')`,
		tenant); err != nil {
		t.Fatal(err)
	}
	machine, other := k.node(), k.node()
	want := []string{
		k.allocated(tenant, "active", "static", 3, machine, 0) + "/3",
		k.allocated(tenant, "allocating", "static", 1, machine, 1) + "/1",
	}
	k.allocated(tenant, "releasing", "static", 1, machine, 2)
	k.allocated(tenant, "release_failed", "static", 1, machine, 3)
	k.allocated(tenant, "released", "static", 1, machine, 0)
	k.allocated(tenant, "active", "static", 1, other, 0)
	instance := func(workspace string, epoch int64) string {
		t.Helper()
		id := ids.New()
		_, err := k.server.ApplyFence(k.ctx, &lifecyclev1.ApplyFenceRequest{
			NodeId: id, FenceEpoch: 1, Admitted: true, Name: id, InstanceId: ids.New(), WorkspaceId: workspace, Epoch: epoch,
		})
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	launched := k.allocated(tenant, "active", "process", 2, nil, nil)
	present, former := instance(launched, 2), instance(launched, 1)

	slices.Sort(want)
	results := k.ready(ids.New(), session(machine, ids.New(), 1), session(present, ids.New(), 1),
		session(former, ids.New(), 1))
	for i, want := range [][]string{want, {launched + "/2"}, nil} {
		var got []string
		for _, e := range results[i].GetMayRun() {
			got = append(got, fmt.Sprintf("%s/%d", e.GetWorkspaceId(), e.GetEpoch()))
		}
		if slices.Sort(got); !slices.Equal(got, want) || !results[i].GetRunListed() {
			t.Errorf("session %d may run %v, listed %t; want %v", i, got, results[i].GetRunListed(), want)
		}
	}
}
