package launchlog

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// positionRow is a row of launch_log, with rollback mode.
type positionRow struct {
	LogID       string     `db:"log_id" expr:"@.log_id::text"`
	Seq         int64      `db:"seq"`
	Era         int64      `db:"era"`
	Reported    bool       `db:"reported"`
	AcceptedSeq int64      `db:"accepted_seq"`
	AcceptedAt  *time.Time `db:"accepted_at"`
	Active      bool       `db:"active" expr:"mesh.rolled_back()"`
	Present     int64      `db:"present_era" expr:"(SELECT e.era FROM mesh.era e)"`
}

// seenRow is how far a log was compared.
type seenRow struct {
	LogID string `db:"log_id" expr:"@.log_id::text"`
	Seq   int64  `db:"seq"`
}

// acceptedRow has the columns of an acceptance that the database computes.
type acceptedRow struct {
	AcceptedAt *time.Time `db:"accepted_at"`
	Era        int64      `db:"era"`
}

// launchRow is the row of one entry of a log; Place is the entry's place in the argument, from 1.
type launchRow struct {
	Place    int    `db:"place"`
	Epoch    int64  `db:"epoch"`
	Instance string `db:"instance"`
	State    string `db:"state"`
}

var (
	lockPosition = pg.Define(pg.RoleLifecycle, "launchlog.lock_position", `
		SELECT `+pg.Columns[positionRow]("l")+` FROM lifecycle.launch_log l WHERE l.placement = $1 FOR UPDATE`)
	seenPosition = pg.Define(pg.RoleLifecycle, "launchlog.seen_position", `
		SELECT `+pg.Columns[seenRow]("l")+` FROM lifecycle.launch_log l WHERE l.placement = $1`)
	acceptedPosition = pg.Define(pg.RoleLifecycle, "launchlog.accepted_position", `
		SELECT `+pg.Columns[acceptedRow]("l")+` FROM lifecycle.launch_log l WHERE l.placement = $1`)
	acceptLog = pg.Define(pg.RoleLifecycle, "launchlog.accept", `
		INSERT INTO lifecycle.launch_log AS l (placement, log_id, seq, accepted_seq, accepted_at, era)
		VALUES ($1, $2, $3, $3, mesh.clock(), (SELECT e.era FROM mesh.era e))
		ON CONFLICT (placement) DO UPDATE SET log_id = $2, seq = $3, era = EXCLUDED.era, reported = false,
			accepted_seq = $3, accepted_at = mesh.clock()`)
	rememberReport = pg.Define(pg.RoleLifecycle, "launchlog.remember_report", `
		INSERT INTO lifecycle.launch_log AS l (placement, log_id, seq, reported, era)
		VALUES ($1, $2, $3, true, (SELECT e.era FROM mesh.era e))
		ON CONFLICT (placement) DO UPDATE SET reported = true`)
	advancePosition = pg.Define(pg.RoleLifecycle, "launchlog.advance", `
		INSERT INTO lifecycle.launch_log AS l (placement, log_id, seq, era) VALUES ($1, $2, $3,
			(SELECT e.era FROM mesh.era e))
		ON CONFLICT (placement) DO UPDATE SET seq = $3, era = EXCLUDED.era WHERE l.log_id = $2
			AND (l.seq < $3 OR l.era < EXCLUDED.era)`)
	liveInstances = pg.Define(pg.RoleLifecycle, "launchlog.live_instances", `
		SELECT `+pg.Columns[liveRow]("i")+` FROM lifecycle.instance i WHERE i.state = 'live' AND i.placement = $1
			ORDER BY i.workspace_id`)
	launchStates = pg.Define(pg.RoleLifecycle, "launchlog.launch_states", `
		SELECT x.n::int AS place, w.epoch, coalesce(i.instance_id::text, '') AS instance, coalesce(i.state, '') AS state
		FROM unnest($1::uuid[], $2::bigint[]) WITH ORDINALITY AS x (workspace_id, epoch, n)
		JOIN lifecycle.workspace w ON w.id = x.workspace_id
		LEFT JOIN lifecycle.instance i ON i.workspace_id = x.workspace_id AND i.epoch = x.epoch`)
)
