package operation

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
)

// Scenario: register-401-no-live-token. The reason with which recovery refuses an instance is shown on its workspace
// until the instance is admitted, and no longer.
func TestRefusedRegistersStandOnTheWorkspaceUntilItsInstanceRegisters(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	reported := func(node string, fence, epoch int64, count int32, why string) {
		t.Helper()
		_, err := p.world.gates.ApplyFence(t.Context(), &lifecyclev1.ApplyFenceRequest{
			NodeId: node, FenceEpoch: fence, Admitted: true, InstanceId: ids.New(), WorkspaceId: id, Epoch: epoch,
			RegisterFailures: count, RegisterError: why,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	shows := func(what string, count int, code, why string) {
		t.Helper()
		if w := p.workspace(id); w.RegisterFailures != count || w.LastErrorCode != code || w.LastError != why {
			t.Errorf("%s: %d refusals, %q %q; want %d, %q %q", what, w.RegisterFailures, w.LastErrorCode, w.LastError, count,
				code, why)
		}
	}
	node := p.workspace(id).NodeID
	reported(node, 1, 1, 3, "mint_consumed")
	shows("while its box has a session", 0, "", "")
	// The session of the instance has ended: now its refusals are the reason why no task is done.
	if _, err := p.db.Pool(pg.RoleLifecycle).Exec(t.Context(),
		`UPDATE lifecycle.node_gate SET session_open = false WHERE node_id = $1`, node); err != nil {
		t.Fatal(err)
	}
	reported(node, 1, 1, 3, "mint_consumed")
	shows("without a session", 3, "register_failing", "mint_consumed")
	reported(node, 1, 1, 2, "mint_consumed")
	shows("told late", 3, "register_failing", "mint_consumed")
	reported(ids.New(), 9, 7, 9, "epoch_superseded")
	shows("of another epoch", 3, "register_failing", "mint_consumed")
	reported(node, 2, 1, 0, "")
	shows("once it has registered", 0, "", "")
	reported(node, 2, 1, 1, "mint_consumed")
	shows("refused again", 1, "register_failing", "mint_consumed")
	err := pg.InTx(t.Context(), p.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		return allocation.Registrations{Wakes: p.seats[0].core.Wakes}.Registered(ctx, tx, id, 1)
	})
	if err != nil {
		t.Fatal(err)
	}
	shows("with a session", 0, "", "")
}
