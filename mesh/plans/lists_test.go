package plans_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/plans"
)

// TestTheMachinesOfATenantAreReadWithoutThoseOfOthers: a list of one tenant's machines reads as much among 3,000
// machines as among 300.
func TestTheMachinesOfATenantAreReadWithoutThoseOfOthers(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	all := pg.Statements()
	at := slices.IndexFunc(all, func(s *pg.Statement) bool {
		return s.Name() == "view.list_nodes" && strings.Contains(s.SQL(), "n.tenant_id = $3") &&
			strings.HasSuffix(s.SQL(), "LIMIT $4")
	})
	if at < 0 {
		t.Fatal("there is no list of one tenant")
	}
	const mine = 100
	var first int64
	for _, machines := range []int{300, 3000} {
		if _, err := db.OwnerPool().Exec(ctx, `TRUNCATE readmodel.node, readmodel.gate, readmodel.session`); err != nil {
			t.Fatal(err)
		}
		if _, err := db.OwnerPool().Exec(ctx,
			`INSERT INTO readmodel.node (node_id, version, name, state, tenant_id, body)
				SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 1, 'box-' || md5(n::text), 'active',
					('00000000-0000-7000-9000-' || lpad((n % ($1::int / 100))::text, 12, '0'))::uuid, '{}'
						FROM generate_series(1, $1::int) n`, machines,
		); err != nil {
			t.Fatal(err)
		}
		for _, sql := range []string{
			`INSERT INTO readmodel.gate (node_id, version, body) SELECT n.node_id, 1, '{}' FROM readmodel.node n`,
			`INSERT INTO readmodel.session (session_id, node_id, version, generation, state, serving, since, body)
				SELECT n.node_id, n.node_id, 1, 1, 'admitted', true, now(), '{}' FROM readmodel.node n`,
			`VACUUM ANALYZE readmodel.node, readmodel.gate, readmodel.session`,
		} {
			if _, err := db.OwnerPool().Exec(ctx, sql); err != nil {
				t.Fatal(err)
			}
		}
		cost, err := plans.Explain(ctx, db.Pool(pg.RoleReadmodel), all[at],
			[]string{"now()", "'15 s'", "'00000000-0000-7000-9000-000000000001'", "500"})
		if err != nil {
			t.Fatal(err)
		}
		if cost.Returned != mine {
			t.Fatalf("the list has %d machines, want %d", cost.Returned, mine)
		}
		if first == 0 {
			first = cost.Rows
		}
		if cost.Rows != first || cost.Rows > 5*mine {
			t.Errorf("%d machines of %d take %d rows, and %d of 300:\n%s", mine, machines, cost.Rows, first, cost.Plan)
		}
	}
}
