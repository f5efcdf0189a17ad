package view

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/view/decoded"
)

// rowID is the id of a row, or none.
type rowID = pgtype.UUID

func idsOf[M any](missing []decoded.Missing[M]) []rowID {
	ids := make([]rowID, len(missing))
	for i, part := range missing {
		ids[i] = rowID{Bytes: part.Key.ID, Valid: true}
	}
	return ids
}

// workspaceParts are the messages that a workspace of a list is made of; nil where there is none.
type workspaceParts struct {
	workspace *lifecyclev1.Workspace
	run       *lifecyclev1.Run
	seen      *nodev1.Observation
	identity  *recoveryv1.NodeIdentity
	gate      *lifecyclev1.NodeGate
	session   *nodev1.SessionChanged
}

// missingBodies are the rows of a page whose messages are not kept.
type missingBodies struct {
	n          int
	workspaces []decoded.Missing[*lifecyclev1.Workspace]
	runs       []decoded.Missing[*lifecyclev1.Run]
	seen       []decoded.Missing[*nodev1.Observation]
	identities []decoded.Missing[*recoveryv1.NodeIdentity]
	gates      []decoded.Missing[*lifecyclev1.NodeGate]
	sessions   []decoded.Missing[*nodev1.SessionChanged]
}

// bodies are the decoded messages of the rows that lists of workspaces are made of.
type bodies struct {
	workspaces decoded.Messages[*lifecyclev1.Workspace]
	runs       decoded.Messages[*lifecyclev1.Run]
	seen       decoded.Messages[*nodev1.Observation]
	identities decoded.Messages[*recoveryv1.NodeIdentity]
	gates      decoded.Messages[*lifecyclev1.NodeGate]
	sessions   decoded.Messages[*nodev1.SessionChanged]
}

// nodeKeys identify the rows of a node that nodeSession joins, and hold the columns that the database compares.
type nodeKeys struct {
	NodeVersion    *int64 `db:"node_version" expr:"n.version"`
	NodeXmin       uint32 `db:"node_xmin" expr:"COALESCE(n.xmin, '0')"`
	GateVersion    *int64 `db:"gate_version" expr:"g.version"`
	GateXmin       uint32 `db:"gate_xmin" expr:"COALESCE(g.xmin, '0')"`
	SessionID      rowID  `db:"session_id" expr:"s.session_id"`
	SessionVersion int64  `db:"session_version" expr:"COALESCE(s.version, 0)"`
	SessionXmin    uint32 `db:"session_xmin" expr:"COALESCE(s.xmin, '0')"`
	nodeTimes
}

// find collects the kept messages of a workspace, and notes those that are missing.
func (b *bodies) find(row *workspaceRow, parts *workspaceParts, missing *missingBodies) {
	note := func(found bool) {
		if !found {
			missing.n++
		}
	}
	note(b.workspaces.Find(
		decoded.Key{ID: row.WorkspaceID.Bytes, Version: row.Version, Xmin: row.Xmin}, &parts.workspace, &missing.workspaces))
	if row.RunID.Valid {
		key := decoded.Key{ID: row.RunID.Bytes, Version: row.RunVersion, Xmin: row.RunXmin}
		note(b.runs.Find(key, &parts.run, &missing.runs))
	}
	node := row.NodeID.Bytes
	if row.SeenVersion != nil {
		key := decoded.Key{ID: row.WorkspaceID.Bytes, Node: node, Version: *row.SeenVersion, Xmin: row.SeenXmin}
		note(b.seen.Find(key, &parts.seen, &missing.seen))
	}
	if row.NodeVersion != nil {
		note(b.identities.Find(
			decoded.Key{ID: node, Version: *row.NodeVersion, Xmin: row.NodeXmin}, &parts.identity, &missing.identities))
	}
	if row.GateVersion != nil {
		note(b.gates.Find(decoded.Key{ID: node, Version: *row.GateVersion, Xmin: row.GateXmin}, &parts.gate, &missing.gates))
	}
	if row.SessionID.Valid {
		key := decoded.Key{ID: row.SessionID.Bytes, Version: row.SessionVersion, Xmin: row.SessionXmin}
		note(b.sessions.Find(key, &parts.session, &missing.sessions))
	}
}

