package gate_test

import (
	"context"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// Scenario: a finding that cordons a node ends while a release has left resources there, and later those are gone. The
// audit log has each cordon under the name of its requester, with the requester's reason, and the end under the last.
func TestACordonThatPassesIsAuditedAsItsNewRequesters(t *testing.T) {
	const finding = "finding:one"
	k := newKit(t)
	node, claim := k.node(), ids.New()
	k.tx(func(ctx context.Context, tx pgx.Tx) error { return gate.CordonFor(ctx, tx, node, "occupied", finding) })
	if _, err := k.pool.Exec(k.ctx, `INSERT INTO lifecycle.resource_claim
		(id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name, epoch, node_id, orphaned_at)
		VALUES ($1, $1, $1, $1, 1, 'storage', 'node_local', 'left', 1, $2, mesh.clock())`, claim, node); err != nil {
		t.Fatal(err)
	}
	k.tx(func(ctx context.Context, tx pgx.Tx) error { return gate.EndCordonOf(ctx, tx, node, finding) })
	if g := k.get(node); !g.Cordoned || g.CordonedBy != gate.Release {
		t.Fatalf("the node is cordoned: %t, by %q; want by %q", g.Cordoned, g.CordonedBy, gate.Release)
	}
	if _, err := k.pool.Exec(k.ctx, `UPDATE lifecycle.resource_claim SET released_at = mesh.clock() WHERE id = $1`,
		claim); err != nil {
		t.Fatal(err)
	}
	k.tx(func(ctx context.Context, tx pgx.Tx) error { return gate.EndCordonOf(ctx, tx, node, gate.Release) })
	var got []string
	for _, e := range testkit.Events(t, k.pool, `kind = $1 AND node_id = $2`, audit.Kind, node) {
		got = append(got, e.Text("action")+" by "+e.Text("actor")+": "+e.Text("reason"))
	}
	want := []string{
		"node.cordon by finding:one: occupied",
		"node.cordon by release: what a release gave up is still here: storage left",
		"node.uncordon by release: ",
	}
	if !slices.Equal(got, want) {
		t.Errorf("entries: %q, want %q", got, want)
	}
}
