package lifecycle

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
)

// endedRow is a kind of row of one cut. Its statements take the id of all rows of it as @id, and the time of its end as
// @at.
type endedRow struct {
	cut, name string
	stays     bool // whatever the term
	insert    []string
	// with are tables whose rows of the id stay with the row, and go with it, each with the column of the id.
	with [][2]string
}

const (
	insertRetiredGate = `INSERT INTO lifecycle.node_gate (node_id, name, fence_epoch, admitted, retired, retired_at)
		VALUES (@id, @id::uuid::text, 1, false, true, @at)`
	insertReport = `INSERT INTO lifecycle.observed_workload (workspace_id, node_id, payload, observed_at)
		VALUES (@id, @id, '{}', @at)`
	insertTenant = `INSERT INTO lifecycle.tenant (id, name) VALUES (@id, @id::uuid::text)`
	insertHandle = `INSERT INTO lifecycle.workspace_handle (workspace_id, handle, epoch, signal_address, reserved_names)
		VALUES (@id, @id::uuid::text, 1, '', '{}')`
	never     = `NULL::timestamptz`
	longAhead = `mesh.clock() + interval '1 year'`
	atEnd     = `@at::timestamptz`
)

// insertWorkspace returns statements for a workspace of a tenant of its own, whose present epoch is 1.
func insertWorkspace(state string) []string {
	return []string{insertTenant, `INSERT INTO lifecycle.workspace (id, tenant_id, name, state, epoch, run_id, state_at)
		VALUES (@id, @id, 'w', '` + state + `', 1, @id, @at)`}
}

func insertTask(state string) string {
	return `INSERT INTO lifecycle.task (task_id, type, node_id, state, idem_key, payload, expires_at, state_at)
		VALUES (@id, 'probe.noop', @id, '` + state + `', @id::uuid::text, '', @at, @at)`
}

func insertAllocation(state, occupancy string) string {
	return `INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state, placement, occupancy,
			node_id, state_at)
		VALUES (@id, @id, @id, 1, '` + state + `', 'static', '` + occupancy + `', @id, @at)`
}

func insertInstance(state, ended string) string {
	return `INSERT INTO lifecycle.instance (instance_id, workspace_id, tenant_id, epoch, state, placement, ended_at)
		VALUES (@id, @id, @id, 1, '` + state + `', 'process', ` + ended + `)`
}

func insertClaim(orphaned, released string) string {
	return `INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope,
			deterministic_name, epoch, node_id, orphaned_at, released_at)
		VALUES (@id, @id, @id, @id, 0, 'storage', 'node_local', 'n', 1, @id, ` + orphaned + `, ` + released + `)`
}

func insertFinding(resolved string) string {
	return `INSERT INTO lifecycle.finding (finding_id, kind, severity, subject_type, subject_id, source, workspace_id,
			summary, next_action, first_seen_at, resolved_at, evidence)
		VALUES (@id, 'row_changed_outside', 'p1', 'workspace', @id::uuid::text, 's', @id, 's', 'n', @at, ` + resolved + `,
			ARRAY(SELECT e.evidence_id FROM lifecycle.row_evidence e WHERE e.row_id = @id))`
}

func insertUnaccounted(state, ended string) string {
	return `INSERT INTO lifecycle.unaccounted_instance (instance_id, workspace_id, epoch, state, placement, provider_id,
			seen_at, ended_at)
		VALUES (@id, @id, 1, '` + state + `', 'process', 'p', @at, ` + ended + `)`
}

const (
	// byHand changes a workspace as a session does that is not the product's, which leaves evidence.
	byHand = `WITH hand AS (SELECT set_config('gpuaas.writer', '', true) AS writer)
		UPDATE lifecycle.workspace w SET last_error = 'mine' FROM hand WHERE w.id = @id AND hand.writer = ''`
	settleEvidence = `INSERT INTO lifecycle.row_evidence_settled (evidence_id, how, settled_at)
		SELECT e.evidence_id, 'acknowledged', @at FROM lifecycle.row_evidence e WHERE e.row_id = @id`
)

