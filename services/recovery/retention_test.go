package recovery

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
)

// endedRow is a kind of row of one cut. Its statements have the id of the row as $1, the name of its node as $2 and the
// time of its end as $3.
type endedRow struct {
	cut, name string
	stays     bool // whatever the term
	insert    []string
}

const (
	insertNode = `INSERT INTO recovery.identity (node_id, name, node_instance_id, state, state_at)
		SELECT $1::uuid, $2, $1::uuid, 'active', $3::timestamptz`
	insertRetired = `INSERT INTO recovery.identity (node_id, name, state, state_at, told, told_acked)
		SELECT $1::uuid, $2, 'retired', $3::timestamptz, 1, 1`
)

// insertSerial returns a statement for a certificate with the name of its node, whose id is that of the row.
func insertSerial(state, notAfter string) string {
	return `INSERT INTO recovery.serial (serial, node_id, node_instance_id, chain_pem, issuer_fingerprint, state, state_at,
			not_before, not_after)
		SELECT $2, $1::uuid, $1::uuid, '', '', '` + state + `', $3::timestamptz, $3::timestamptz, ` + notAfter
}

func insertToken(state, expiresAt string) string {
	return `INSERT INTO recovery.token (token_id, kind, node_id, secret_sha256, state, state_at, issued_by, expires_at)
		SELECT $1::uuid, 'launch', $1::uuid, sha256($2::bytea), '` + state + `', $3::timestamptz, '', ` + expiresAt
}

func insertEnrollment(state string) string {
	return `INSERT INTO recovery.enrollment (enrollment_id, token_id, node_id, csr_key_sha256, state, lease_until,
			ended_at)
		SELECT $1::uuid, (SELECT token_id FROM recovery.token WHERE token_id = $1), $1::uuid, sha256($2::bytea), '` + state +
		`', $3::timestamptz, $3::timestamptz`
}

func insertInstance(retired, refused string) string {
	return `INSERT INTO recovery.instance (instance_id, workspace_id, epoch, prepared_at, retired_at, refused_at)
		SELECT $1::uuid, $1::uuid, 1, $3::timestamptz, ` + retired + `, ` + refused + ` WHERE $2 <> ''`
}

func insertRecord(outcome, at string) string {
	return `INSERT INTO recovery.recovery_record (record_id, workspace_id, workspace, tenant_id, trigger, outcome, step,
			error_code, cause, detected_at, ended_at, user_impact, correlation_id, unit, placement, run_id)
		SELECT $1::uuid, $1::uuid, $2, $1::uuid, 'stalled', '` + outcome + `', '', '', '', $3::timestamptz, ` + at + `,
			'', '', '', '', ''`
}

func insertIncident(closed string) string {
	return `INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, next_action, opened_at, last_seen_at,
			closed_at)
		SELECT $1::uuid, 'churn_budget', $2, 'p1', '', '', $3::timestamptz, $3::timestamptz, ` + closed
}

func insertAction(state, at string) string {
	return `INSERT INTO recovery.recovery_action (action_id, node_id, kind, state, reason, requester, correlation_id,
			agent_correlation_id, begun_at, ended_at, fails_at, attempts, outcome, version)
		SELECT $1::uuid, $1::uuid, 'renew', '` + state + `', '', $2, '', '', $3::timestamptz, ` + at +
		`, $3::timestamptz, 1, '', 1`
}

func insertRecoveryToken(state string) string {
	return `INSERT INTO recovery.recovery_token (token_id, node_id, node_instance_id, family, profile, key_sha256, key_id,
			era, state, state_at, serial)
		SELECT $1::uuid, $1::uuid, $1::uuid, $1::uuid, '', sha256('k'), 'k', 0, '` + state + `', $3::timestamptz, $2`
}

func insertProfile(phase string) string {
	return `INSERT INTO recovery.profile (profile_id, name, number, fingerprint, api_url, recovery_url, terminal_url,
			ca_bundle, recovery_ca_bundle, phase, phase_at, phase_by, phase_reason)
		SELECT $1::uuid, $2, 1, $2, '', '', '', '', '', '` + phase + `', $3::timestamptz, '', ''`
}

