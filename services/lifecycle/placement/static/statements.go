package static

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// noID is the id of the instance and of the machine of an epoch that was ended before it was placed.
const noID = `'00000000-0000-0000-0000-000000000000'`

// epochsRow has what a launch needs about a workspace's slots: the highest epoch that ever had one, and another epoch
// that still has one.
type epochsRow struct {
	Highest *int64 `db:"highest"`
	Alive   *int64 `db:"alive"`
}

// slotRow is a row of static_placement.
type slotRow struct {
	WorkspaceID string     `db:"workspace_id" expr:"@.workspace_id::text"`
	Epoch       int64      `db:"epoch"`
	InstanceID  string     `db:"instance_id" expr:"@.instance_id::text"`
	NodeID      string     `db:"node_id" expr:"@.node_id::text"`
	StartedAt   time.Time  `db:"started_at"`
	EndedAt     *time.Time `db:"ended_at"`
}

var (
	placedEpochs = pg.Define(pg.RoleLifecycle, "static.placed_epochs", `
		SELECT max(epoch) AS highest, max(epoch) FILTER (WHERE ended_at IS NULL AND epoch <> $2) AS alive
		FROM lifecycle.static_placement WHERE workspace_id = $1`)
	takeSlot = pg.Define(pg.RoleLifecycle, "static.take_slot", `
		INSERT INTO lifecycle.static_placement AS s (workspace_id, epoch, instance_id, node_id) VALUES ($1, $2, $3, $4)
		ON CONFLICT (workspace_id, epoch) DO UPDATE SET workspace_id = s.workspace_id
		RETURNING `+pg.Columns[slotRow]("s"))
	countLeft = pg.Define(pg.RoleLifecycle, "static.count_left", `
		SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND epoch <= $2 AND kind IN ('workload', 'storage') AND released_at IS NULL
			-- What an earlier epoch was given up with stands on its own machine, and is reaped there.
			AND (orphaned_at IS NULL OR epoch = $2)`)
	endSlot = pg.Define(pg.RoleLifecycle, "static.end_slot", `
		INSERT INTO lifecycle.static_placement AS s (workspace_id, epoch, instance_id, node_id, started_at, ended_at)
		VALUES ($1, $2, `+noID+`, `+noID+`, mesh.clock(), mesh.clock())
		ON CONFLICT (workspace_id, epoch) DO UPDATE SET ended_at = mesh.clock() WHERE s.ended_at IS NULL`)
	fenceSlot = pg.Define(pg.RoleLifecycle, "static.fence_slot", `
		INSERT INTO lifecycle.static_placement AS s (workspace_id, epoch, instance_id, node_id, started_at, ended_at,
			fence_word)
		VALUES ($1, $2, `+noID+`, `+noID+`, mesh.clock(), mesh.clock(), $3)
		ON CONFLICT (workspace_id, epoch) DO UPDATE SET ended_at = mesh.clock(), fence_word = $3 WHERE s.ended_at IS NULL`)
	// standingSlots uses the index of the slots that have not ended.
	standingSlots = pg.Define(pg.RoleLifecycle, "static.standing_slots", `
		SELECT `+pg.Columns[slotRow]("s")+` FROM lifecycle.static_placement s
			WHERE s.node_id <> `+noID+` AND s.ended_at IS NULL`)
	listSlots = pg.Define(pg.RoleLifecycle, "static.list_slots", `
		SELECT `+pg.Columns[slotRow]("s")+` FROM lifecycle.static_placement s WHERE s.node_id <> `+noID)
)
