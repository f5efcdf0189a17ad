package operation

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
)

// claimRow is a claim as a person lists it.
type claimRow struct {
	Kind, Name, Ref string
	Epoch           int64
	Confirmed       bool
	// Announced reports whether the newest event about the claim has it confirmed.
	Announced bool
	ID        string
}

func (p *cluster) claims(workspaceID, which string) []claimRow {
	p.t.Helper()
	rows, err := p.db.Pool(pg.RoleLifecycle).Query(testkit.Context(p.t), `
		SELECT c.kind, c.deterministic_name, c.external_ref, c.epoch, c.confirmed_at IS NOT NULL, false, c.id::text
		FROM lifecycle.resource_claim c
			WHERE c.workspace_id = $1 AND `+which+` ORDER BY c.epoch, c.kind, c.deterministic_name`, workspaceID)
	if err != nil {
		p.t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowToStructByPos[claimRow])
	if err != nil {
		p.t.Fatal(err)
	}
	for i, c := range out {
		for _, e := range testkit.Events(p.t, p.db.Pool(pg.RoleLifecycle), `aggregate_type = 'claim' AND aggregate_id = $1`,
			c.ID) {
			out[i].Announced = e.Text("confirmed_at") != ""
		}
		out[i].ID = ""
	}
	return out
}

// TestEveryClaimOfWhatStandsIsConfirmed checks that the confirmed claims of a workspace that works are those of its
// resources, also after its recreation, and that none is left after its end.
func TestEveryClaimOfWhatStandsIsConfirmed(t *testing.T) {
	for _, where := range []commonv1.PlacementDriver{byProcess, byStatic} {
		t.Run(fmt.Sprint(where), func(t *testing.T) {
			p := newCluster(t, clusterConfig{seats: 1, lease: 5 * time.Second})
			if where == byStatic {
				p.machine("m1")
			}
			id := p.create(p.tenant(), "demo", where)
			kinds := []string{
				allocation.KindHandle, allocation.KindInstance, allocation.KindSchema, allocation.KindSlot,
				allocation.KindStorage, allocation.KindWorkload,
			}
			if where == byProcess {
				kinds = append(kinds, allocation.KindIdentity)
			}
			for epoch := int64(1); epoch <= 2; epoch++ {
				var have []string
				for _, c := range p.claims(id, `c.released_at IS NULL`) {
					if have = append(have, c.Kind); !c.Confirmed || !c.Announced || c.Ref == "" || c.Epoch != epoch {
						t.Errorf("in epoch %d the claim is %+v", epoch, c)
					}
				}
				slices.Sort(have)
				if want := slices.Sorted(slices.Values(kinds)); !slices.Equal(slices.Compact(have), want) {
					t.Errorf("epoch %d has claims on %q, not on %q", epoch, have, want)
				}
				if epoch == 1 {
					if _, err := p.seats[0].ask(t.Context(), commonv1.OperationKind_OPERATION_KIND_RECREATE, id); err != nil {
						t.Fatal(err)
					}
					p.rests(id, "active")
				}
			}
			if _, err := p.seats[0].ask(t.Context(), commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, id); err != nil {
				t.Fatal(err)
			}
			p.rests(id, "decommissioned")
			if left := p.claims(id, `c.released_at IS NULL`); len(left) > 0 {
				t.Errorf("a decommissioned workspace claims %+v", left)
			}
		})
	}
}

// TestClaimsOfEarlierBuildsAreConfirmed changes the claims to those that earlier builds wrote: intended, though their
// resources stand. The sweep confirms each of these, and no other.
func TestClaimsOfEarlierBuildsAreConfirmed(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 5 * time.Second})
	p.machine("m1")
	tenant := p.tenant()
	var works []string
	for name, where := range map[string]commonv1.PlacementDriver{"one": byProcess, "two": byStatic} {
		works = append(works, p.create(tenant, name, where))
	}
	gone := p.create(tenant, "gone", byProcess)
	if _, err := p.seats[0].ask(t.Context(), commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, gone); err != nil {
		t.Fatal(err)
	}
	p.rests(gone, "decommissioned")
	// Claims of resources that have ended: one that was never released, one that was given up, and one that was released.
	for _, sql := range []string{
		`UPDATE lifecycle.resource_claim SET confirmed_at = NULL, external_ref = '' WHERE kind IN ('slot', 'identity')`,
		`UPDATE lifecycle.resource_claim SET released_at = NULL WHERE kind = 'slot' AND workspace_id = '` + gone + `'`,
		`UPDATE lifecycle.resource_claim SET released_at = NULL, orphaned_at = mesh.clock()
			WHERE kind = 'identity' AND workspace_id = '` + gone + `'`,
	} {
		if _, err := p.db.OwnerPool().Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	announced := 0
	confirmer := &allocation.ClaimConfirmer{
		Logger: testkit.Logger(t), DB: p.db.Pool(pg.RoleLifecycle),
		Committed: func() { announced++ },
	}
	if n, err := confirmer.Sweep(t.Context()); err != nil || n != 3 || announced != 1 {
		t.Fatalf("%d claims are confirmed, in %d commits, not 3 in one: %v", n, announced, err)
	}
	for _, id := range works {
		for _, c := range p.claims(id, `c.released_at IS NULL AND c.kind IN ('slot', 'identity')`) {
			if !c.Confirmed || !c.Announced || c.Ref == "" {
				t.Errorf("the claim is %+v", c)
			}
		}
	}
	for _, c := range p.claims(gone, `c.kind IN ('slot', 'identity')`) {
		if c.Confirmed {
			t.Errorf("what it claims has ended, and it is confirmed: %+v", c)
		}
	}
	if n, err := confirmer.Sweep(t.Context()); err != nil || n != 0 {
		t.Errorf("the second sweep confirms %d: %v", n, err)
	}
}