const (
	atEnd  = `$3::timestamptz`
	never  = `NULL::timestamptz`
	future = `mesh.clock() + interval '1 year'`

	insertJudgement = `INSERT INTO recovery.judgement (node_id, identity_state, generation, session_version)
		SELECT $1::uuid, $2, 0, 0 WHERE $3::timestamptz IS NOT NULL`
	reportsProfile = `INSERT INTO recovery.node_profile (node_id, name, fingerprint, reported_at)
		SELECT $1::uuid, $2, $2, $3::timestamptz`
)

// ofNode are rows that go with their node.
var ofNode = []string{
	insertSerial("superseded", atEnd),
	`INSERT INTO recovery.session_open (session_id, node_id, node_instance_id, verdict, serial, fence_epoch, opened_at)
		SELECT $1::uuid, $1::uuid, $1::uuid, 'welcome', $2, 0, $3::timestamptz`,
	`INSERT INTO recovery.suspect (node_id, reason, first_at, last_at)
		SELECT $1::uuid, $2, $3::timestamptz, $3::timestamptz`,
	`INSERT INTO recovery.enrollment_attempt (node_id, outcome, reported_at, version)
		SELECT $1::uuid, $2, $3::timestamptz, 1`,
	insertJudgement, reportsProfile,
	`INSERT INTO recovery.evidence (node_id, part, source, reason, observed_at, detail, correlation_id, version)
		SELECT $1::uuid, 'host', $2, '', $3::timestamptz, '', '', 1`,
	`INSERT INTO recovery.verdict (node_id, reason, body, began, version)
		SELECT $1::uuid, $2, '', 1, 1 WHERE $3::timestamptz IS NOT NULL`,
	`INSERT INTO recovery.host_facts (node_id, node_instance_id, accepted, accepted_at, accepted_by, accept_reason,
			addresses, remotes, lacks)
		SELECT $1::uuid, $1::uuid, $2, $3::timestamptz, '', '', '{}', '{}', '{}'`,
	insertRecoveryToken("used"),
}