var (
	ofGate      = [][2]string{{"observed_workload", "node_id"}, {"node_room", "node_id"}}
	ofWorkspace = [][2]string{{"workspace_handle", "workspace_id"}, {"observed_workload", "workspace_id"}}
	over        = insertWorkspace("decommissioned")
	stands      = insertWorkspace("active")
	changed     = append(insertWorkspace("active"), byHand)
)

// gateRows returns the statements for the gate of a retired node, for a workspace, and for what there is beside them.
func gateRows(beside ...string) []string {
	return slices.Concat(stands, []string{insertRetiredGate, insertReport}, beside)
}

// goneRows returns the statements for a decommissioned workspace and for what there is beside it.
func goneRows(beside ...string) []string {
	return slices.Concat(over, []string{insertHandle, insertReport}, beside)
}

// rowsOfTerms are kinds of rows that have a term, of the cuts and conditions that no life of a workspace has.
var rowsOfTerms = []endedRow{
	{cut: "gates", name: "retired", with: ofGate, insert: gateRows()},
	{cut: "gates", name: "retired, with what has ended", with: ofGate, insert: gateRows(
		insertTask("succeeded"), insertAllocation("released", "none"), insertClaim(atEnd, atEnd),
	)},
	{cut: "gates", name: "not retired", stays: true, with: ofGate, insert: gateRows(
		`UPDATE lifecycle.node_gate SET retired = false WHERE node_id = @id`,
	)},
	{cut: "gates", name: "retired, with a session", stays: true, with: ofGate, insert: gateRows(
		`UPDATE lifecycle.node_gate SET session_open = true WHERE node_id = @id`,
	)},
	{cut: "gates", name: "retired, with a session since", stays: true, with: ofGate, insert: gateRows(
		`UPDATE lifecycle.node_gate SET session_ready_at = ` + longAhead + ` WHERE node_id = @id`,
	)},
	{cut: "gates", name: "retired long after its node was made", stays: true, with: ofGate, insert: gateRows(
		`UPDATE lifecycle.node_gate SET retired_at = ` + longAhead + ` WHERE node_id = @id`,
	)},
	{cut: "gates", name: "retired, with an open task", stays: true, with: ofGate, insert: gateRows(
		insertTask("delivered"),
	)},
	{cut: "gates", name: "retired, with an allocation", stays: true, with: ofGate, insert: gateRows(
		insertAllocation("release_failed", "cleanup"),
	)},
	{cut: "gates", name: "retired, with an orphan", stays: true, with: ofGate, insert: gateRows(
		insertClaim(atEnd, never),
	)},
	{cut: "findings", name: "resolved", insert: []string{insertFinding(atEnd)}},
	{cut: "findings", name: "open", stays: true, insert: []string{insertFinding(never)}},
	{cut: "evidence", name: "settled", insert: append(slices.Clone(changed), settleEvidence)},
	{cut: "evidence", name: "settled, of a finding that is resolved", insert: append(slices.Clone(changed),
		settleEvidence, insertFinding(atEnd))},
	{cut: "evidence", name: "not settled", stays: true, insert: changed},
	{cut: "evidence", name: "settled, of an open finding", stays: true, insert: append(slices.Clone(changed),
		settleEvidence, insertFinding(never))},
	{cut: "unaccounted", name: "ended", insert: []string{insertUnaccounted("ended", atEnd)}},
	{cut: "unaccounted", name: "live", stays: true, insert: []string{insertUnaccounted("live", never)}},
	{cut: "workspaces", name: "decommissioned", with: ofWorkspace, insert: goneRows()},
	{cut: "workspaces", name: "decommissioned, with a finding that is resolved", with: ofWorkspace, insert: goneRows(
		insertFinding(longAhead),
	)},
	{cut: "workspaces", name: "decommissioned, with an open finding", stays: true, with: ofWorkspace, insert: goneRows(
		insertFinding(never),
	)},
	{cut: "workspaces", name: "decommissioned, with a slot", stays: true, with: ofWorkspace, insert: goneRows(
		`INSERT INTO lifecycle.static_placement (workspace_id, epoch, instance_id, node_id) VALUES (@id, 1, @id, @id)`,
	)},
	{cut: "allocations", name: "released", insert: append(slices.Clone(over), insertAllocation("released", "none"))},
	{cut: "allocations", name: "of an epoch before", insert: append(slices.Clone(stands),
		insertAllocation("released", "none"), `UPDATE lifecycle.workspace SET epoch = 2 WHERE id = @id`)},
	{cut: "allocations", name: "of the present epoch", stays: true, insert: append(slices.Clone(stands),
		insertAllocation("released", "none"))},
	{cut: "allocations", name: "with a device", stays: true, insert: append(slices.Clone(over),
		insertAllocation("released", "none"),
		`INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id) VALUES (@id, 'gpu-0', @id)`)},
	{cut: "instances", name: "ended", insert: append(slices.Clone(over), insertInstance("ended", atEnd))},
	{cut: "instances", name: "of the present epoch", stays: true, insert: append(slices.Clone(stands),
		insertInstance("ended", atEnd))},
}

