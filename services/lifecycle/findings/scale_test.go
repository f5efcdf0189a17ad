package findings

import (
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

var passedOn = regexp.MustCompile(`actual rows=(\d+) loops=(\d+)|Rows Removed by [^:]*: (\d+)`)

// passes returns how many rows the nodes of a plan passed on or threw away.
func passes(plan string) int {
	sum := 0
	for _, node := range passedOn.FindAllStringSubmatch(plan, -1) {
		rows, _ := strconv.Atoi(node[1])
		loops, _ := strconv.Atoi(node[2])
		removed, _ := strconv.Atoi(node[3])
		sum += rows*loops + removed
	}
	return sum
}

// crowd copies one active workspace many times, each copy with its allocation, devices, claims and handle; half as many
// have been decommissioned.
func (b *bed) crowd(id string, many int) {
	b.t.Helper()
	conn, err := b.db.OwnerPool().Acquire(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	defer conn.Release()
	for _, sql := range []string{
		`CREATE TEMP TABLE crowd AS SELECT i, gen_random_uuid() AS id, gen_random_uuid() AS allocation,
			gen_random_uuid() AS node,
			i % 3 = 0 AS over FROM generate_series(1, $2::int) i WHERE $1::text <> ''`,
		`INSERT INTO lifecycle.workspace
			SELECT (jsonb_populate_record(w, jsonb_build_object('id', c.id, 'name', 'n' || c.id, 'run_id', NULL, 'node_id',
			c.node,
			'state', CASE WHEN c.over THEN 'decommissioned' ELSE 'active' END))).* FROM lifecycle.workspace w, crowd c
				WHERE w.id = $1::uuid AND $2::int > 0`,
		`INSERT INTO lifecycle.allocation
			SELECT (jsonb_populate_record(a, jsonb_build_object('allocation_id', c.allocation, 'workspace_id', c.id, 'node_id',
			c.node,
			'state', CASE WHEN c.over THEN 'released' ELSE 'active' END, 'occupancy', CASE WHEN c.over THEN 'none' ELSE 'in_use'
				END))).*
			FROM lifecycle.allocation a, crowd c WHERE a.workspace_id = $1::uuid AND $2::int > 0`,
		`INSERT INTO lifecycle.gpu_hold SELECT c.node, 'gpu-0', c.allocation FROM crowd c
			WHERE NOT c.over AND $1::text <> '' AND $2::int > 0`,
		`INSERT INTO lifecycle.resource_claim
			SELECT (jsonb_populate_record(r, jsonb_build_object('id', gen_random_uuid(), 'workspace_id', c.id,
			'released_at', CASE WHEN c.over THEN mesh.clock() END, 'deterministic_name', r.deterministic_name || c.id))).*
			FROM lifecycle.resource_claim r, crowd c WHERE r.workspace_id = $1::uuid AND $2::int > 0`,
		`INSERT INTO lifecycle.workspace_handle
			SELECT (jsonb_populate_record(h, jsonb_build_object('workspace_id', c.id, 'handle', h.handle || c.id))).*
			FROM lifecycle.workspace_handle h, crowd c WHERE h.workspace_id = $1::uuid AND NOT c.over AND $2::int > 0`,
		`INSERT INTO lifecycle.instance
			SELECT (jsonb_populate_record(x, jsonb_build_object('instance_id', gen_random_uuid(), 'workspace_id', c.id,
			'node_id', c.node, 'state', CASE WHEN c.over THEN 'ended' ELSE x.state END))).*
			FROM lifecycle.instance x, crowd c WHERE x.workspace_id = $1::uuid AND $2::int > 0`,
	} {
		if _, err := conn.Exec(b.t.Context(), sql, id, many); err != nil {
			b.t.Fatalf("%s: %v", sql, err)
		}
	}
	for _, sql := range []string{
		`DROP TABLE crowd`,
		`ANALYZE lifecycle.workspace, lifecycle.saga_run, lifecycle.allocation, lifecycle.gpu_hold,
		lifecycle.resource_claim, lifecycle.workspace_handle, lifecycle.instance`,
	} {
		if _, err := conn.Exec(b.t.Context(), sql); err != nil {
			b.t.Fatal(err)
		}
	}
}

// TestTheDetectorOfRecordsGrowsWithTheFleet checks that the statements read in proportion: three times the workspaces
// are three times the rows read, and not nine.
func TestTheDetectorOfRecordsGrowsWithTheFleet(t *testing.T) {
	b := newBed(t, Config{})
	id := b.live("one")
	b.numbered()
	measure := func() map[string]int {
		out := map[string]int{}
		for _, st := range []struct {
			name string
			args []any
		}{
			{"detect.contradictions", []any{scan.BeforeIDs, scan.LastID}},
			{"detect.claimed_schemas", []any{scan.BeforeIDs, scan.LastID, true}},
			{"detect.schemas_given_up", nil},
		} {
			all := pg.Statements()
			at := slices.IndexFunc(all, func(s *pg.Statement) bool { return s.Name() == st.name })
			if at < 0 {
				t.Fatalf("no statement %s", st.name)
			}
			out[st.name] = passes(b.plan(all[at].SQL(), st.args...))
		}
		return out
	}
	b.crowd(id, 600)
	few := measure()
	b.crowd(id, 1200)
	many := measure()
	for name, n := range many {
		if n > 5*few[name]+1000 {
			t.Errorf("%s passes %d rows on of 600 workspaces, and %d of 1,800", name, few[name], n)
		}
	}
	t.Logf("600: %v, 1,800: %v", few, many)
}