// rowsOfTerms are kinds of rows that have a term.
var rowsOfTerms = []endedRow{
	{cut: "enrollments", name: "done", insert: []string{insertNode, insertEnrollment("done")}},
	{cut: "enrollments", name: "abandoned", insert: []string{insertNode, insertEnrollment("abandoned")}},
	{cut: "enrollments", name: "under way", stays: true, insert: []string{insertNode, insertEnrollment("claimed")}},
	{cut: "tokens", name: "used", insert: []string{insertNode, insertToken("used", atEnd)}},
	{cut: "tokens", name: "expired", insert: []string{insertNode, insertToken("expired", atEnd)}},
	{cut: "tokens", name: "usable", stays: true, insert: []string{insertNode, insertToken("issued", atEnd)}},
	{cut: "tokens", name: "used before its time", stays: true, insert: []string{insertNode, insertToken("used", future)}},
	{cut: "tokens", name: "of an enrolment under way", stays: true, insert: []string{
		insertNode, insertToken("used", atEnd), insertEnrollment("claimed"),
	}},
	{cut: "recovery_tokens", name: "used", insert: []string{insertNode, insertRecoveryToken("used")}},
	{cut: "recovery_tokens", name: "usable", stays: true, insert: []string{insertNode, insertRecoveryToken("issued")}},
	{cut: "serials", name: "superseded", insert: []string{insertNode, insertSerial("superseded", atEnd)}},
	{cut: "serials", name: "revoked", insert: []string{insertNode, insertSerial("revoked", atEnd)}},
	{cut: "serials", name: "current", stays: true, insert: []string{insertNode, insertSerial("current", atEnd)}},
	{cut: "serials", name: "next", stays: true, insert: []string{insertNode, insertSerial("next", atEnd)}},
	{cut: "serials", name: "not expired", stays: true, insert: []string{insertNode, insertSerial("superseded", future)}},
	{cut: "serials", name: "of its node", stays: true, insert: []string{
		insertNode, insertSerial("revoked", atEnd),
		`UPDATE recovery.identity SET next_serial = $2 WHERE node_id = $1 AND state_at = $3`,
	}},
	{cut: "instances", name: "retired", insert: []string{insertInstance(atEnd, never)}},
	{cut: "instances", name: "refused since", insert: []string{insertInstance(atEnd, atEnd)}},
	{cut: "instances", name: "standing", stays: true, insert: []string{insertInstance(never, never)}},
	{cut: "instances", name: "still refused", stays: true, insert: []string{insertInstance(atEnd, future)}},
	{cut: "identities", name: "retired", insert: append([]string{insertRetired}, ofNode...)},
	{cut: "identities", name: "active", stays: true, insert: []string{insertNode}},
	{cut: "identities", name: "retired, lifecycle was not told", stays: true, insert: []string{
		insertRetired, `UPDATE recovery.identity SET told = 2 WHERE node_id = $1 AND name = $2 AND state_at = $3`,
	}},
	{cut: "identities", name: "retired, with a certificate", stays: true, insert: []string{
		insertRetired, insertSerial("revoked", future),
	}},
	{cut: "epochs", name: "without an instance", insert: []string{
		`INSERT INTO recovery.workspace_epoch (workspace_id, epoch, instance_id)
			SELECT $1::uuid, 1, $1::uuid WHERE $2 <> '' AND $3::timestamptz IS NOT NULL`,
	}},
	{cut: "epochs", name: "with an instance", stays: true, insert: []string{
		`INSERT INTO recovery.workspace_epoch (workspace_id, epoch, instance_id)
			SELECT $1::uuid, 1, $1::uuid WHERE $2 <> '' AND $3::timestamptz IS NOT NULL`, insertInstance(never, never),
	}},
	{cut: "records", name: "recovered", insert: []string{insertRecord("recovered", atEnd)}},
	{cut: "records", name: "withheld", stays: true, insert: []string{insertRecord("withheld", never)}},
	{cut: "verdict_periods", name: "ended", insert: []string{
		`INSERT INTO recovery.verdict_period (period_id, node_id, reason, severity, observed_at, detected_at, ended_at,
				correlation_id, version)
			SELECT $1::uuid, $1::uuid, $2, '', $3::timestamptz, $3::timestamptz, $3::timestamptz, '', 1`,
	}},
	{cut: "issuance_stops", name: "over", insert: []string{
		`INSERT INTO recovery.issuance_stop (stop_id, reason, from_at, until_at)
			SELECT $1::uuid, $2, $3::timestamptz, $3::timestamptz`,
	}},
	{cut: "issuance_stops", name: "lasting", stays: true, insert: []string{
		`INSERT INTO recovery.issuance_stop (stop_id, reason, from_at) SELECT $1::uuid, $2, $3::timestamptz`,
	}},
	{cut: "token_extensions", name: "over", insert: []string{
		`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by)
			SELECT $1::uuid, $2, $3::timestamptz, '', ''`,
	}},
	{cut: "token_extensions", name: "in force", stays: true, insert: []string{
		`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by, decided_at)
			SELECT $1::uuid, $2, ` + future + `, '', '', $3::timestamptz`,
	}},
	{cut: "recovery_actions", name: "ended", insert: []string{insertAction("succeeded", atEnd)}},
	{cut: "recovery_actions", name: "open", stays: true, insert: []string{insertAction("open", never)}},
	{cut: "profiles", name: "retired", insert: []string{insertProfile("retired")}},
	{cut: "profiles", name: "retiring", stays: true, insert: []string{insertProfile("retiring")}},
	{cut: "profiles", name: "retired, reported by a node", stays: true, insert: []string{
		insertProfile("retired"), insertJudgement, reportsProfile,
	}},
	{cut: "incidents", name: "closed", insert: []string{insertIncident(atEnd)}},
	{cut: "incidents", name: "open", stays: true, insert: []string{insertIncident(never)}},
}

