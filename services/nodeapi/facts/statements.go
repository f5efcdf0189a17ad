package facts

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// replicaRow is what a replica's beat reads of its row.
type replicaRow struct {
	StartedAt time.Time `db:"started_at"`
	BeatAt    time.Time `db:"beat_at"`
	Version   int64     `db:"version"`
}

var beatReplica = pg.Define(pg.RoleNodeAPI, "facts.beat_replica", `
	INSERT INTO nodeapi.replica AS r (replica_id, started_at, beat_at, sessions, late, leaving, version)
	VALUES ($1, mesh.clock(), mesh.clock(), $2, $3, $4, 1)
	ON CONFLICT (replica_id) DO UPDATE
	SET beat_at = mesh.clock(), sessions = $2, late = $3, leaving = $4, version = r.version + 1
	RETURNING `+pg.Columns[replicaRow]("r"))