// coveredByLives are the cuts whose rows a life of a workspace has, in every combination of states.
var coveredByLives = []string{"tasks", "claims", "runs", "operation_keys"}

// TestEachCutTakesWhatIsOver checks for each kind of rows that what is over is deleted after its term with what belongs
// to it, and not before, that what is open stays with what belongs to it, whatever the term, and that in rollback mode
// everything stays.
func TestEachCutTakesWhatIsOver(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleLifecycle)
	testkit.SetClockOffset(db, 1000*time.Hour)
	type placed struct {
		endedRow
		id    string
		young bool
	}
	put := func(row endedRow, age time.Duration) placed {
		t.Helper()
		var at time.Time
		var id string
		err := pool.QueryRow(ctx, `SELECT c.at, overlay(mesh.first_id(c.at)::text PLACING right($2, 12) FROM 25)
			FROM (SELECT mesh.clock() - make_interval(secs => $1) AS at) c`, age.Seconds(), ids.New()).Scan(&at, &id)
		if err != nil {
			t.Fatal(err)
		}
		for _, sql := range row.insert {
			if _, err := db.OwnerPool().Exec(ctx, sql, pgx.NamedArgs{"id": id, "at": at}); err != nil {
				t.Fatalf("%s, %s: %v\n%s", row.cut, row.name, err, sql)
			}
		}
		return placed{row, id, false}
	}
	var all []placed
	for _, row := range rowsOfTerms {
		young := put(row, time.Hour)
		young.young = true
		all = append(all, put(row, 100*time.Hour), young)
	}
	exists := func(table, column, id string) bool {
		t.Helper()
		var there bool
		if err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM lifecycle.`+table+` WHERE `+column+` = $1)`,
			id).Scan(&there); err != nil {
			t.Fatal(err)
		}
		return there
	}
	check := func(what string, term time.Duration, gone func(placed) bool) {
		t.Helper()
		if err := walk(ctx, pool, term); err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			of := terms[slices.IndexFunc(terms, func(of retention.Table) bool { return of.Name == p.cut })]
			tables := append([][2]string{{of.Table, of.ID}}, p.with...)
			if p.cut == "evidence" {
				tables[0] = [2]string{"row_evidence", "row_id"}
			}
			for _, table := range tables {
				if there := exists(table[0], table[1], p.id); there == gone(p) {
					t.Errorf("%s: of %s that is %s, young: %t, a row of %s is there: %t", what, p.cut, p.name, p.young,
						table[0], there)
				}
			}
		}
	}
	mode := func(state string) {
		t.Helper()
		if _, err := db.OwnerPool().Exec(ctx, `UPDATE recovery.rollback SET state = $1, since = mesh.clock()`,
			state); err != nil {
			t.Fatal(err)
		}
	}
	mode("active")
	check("in rollback mode", 0, func(placed) bool { return false })
	mode("none")
	check("after a term of 50 h", 50*time.Hour, func(p placed) bool { return !p.stays && !p.young })
	check("at once", 0, func(p placed) bool { return !p.stays })
	for _, of := range terms {
		for _, stays := range []bool{false, true} {
			if !slices.Contains(coveredByLives, of.Name) && !slices.ContainsFunc(rowsOfTerms, func(row endedRow) bool {
				return row.cut == of.Name && row.stays == stays
			}) {
				t.Errorf("%s has no row that stays: %t", of.Name, stays)
			}
		}
	}
}
