package fleet

import (
	"slices"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/plans"
)

// TestAPageThatASmallFleetDoesNotFillIsNoGrowth: a list or a sweep that returns or reads 500 rows of a large fleet and
// all 100 of a small one costs five times as much, and no more with a larger one.
func TestAPageThatASmallFleetDoesNotFillIsNoGrowth(t *testing.T) {
	named := func(name string) *pg.Statement {
		all := pg.Statements()
		return all[slices.IndexFunc(all, func(s *pg.Statement) bool { return s.Name() == name })]
	}
	list, page, whole := named("view.list_nodes"), named("detect.forget_reports"), named("tenants.usage_within")
	for _, tt := range []struct {
		name      string
		statement *pg.Statement
		few, many figure
		flat      bool
	}{
		{
			name: "a page that is full", statement: list, few: figure{buffers: 5000, returned: 500},
			many: figure{buffers: 5100, returned: 500}, flat: true,
		},
		{
			name: "a page that was not", statement: list, few: figure{buffers: 1000, returned: 100},
			many: figure{buffers: 5100, returned: 500}, flat: true,
		},
		{
			name: "a page that costs more", statement: list, few: figure{buffers: 1000, returned: 100},
			many: figure{buffers: 20000, returned: 500},
		},
		{
			name: "a page that is not full yet", statement: list, few: figure{buffers: 1000, returned: 49},
			many: figure{buffers: 10000, returned: 499},
		},
		{
			name: "an answer that grows", statement: list, few: figure{buffers: 1000, returned: 100},
			many: figure{buffers: 10000, returned: 1000},
		},
		{
			name: "an answer without a bound", statement: whole, few: figure{buffers: 1000, returned: 50},
			many: figure{buffers: 10000, returned: 500},
		},
		{
			name: "a page of a sweep", statement: page,
			few: figure{buffers: 320, rows: 100}, many: figure{buffers: 1600, rows: 500}, flat: true,
		},
		{
			name: "a page of a sweep whose rows cost more", statement: page,
			few: figure{buffers: 320, rows: 100}, many: figure{buffers: 9000, rows: 500},
		},
		{
			name: "a sweep that touches more for what it read before", statement: page,
			few: figure{buffers: 320, rows: 100}, many: figure{buffers: 1600, rows: 100},
		},
		{
			name: "a sweep that reads more than a page has", statement: page,
			few: figure{buffers: 320, rows: 100}, many: figure{buffers: 6400, rows: 2000},
		},
		{name: "a request that returns nothing", statement: list, few: figure{buffers: 320}, many: figure{buffers: 1600}},
	} {
		m := &measured{statement: tt.statement, of: []figure{tt.few, {}, tt.many}}
		if _, by := ofPages(m, plans.Size{Nodes: 100, Workspaces: 100}, 10); (by <= 0.2) != tt.flat {
			t.Errorf("%s grows by an exponent of %.2f", tt.name, by)
		}
	}
	m := &measured{statement: page, of: []figure{{buffers: 320, rows: 100}, {}, {buffers: 1600, rows: 500}}}
	if _, by := ofPages(m, plans.Size{Nodes: 100, Workspaces: 1000}, 10); by <= 0.2 {
		t.Errorf("a sweep of a fleet that fills its page grows by an exponent of %.2f", by)
	}
}
