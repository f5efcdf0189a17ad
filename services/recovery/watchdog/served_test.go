package watchdog_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

// TestWorkspacesHaveTheReplicaThatServesTheirNode applies events of two nodes together, step by step, and reads by
// which replica the workspaces on them count as served: those whose node is known, and those of which only the instance
// has it.
func TestWorkspacesHaveTheReplicaThatServesTheirNode(t *testing.T) {
	const (
		admitted = commonv1.SessionState_SESSION_STATE_ADMITTED
		closed   = commonv1.SessionState_SESSION_STATE_CLOSED
	)
	k := newKit(t)
	nodes := [2]string{ids.New(), ids.New()}
	sessions := [2][2]string{{ids.New(), ids.New()}, {ids.New(), ids.New()}} // of each node, by generation
	one, two := ids.New(), ids.New()                                         // replicas
	pool := k.db.Pool(pg.RoleRecovery)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(k.ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	workspace := func(node *string) string {
		t.Helper()
		id := ids.New()
		exec(`INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch,
			run_id, node_id, placement, register_failures, last_error_code, last_error)
			VALUES ($1, 1, $1, 'acme', 'w', 'active', mesh.clock(), 1, '', $2, '', 0, '', '')`, id, node)
		return id
	}
	var known, launched [2]string // workspaces, by node
	for i := range nodes {
		known[i], launched[i] = workspace(&nodes[i]), workspace(nil)
		exec(`INSERT INTO recovery.watch_instance (workspace_id, epoch, version, instance_id, state, placement, node_id)
			VALUES ($1, 1, 1, $2, 'live', '', $2)`, launched[i], nodes[i])
	}
	version := int64(0)
	event := func(node, generation int, state commonv1.SessionState, late bool, replica string) events.Record {
		t.Helper()
		version++
		raw, err := protojson.Marshal(&nodev1.SessionChanged{
			SessionId: sessions[node][generation-1], NodeId: nodes[node], ReplicaId: replica, Generation: int64(generation),
			State: state, Late: late,
		})
		k.must(err)
		return events.Record{Kind: "session.changed", AggregateVersion: version, Stored: raw, CreatedAt: k.now()}
	}
	for _, step := range []struct {
		name string
		list []events.Record
		want [2]string // replicas, by node
	}{
		{
			"admitted",
			[]events.Record{event(0, 1, admitted, false, one), event(1, 1, admitted, false, two)},
			[2]string{one, two},
		},
		{"late", []events.Record{event(0, 1, admitted, true, one)}, [2]string{"", two}},
		{"heard again", []events.Record{event(0, 1, admitted, false, one)}, [2]string{one, two}},
		{
			"one superseded, one over",
			[]events.Record{event(0, 2, admitted, false, two), event(1, 1, closed, false, two)},
			[2]string{two, ""},
		},
		{
			"the superseded one is over",
			[]events.Record{event(0, 1, closed, false, one), event(1, 2, admitted, false, one)},
			[2]string{two, one},
		},
		{
			"both over",
			[]events.Record{event(0, 2, closed, false, two), event(1, 2, closed, false, one)},
			[2]string{"", ""},
		},
	} {
		k.must(pg.InTx(k.ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			return watchdog.Together(ctx, tx, step.list)
		}))
		for i := range nodes {
			for _, id := range []string{known[i], launched[i]} {
				var got string
				k.must(pool.QueryRow(k.ctx, `SELECT COALESCE(served_by::text, '') FROM recovery.watch_workspace
					WHERE workspace_id = $1`, id).Scan(&got))
				if got != step.want[i] {
					t.Errorf("%s: a workspace on node %d is served by %q, want %q", step.name, i+1, got, step.want[i])
				}
			}
		}
	}
	// A session that is removed while it serves serves its node no longer.
	k.must(pg.InTx(k.ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		return watchdog.Together(ctx, tx, []events.Record{event(0, 2, admitted, false, one)})
	}))
	exec(`DELETE FROM recovery.watch_session`)
	var served int
	k.must(pool.QueryRow(k.ctx, `SELECT count(served_by) FROM recovery.watch_workspace`).Scan(&served))
	if served != 0 {
		t.Errorf("%d workspaces are served by a session that is gone", served)
	}
}
