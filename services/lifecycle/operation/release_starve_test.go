package operation

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/reap"
)

// stuck inserts more identities that were given up an hour ago than one sweep takes. Without a workspace each is of one
// that is not known here.
func (p *cluster) stuck(workspaceID string) {
	p.t.Helper()
	_, err := p.db.OwnerPool().Exec(p.t.Context(), `
		INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name,
			epoch, orphaned_at, orphaned_by, orphan_reason)
		SELECT gen_random_uuid(), coalesce(nullif($1, '')::uuid, gen_random_uuid()), gen_random_uuid(), gen_random_uuid(),
			1, 'identity', 'shared', gen_random_uuid()::text, 1, mesh.clock() - interval '1 hour', 'olga', 'lost'
		FROM generate_series(1, $2)`, workspaceID, reap.ReapBatch+1)
	if err != nil {
		p.t.Fatal(err)
	}
}

// Scenario: releases gave up more identities than one sweep takes. Some have to wait, since their instance is claimed;
// of others the sweep fails, since their workspace is not known here. A schema and a handle that were given up after
// them are still released by the next sweep, and an identity by one of the next.
func TestStuckOrphansKeepNoOthersFromTheirRelease(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: time.Hour})
	tenant := p.tenant()
	standing, former := p.create(tenant, "demo", byProcess), p.create(tenant, "former", byProcess)
	if _, err := p.seats[0].ask(t.Context(), kDecommission, former); err != nil {
		t.Fatal(err)
	}
	p.rests(former, "decommissioned")
	p.stuck(standing)
	schema, handle := p.given(former, allocation.KindSchema, "t_nobody_ever", 1),
		p.given(former, allocation.KindHandle, "ws-former", 1)
	if n, err := p.sharedReaper().Sweep(t.Context()); err != nil || n != 2 {
		t.Errorf("%d were released: %v; want the schema and the handle", n, err)
	}
	for _, claim := range []string{schema, handle} {
		if p.reapedWhy(claim) == "" {
			t.Error("identities keep a schema or a handle from its release")
		}
	}
	identity := p.given(former, allocation.KindIdentity, ids.New(), 1)
	if n, err := p.sharedReaper().Sweep(t.Context()); err != nil || n != 1 || p.reapedWhy(identity) == "" {
		t.Errorf("%d were released: %v; identities that wait keep another from its release", n, err)
	}

	p.stuck("")
	schema, identity = p.given(former, allocation.KindSchema, "t_nobody_else", 1),
		p.given(former, allocation.KindIdentity, ids.New(), 1)
	if _, err := p.sharedReaper().Sweep(t.Context()); err == nil || p.reapedWhy(schema) == "" {
		t.Errorf("identities whose try fails keep a schema from its release: %v", err)
	}
	if _, err := p.sharedReaper().Sweep(t.Context()); err == nil || p.reapedWhy(identity) == "" {
		t.Errorf("identities whose try fails keep another from its release: %v", err)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.orphan_try
		WHERE last_error <> '' AND next_at > mesh.clock()`); n != reap.ReapBatch+1 {
		t.Errorf("%d tries that failed are due again later, want %d", n, reap.ReapBatch+1)
	}
	// Those that wait were not tried, and are due as soon as their instance is no longer claimed.
	if n := p.count(`SELECT count(*) FROM lifecycle.orphan_try t JOIN lifecycle.resource_claim c ON c.id = t.claim_id
		WHERE c.workspace_id = $1`, standing); n != 0 {
		t.Errorf("%d that wait were put off", n)
	}
}