// put writes a row that has ended an age ago, with an id of that time, and returns the id.
func (e endedRow) put(ctx context.Context, t *testing.T, db *pgxpool.Pool, age time.Duration) string {
	t.Helper()
	var at time.Time
	var id string
	err := db.QueryRow(ctx, `SELECT c.at, overlay(mesh.first_id(c.at)::text PLACING right($2, 12) FROM 25)
		FROM (SELECT mesh.clock() - make_interval(secs => $1) AS at) c`, age.Seconds(), ids.New()).Scan(&at, &id)
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range e.insert {
		if _, err := db.Exec(ctx, sql, id, e.name+" "+id, at); err != nil {
			t.Fatalf("%s, %s: %v\n%s", e.cut, e.name, err, sql)
		}
	}
	return id
}

// column returns the table of a cut, and its column with the id of the row.
func column(of retention.Table) (string, string) {
	if of.Name == "serials" {
		return "serial", "node_id"
	}
	return of.Table, of.ID
}

// TestNoTermCutsWhatIsOpen checks for each kind of rows that what is over is deleted after its term with what belongs
// to it, and not before, and that what is open stays, whatever the term.
func TestNoTermCutsWhatIsOpen(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleRecovery)
	testkit.SetClockOffset(db, 1000*time.Hour)
	type placed struct {
		endedRow
		id    string
		young bool
	}
	var all []placed
	for _, row := range rowsOfTerms {
		all = append(all, placed{row, row.put(ctx, t, pool, 100*time.Hour), false},
			placed{row, row.put(ctx, t, pool, time.Hour), true})
	}
	check := func(term time.Duration, gone func(placed) bool) {
		t.Helper()
		for _, c := range cuts {
			if _, err := pg.One[retention.Batch](ctx, pool, c.Statement, term.Seconds(),
				"00000000-0000-0000-0000-000000000000", 1000); err != nil {
				t.Fatalf("%s: %v", c.Name, err)
			}
		}
		for _, p := range all {
			table, id := column(terms[slices.IndexFunc(terms, func(of retention.Table) bool { return of.Name == p.cut })])
			var there bool
			err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM recovery.`+table+` WHERE `+id+` = $1)`, p.id).Scan(&there)
			if err != nil {
				t.Fatal(err)
			}
			if there == gone(p) {
				t.Errorf("%s after a term of %s: the row that is %s, young: %t, is there: %t", p.cut, term, p.name, p.young, there)
			}
		}
	}
	check(50*time.Hour, func(p placed) bool { return !p.stays && !p.young })
	check(0, func(p placed) bool { return !p.stays })
	for _, of := range terms {
		for _, stays := range []bool{false, true} {
			if !slices.ContainsFunc(rowsOfTerms, func(row endedRow) bool { return row.cut == of.Name && row.stays == stays }) &&
				(of.Name != "verdict_periods" || !stays) { // all of them are over
				t.Errorf("%s has no row that stays: %t", of.Name, stays)
			}
		}
	}
	retired := all[slices.IndexFunc(all, func(p placed) bool { return p.cut == "identities" && p.name == "retired" })]
	for _, table := range tablesOfNodes(ctx, t, db.OwnerPool()) {
		var left int
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM recovery.`+table+` WHERE node_id = $1`, retired.id).
			Scan(&left); err != nil || left > 0 {
			t.Errorf("%d rows of %s are left of a node that is cut: %v", left, table, err)
		}
	}
}

// tablesOfNodes returns the tables of recovery that have rows of nodes.
func tablesOfNodes(ctx context.Context, t *testing.T, db *pgxpool.Pool) []string {
	t.Helper()
	var out []string
	err := db.QueryRow(ctx, `SELECT array_agg(c.relname::text) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
		WHERE c.relnamespace = 'recovery'::regnamespace AND c.relkind = 'r' AND a.attname = 'node_id'`).Scan(&out)
	if err != nil || len(out) < 10 {
		t.Fatalf("tables with nodes: %v, %v", out, err)
	}
	return out
}
