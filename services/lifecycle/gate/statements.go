package gate

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// row is a Gate as it is read, with its host's facts as they are stored.
type row struct {
	Gate
	HostFacts []byte `db:"host"`
}

var columns = pg.Columns[row]("g")

func (r row) gate() (Gate, error) {
	g := r.Gate
	g.Host = &commonv1.HostFacts{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(r.HostFacts, g.Host); err != nil {
		return Gate{}, fmt.Errorf("read host facts of node %s: %w", g.NodeID, err)
	}
	return g, nil
}

// one runs a statement and returns its only gate. Without one the error is pgx.ErrNoRows.
func one(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Gate, error) {
	r, err := pg.One[row](ctx, q, s, args...)
	if err != nil {
		return Gate{}, err
	}
	return r.gate()
}

// all runs a statement and returns its gates.
func all(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) ([]Gate, error) {
	rows, err := pg.All[row](ctx, q, s, args...)
	if err != nil {
		return nil, err
	}
	out := make([]Gate, len(rows))
	for i, r := range rows {
		if out[i], err = r.gate(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// cordonRequest is a request for a node's cordon: by whom, and why.
type cordonRequest struct {
	By     string `db:"by"`
	Reason string `db:"reason"`
}

// mayRun is an epoch of a workspace that may run on a node.
type mayRun struct {
	NodeID      string `db:"node_id"`
	WorkspaceID string `db:"workspace_id"`
	Epoch       int64  `db:"epoch"`
}

var (
	getGate = pg.Define(pg.RoleLifecycle, "gate.get", `
		SELECT `+columns+` FROM lifecycle.node_gate g WHERE g.node_id = $1`)
	lockGate = pg.Define(pg.RoleLifecycle, "gate.lock", `
		SELECT `+columns+` FROM lifecycle.node_gate g WHERE g.node_id = $1 FOR NO KEY UPDATE`)
	lockGates = pg.Define(pg.RoleLifecycle, "gate.lock_all", `
		SELECT `+columns+` FROM lifecycle.node_gate g WHERE g.node_id = ANY($1::uuid[]) ORDER BY g.node_id FOR NO KEY UPDATE`)
	lockGatesForWork = pg.Define(pg.RoleLifecycle, "gate.lock_for_work", `
		SELECT `+pg.Columns[View]("g")+` FROM lifecycle.node_gate g WHERE g.node_id = ANY($1::uuid[])
			ORDER BY g.node_id FOR SHARE`)
	lockGatesOfWorkspace = pg.Define(pg.RoleLifecycle, "gate.lock_of_workspace", `
		SELECT FROM lifecycle.node_gate g WHERE g.node_id IN (
			SELECT a.node_id FROM lifecycle.allocation a WHERE a.workspace_id = $1 AND a.state <> 'released'
			UNION
			SELECT c.node_id FROM lifecycle.resource_claim c WHERE c.workspace_id = $1 AND c.released_at IS NULL
		) ORDER BY g.node_id FOR NO KEY UPDATE`)
	fullGates = pg.Define(pg.RoleLifecycle, "gate.of_full_disks", `
		SELECT `+columns+` FROM lifecycle.node_gate g WHERE NOT g.retired AND g.host->'stateDisk'->>'full' = 'true'
			ORDER BY g.node_id`)
	setHost = pg.Define(pg.RoleLifecycle, "gate.set_host", `
		UPDATE lifecycle.node_gate g SET host = $3::jsonb, version = g.version + 1
		WHERE g.node_id = $1 AND g.session_id = $2 AND NOT g.retired AND g.host <> $3::jsonb RETURNING `+columns)
	applyFence = pg.Define(pg.RoleLifecycle, "gate.apply_fence", `
		INSERT INTO lifecycle.node_gate AS g (node_id, node_instance_id, name, fence_epoch, admitted, retired, instance_id,
			workspace_id, epoch, slots, retired_at)
		VALUES ($1, nullif($2, '')::uuid, $3, $4, $5, $6, nullif($7, '')::uuid, nullif($8, '')::uuid, $9, $10, CASE WHEN $6
			THEN mesh.clock() END)
		ON CONFLICT (node_id) DO UPDATE SET
			fence_epoch = $4, admitted = $5, retired = $6, version = g.version + 1, retired_at = CASE WHEN $6
				THEN COALESCE(g.retired_at, mesh.clock()) END,
			node_instance_id = coalesce(nullif($2, '')::uuid, g.node_instance_id), name = coalesce(nullif($3, ''), g.name)
		WHERE g.fence_epoch < $4
		RETURNING `+columns)
	setCordon = pg.Define(pg.RoleLifecycle, "gate.set_cordon", `
		UPDATE lifecycle.node_gate g SET cordoned = $2, cordon_reason = CASE WHEN $2 THEN $3 ELSE '' END,
			cordoned_by = CASE WHEN $2 THEN $4 ELSE '' END,
			version = g.version + 1
		WHERE g.node_id = $1 AND NOT g.retired RETURNING `+columns)
	passCordon = pg.Define(pg.RoleLifecycle, "gate.pass_cordon", `
		UPDATE lifecycle.node_gate g SET cordoned = $4 <> '', cordon_reason = $3, cordoned_by = $4, version = g.version + 1
		WHERE g.node_id = $1 AND g.cordoned AND g.cordoned_by = $2 RETURNING `+columns)
	closeSessions = pg.Define(pg.RoleLifecycle, "gate.close_sessions", `
		UPDATE lifecycle.node_gate SET session_open = false
		WHERE node_id IN (
			SELECT g.node_id FROM unnest($1::uuid[], $2::uuid[]) AS n (node_id, session_id)
				JOIN lifecycle.node_gate g ON g.node_id = n.node_id AND g.session_id = n.session_id
			WHERE g.session_open ORDER BY g.node_id FOR NO KEY UPDATE OF g)`)
	nextCordon = pg.Define(pg.RoleLifecycle, "gate.next_cordon", `
		SELECT w.by, w.reason FROM (
			SELECT 'finding:' || f.finding_id AS by, f.summary AS reason, f.first_seen_at AS since
			FROM lifecycle.finding f WHERE f.node_id = $1 AND f.resolved_at IS NULL AND f.cordoned
			UNION ALL
			SELECT '`+ofRuntime+`', v.reason, v.since FROM lifecycle.verdict_cordon v
			WHERE v.node_id = $1 AND v.reason <> '' AND NOT v.withheld
			UNION ALL
			SELECT $3::text, 'what a release gave up is still here: ' || c.kind || ' ' || c.deterministic_name, c.orphaned_at
			FROM lifecycle.resource_claim c
			WHERE c.node_id = $1 AND c.orphaned_at IS NOT NULL AND c.released_at IS NULL
				AND c.kind IN ('slot', 'instance', 'storage', 'workload')
			UNION ALL
			SELECT $3::text, 'the release of allocation ' || a.allocation_id || ' has failed', a.state_at
			FROM lifecycle.allocation a WHERE a.node_id = $1 AND a.state = 'release_failed'
		) w WHERE w.by <> $2 ORDER BY w.since, w.by LIMIT 1`)
	// listMayRun reads which epochs may run on nodes: those whose allocation there is allocating or active. A launched
	// instance serves the one epoch that its gate names; a machine serves every workspace with a slot on it.
	listMayRun = pg.Define(pg.RoleLifecycle, "gate.list_may_run", `
		SELECT a.node_id::text AS node_id, a.workspace_id::text AS workspace_id, a.epoch FROM lifecycle.allocation a
		WHERE a.node_id = ANY($1::uuid[]) AND a.slot IS NOT NULL AND a.state <> 'released'
			AND a.state IN ('allocating', 'active')
		UNION
		SELECT g.node_id::text, a.workspace_id::text, a.epoch
		FROM lifecycle.node_gate g JOIN lifecycle.allocation a ON a.workspace_id = g.workspace_id AND a.epoch = g.epoch
		WHERE g.node_id = ANY($1::uuid[]) AND g.instance_id IS NOT NULL AND a.state <> 'released'
			AND a.state IN ('allocating', 'active')
		ORDER BY 1, 2, 3`)
)
