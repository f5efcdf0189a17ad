package facts

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// observerRow is the newest session of which a node's observations are written.
type observerRow struct {
	NodeID     string `db:"node_id" expr:"@.node_id::text"`
	Generation int64  `db:"generation"`
}

// digestRow is the digest of the written observation of one workspace on a node.
type digestRow struct {
	NodeID      string `db:"node_id" expr:"@.node_id::text"`
	WorkspaceID string `db:"workspace_id" expr:"@.workspace_id::text"`
	Digest      []byte `db:"digest"`
}

// droppedRow is a written observation that was deleted.
type droppedRow struct {
	NodeID      string    `db:"node_id" expr:"@.node_id::text"`
	WorkspaceID string    `db:"workspace_id" expr:"@.workspace_id::text"`
	Body        []byte    `db:"body"`
	Now         time.Time `db:"now" expr:"mesh.clock()"`
}

var (
	registerObservers = pg.Define(pg.RoleNodeAPI, "facts.register_observers", `
		INSERT INTO nodeapi.observer AS r (node_id, generation, since)
		SELECT n.node_id, n.generation, mesh.clock() FROM unnest($1::uuid[], $2::bigint[]) AS n (node_id, generation)
			ORDER BY n.node_id
		ON CONFLICT (node_id) DO UPDATE SET generation = excluded.generation, since = excluded.since
			WHERE r.generation < excluded.generation`)

	lockObservers = pg.Define(pg.RoleNodeAPI, "facts.lock_observers", `
		SELECT `+pg.Columns[observerRow]("r")+` FROM nodeapi.observer r WHERE r.node_id = ANY($1::uuid[]) ORDER BY r.node_id
			FOR SHARE`)

	readDigests = pg.Define(pg.RoleNodeAPI, "facts.read_digests", `
		SELECT `+pg.Columns[digestRow]("o")+` FROM nodeapi.observation o WHERE o.node_id = ANY($1::uuid[])`)

	keepObservations = pg.Define(pg.RoleNodeAPI, "facts.keep_observations", `
		INSERT INTO nodeapi.observation (node_id, workspace_id, digest, body, written_at)
		SELECT n.node_id, n.workspace_id, n.digest, n.body, mesh.clock()
		FROM unnest($1::uuid[], $2::uuid[], $3::bytea[], $4::bytea[]) AS n (node_id, workspace_id, digest, body)
		ON CONFLICT (node_id, workspace_id) DO UPDATE
			SET digest = excluded.digest, body = excluded.body, written_at = excluded.written_at`)

	dropObservations = pg.Define(pg.RoleNodeAPI, "facts.drop_observations", `
		DELETE FROM nodeapi.observation o USING unnest($1::uuid[], $2::uuid[]) AS n (node_id, workspace_id)
		WHERE o.node_id = n.node_id AND o.workspace_id = n.workspace_id RETURNING `+pg.Columns[droppedRow]("o"))

	// Each session of a node registers anew. $1 is in seconds.
	lockGone = pg.Define(pg.RoleNodeAPI, "facts.lock_gone_observers", `
		SELECT r.node_id::text FROM nodeapi.observer r WHERE r.since < mesh.clock() - make_interval(secs => $1)
			ORDER BY r.since LIMIT 100 FOR UPDATE SKIP LOCKED`)

	// The nodes of $1 are locked, so that no other statement writes the rows of theirs.
	pruneObservations = pg.Define(pg.RoleNodeAPI, "facts.prune_observations", `
		DELETE FROM nodeapi.observation o WHERE o.ctid = ANY (ARRAY(
			SELECT x.ctid FROM nodeapi.observation x WHERE x.node_id = ANY($1::uuid[])
				ORDER BY x.node_id, x.workspace_id LIMIT 1000))`)

	pruneObservers = pg.Define(pg.RoleNodeAPI, "facts.prune_observers", `
		DELETE FROM nodeapi.observer r WHERE r.node_id = ANY($1::uuid[])`)
)