// bodyOfRow is the body of a row whose message was not kept.
type bodyOfRow struct {
	Kind    string `db:"kind"`
	ID      rowID  `db:"id"`
	Node    rowID  `db:"node"`
	Version int64  `db:"version"`
	Xmin    uint32 `db:"xmin"`
	Body    []byte `db:"body"`
}

var readBodies = pg.Define(pg.RoleReadmodel, "view.read_bodies", `
	SELECT 'workspace' AS kind, x.workspace_id AS id, NULL::uuid AS node, x.version, x.xmin, x.body
		FROM readmodel.workspace x WHERE x.workspace_id = ANY($1::uuid[])
	UNION ALL SELECT 'run', x.run_id, NULL, x.version, x.xmin, x.body FROM readmodel.run x WHERE x.run_id = ANY($2::uuid[])
	UNION ALL SELECT 'observed', x.workspace_id, x.node_id, x.version, x.xmin, x.body
		FROM unnest($3::uuid[], $4::uuid[]) k (workspace_id, node_id)
		JOIN readmodel.observed x ON x.workspace_id = k.workspace_id AND x.node_id = k.node_id
	UNION ALL SELECT 'node', x.node_id, NULL, x.version, x.xmin, x.body
		FROM readmodel.node x WHERE x.node_id = ANY($5::uuid[])
	UNION ALL SELECT 'gate', x.node_id, NULL, x.version, x.xmin, x.body
		FROM readmodel.gate x WHERE x.node_id = ANY($6::uuid[])
	UNION ALL SELECT 'session', x.session_id, NULL, x.version, x.xmin, x.body
		FROM readmodel.session x WHERE x.session_id = ANY($7::uuid[])`)

// load reads the missing bodies and keeps their messages. It returns decoded.ErrChanged if a row has changed since its
// key was read.
func (b *bodies) load(ctx context.Context, db pg.Querier, missing *missingBodies) error {
	nodes := make([]rowID, len(missing.seen))
	for i, part := range missing.seen {
		nodes[i] = rowID{Bytes: part.Key.Node, Valid: true}
	}
	rows, err := pg.Query(ctx, db, readBodies, idsOf(missing.workspaces), idsOf(missing.runs), idsOf(missing.seen), nodes,
		idsOf(missing.identities), idsOf(missing.gates), idsOf(missing.sessions))
	if err != nil {
		return fmt.Errorf("read bodies: %w", err)
	}
	read := map[string]map[decoded.Key][]byte{}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[bodyOfRow])
	if err != nil {
		return fmt.Errorf("read bodies: %w", err)
	}
	for _, row := range found {
		if read[row.Kind] == nil {
			read[row.Kind] = map[decoded.Key][]byte{}
		}
		read[row.Kind][decoded.Key{ID: row.ID.Bytes, Node: row.Node.Bytes, Version: row.Version, Xmin: row.Xmin}] = row.Body
	}
	return errors.Join(
		b.workspaces.Fill(missing.workspaces, read["workspace"], decode[lifecyclev1.Workspace]),
		b.runs.Fill(missing.runs, read["run"], decode[lifecyclev1.Run]),
		b.seen.Fill(missing.seen, read["observed"], decode[nodev1.Observation]),
		b.identities.Fill(missing.identities, read["node"], decode[recoveryv1.NodeIdentity]),
		b.gates.Fill(missing.gates, read["gate"], decode[lifecyclev1.NodeGate]),
		b.sessions.Fill(missing.sessions, read["session"], decode[nodev1.SessionChanged]),
	)
}
