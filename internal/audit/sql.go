package audit

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// roles are the roles that have windows, each in the schema of its name.
var roles = []string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}

// window is a row of a window after one more occurrence was counted in it.
type window struct {
	First   bool      `db:"first" expr:"@.xmax = 0"`
	Due     bool      `db:"due" expr:"@.told = @.count"`
	Count   int64     `db:"count"`
	FirstAt time.Time `db:"first_at"`
	LastAt  time.Time `db:"last_at"`
}

// passed is a row of a window whose time has passed.
type passed struct {
	Key      string    `db:"key"`
	Entry    []byte    `db:"entry"`
	Count    int64     `db:"count"`
	Reported int64     `db:"told"`
	FirstAt  time.Time `db:"first_at"`
	LastAt   time.Time `db:"last_at"`
}

var (
	closeWindows = pg.DefineByRole(roles, "audit.close_windows", func(schema string) string {
		return `
		WITH gone AS (DELETE FROM ` + schema + `.audit_window WHERE settles = $1 RETURNING count, first_at, last_at)
		INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, correlation_id,
			tenant_id, workspace_id, workflow_id, allocation_id, node_id)
		SELECT $2::uuid, $3, $4, $5, 1,
			$6::jsonb || jsonb_build_object('count', (coalesce(sum(g.count), 0) + $13::bigint)::text,
				'first_at', to_char(coalesce(min(g.first_at), mesh.clock()) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
				'last_at', to_char(coalesce(max(g.last_at), mesh.clock()) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')),
			NULLIF($7, ''), NULLIF($8, ''), NULLIF($9, ''), NULLIF($10, ''), NULLIF($11, ''), NULLIF($12, '')
		FROM gone g HAVING count(*) > 0 OR $13::bigint > 0`
	})

	countInWindow = pg.DefineByRole(roles, "audit.count_in_window", func(schema string) string {
		return `
		INSERT INTO ` + schema + `.audit_window AS w (key, settles, entry, count, told) VALUES ($1, $2, $3, $4, $4)
		ON CONFLICT (key) DO UPDATE SET count = w.count + $4, last_at = mesh.clock(),
			told = CASE WHEN w.told_at + make_interval(secs => $5) <= mesh.clock() THEN w.count + $4 ELSE w.told END,
			told_at = CASE WHEN w.told_at + make_interval(secs => $5) <= mesh.clock() THEN mesh.clock() ELSE w.told_at END
		RETURNING ` + pg.Columns[window]("w")
	})

	takePassed = pg.DefineByRole(roles, "audit.take_passed_windows", func(schema string) string {
		return `SELECT ` + pg.Columns[passed]("w") + ` FROM ` + schema + `.audit_window w
		WHERE w.told_at <= mesh.clock() - make_interval(secs => $1) ORDER BY w.told_at LIMIT $2 FOR UPDATE SKIP LOCKED`
	})

	endWindow = pg.DefineByRole(roles, "audit.end_window", func(schema string) string {
		return `DELETE FROM ` + schema + `.audit_window WHERE key = $1`
	})

	goOnWithWindow = pg.DefineByRole(roles, "audit.go_on_with_window", func(schema string) string {
		return `UPDATE ` + schema + `.audit_window SET told = count, told_at = mesh.clock() WHERE key = $1`
	})

	commitAsync = pg.DefineShared(roles, "audit.commit_async", `SET LOCAL synchronous_commit = off`)
)
