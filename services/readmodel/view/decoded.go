package view

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	mostDecoded    = 2 << 20     // bytes of bodies whose messages one generation keeps at most
	longestDecoded = time.Minute // how long a generation is the young one at most
)

// errChanged is the error for a row that changed between the statement that named it and the one that reads it.
var errChanged = errors.New("a row has changed while it was read")

// rowID is the id of a row, or none.
type rowID = pgtype.UUID

// rowKey names one state of a row of a table. A row that is written anew has another xmin, whatever its version: a
// rebuild of the projection makes rows of the same version, and their bodies may differ. The version distinguishes the
// rows that a restored database would write under the transaction ids of the one before.
type rowKey struct {
	id      [16]byte
	node    [16]byte // of an observation: its key is the workspace and the node
	version int64
	xmin    uint32
}

// decoded keeps messages by the state of the row that they were decoded from: most rows of a list have not changed
// since they were listed last, and reading and decoding them costs more than the rest of a request. There are two
// generations: when the young one is full or a minute old, it becomes the old one. A message of the old one that a list
// needs moves to the young one; a message that no list needs is dropped after two minutes in which lists are read.
type decoded[T any, M message[T]] struct {
	mu         sync.Mutex
	young, old map[rowKey]sized[M]
	bytes      int       // of the bodies in the young generation
	since      time.Time // when the young generation began
}

type sized[M any] struct {
	message M
	bytes   int
}

// find stores the message of a row in *to. The message is shared between requests, so callers must not change it. If it
// is not kept, find adds the key of the row to missing. It reports whether the message was found.
func (d *decoded[T, M]) find(key rowKey, to *M, missing *[]missed[M]) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.since) >= longestDecoded {
		d.turn()
	}
	found, ok := d.young[key]
	if !ok {
		if found, ok = d.old[key]; ok {
			d.keep(key, found)
		}
	}
	if ok {
		*to = found.message
		return true
	}
	*missing = append(*missing, missed[M]{key, to})
	return false
}

// keep stores the message of a row in the young generation. The caller holds mu.
func (d *decoded[T, M]) keep(key rowKey, m sized[M]) {
	if d.bytes+m.bytes > mostDecoded || d.young == nil {
		d.turn()
	}
	d.young[key] = m
	d.bytes += m.bytes
}

// turn makes the young generation the old one and begins a new one. The caller holds mu.
func (d *decoded[T, M]) turn() {
	d.young, d.old, d.bytes, d.since = map[rowKey]sized[M]{}, d.young, 0, time.Now()
}

// fill decodes the bodies that were read and stores the messages where they are missing.
func (d *decoded[T, M]) fill(missing []missed[M], read map[rowKey][]byte) error {
	for _, part := range missing {
		body, ok := read[part.key]
		if !ok {
			return errChanged
		}
		m, err := decode[T, M](body)
		if err != nil {
			return err
		}
		*part.to = m
		d.mu.Lock()
		d.keep(part.key, sized[M]{m, len(body)})
		d.mu.Unlock()
	}
	return nil
}

// missed is a row whose message is not kept, and the place to store the message.
type missed[M any] struct {
	key rowKey
	to  *M
}

func idsOf[M any](missing []missed[M]) []rowID {
	ids := make([]rowID, len(missing))
	for i, part := range missing {
		ids[i] = rowID{Bytes: part.key.id, Valid: true}
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
	workspaces []missed[*lifecyclev1.Workspace]
	runs       []missed[*lifecyclev1.Run]
	seen       []missed[*nodev1.Observation]
	identities []missed[*recoveryv1.NodeIdentity]
	gates      []missed[*lifecyclev1.NodeGate]
	sessions   []missed[*nodev1.SessionChanged]
}

// bodies are the decoded messages of the rows that lists of workspaces are made of.
type bodies struct {
	workspaces decoded[lifecyclev1.Workspace, *lifecyclev1.Workspace]
	runs       decoded[lifecyclev1.Run, *lifecyclev1.Run]
	seen       decoded[nodev1.Observation, *nodev1.Observation]
	identities decoded[recoveryv1.NodeIdentity, *recoveryv1.NodeIdentity]
	gates      decoded[lifecyclev1.NodeGate, *lifecyclev1.NodeGate]
	sessions   decoded[nodev1.SessionChanged, *nodev1.SessionChanged]
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
	note(b.workspaces.find(
		rowKey{id: row.WorkspaceID.Bytes, version: row.Version, xmin: row.Xmin}, &parts.workspace, &missing.workspaces))
	if row.RunID.Valid {
		note(b.runs.find(rowKey{id: row.RunID.Bytes, version: row.RunVersion, xmin: row.RunXmin}, &parts.run, &missing.runs))
	}
	node := row.NodeID.Bytes
	if row.SeenVersion != nil {
		key := rowKey{id: row.WorkspaceID.Bytes, node: node, version: *row.SeenVersion, xmin: row.SeenXmin}
		note(b.seen.find(key, &parts.seen, &missing.seen))
	}
	if row.NodeVersion != nil {
		note(b.identities.find(
			rowKey{id: node, version: *row.NodeVersion, xmin: row.NodeXmin}, &parts.identity, &missing.identities))
	}
	if row.GateVersion != nil {
		note(b.gates.find(rowKey{id: node, version: *row.GateVersion, xmin: row.GateXmin}, &parts.gate, &missing.gates))
	}
	if row.SessionID.Valid {
		key := rowKey{id: row.SessionID.Bytes, version: row.SessionVersion, xmin: row.SessionXmin}
		note(b.sessions.find(key, &parts.session, &missing.sessions))
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

// load reads the missing bodies and keeps their messages. It returns errChanged if a row has changed since its key was
// read.
func (b *bodies) load(ctx context.Context, db pg.Querier, missing *missingBodies) error {
	nodes := make([]rowID, len(missing.seen))
	for i, part := range missing.seen {
		nodes[i] = rowID{Bytes: part.key.node, Valid: true}
	}
	rows, err := pg.Query(ctx, db, readBodies, idsOf(missing.workspaces), idsOf(missing.runs), idsOf(missing.seen), nodes,
		idsOf(missing.identities), idsOf(missing.gates), idsOf(missing.sessions))
	if err != nil {
		return fmt.Errorf("read bodies: %w", err)
	}
	read := map[string]map[rowKey][]byte{}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[bodyOfRow])
	if err != nil {
		return fmt.Errorf("read bodies: %w", err)
	}
	for _, row := range found {
		if read[row.Kind] == nil {
			read[row.Kind] = map[rowKey][]byte{}
		}
		read[row.Kind][rowKey{id: row.ID.Bytes, node: row.Node.Bytes, version: row.Version, xmin: row.Xmin}] = row.Body
	}
	return errors.Join(
		b.workspaces.fill(missing.workspaces, read["workspace"]), b.runs.fill(missing.runs, read["run"]),
		b.seen.fill(missing.seen, read["observed"]), b.identities.fill(missing.identities, read["node"]),
		b.gates.fill(missing.gates, read["gate"]), b.sessions.fill(missing.sessions, read["session"]))
}
