package findings

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

const (
	nodeDiskFull = commonv1.FindingKind_FINDING_KIND_NODE_DISK_FULL

	// sourceDisks names the detector in the findings it opens, whether by a sweep or by a report.
	sourceDisks = "disks"

	nextDiskFull = "free room on the host, on the file system of the directory named here; what workspaces keep is theirs. The finding and its cordon end " +
		"by themselves once the agent reports room"
)

// detectDisks finds the nodes whose agents last reported that their own directories have no room. For a disconnected
// agent its last report counts.
func (s *Sweeper) detectDisks(ctx context.Context) ([]Seen, error) {
	gates, err := gate.DiskFull(ctx, s.deps.DB)
	if err != nil {
		return nil, err
	}
	out := make([]Seen, 0, len(gates))
	for _, g := range gates {
		out = append(out, diskSeen(g.NodeID, g.Name, g.Host.GetStateDisk()))
	}
	return out, nil
}

// diskSeen returns the finding about one node.
func diskSeen(nodeID, name string, disk *commonv1.StateDisk) Seen {
	return Seen{
		Kind: nodeDiskFull, Severity: p1, SubjectType: "node", SubjectID: nodeID, NodeID: nodeID, NextAction: nextDiskFull,
		Cordon: true, Certain: true,
		Summary: fmt.Sprintf("the agent of node %s has no room in %s: its state directory takes no new work", name,
			disk.GetPath()),
		Before: map[string]any{"room": "enough for the agent's own files"},
		After: map[string]any{
			"directory": disk.GetPath(), "reported": disk.GetDetail(),
			"since": disk.GetSince().AsTime().UTC().Format(time.RFC3339),
		},
	}
}

var diskFindingOpen = pg.Define(pg.RoleLifecycle, "findings.disk_finding_open",
	`SELECT EXISTS (SELECT 1 FROM lifecycle.finding f
		WHERE f.kind = $1 AND f.subject_id = $2 AND f.resolved_at IS NULL)`)

var diskFinding = pg.Define(pg.RoleLifecycle, "findings.disk_finding",
	`SELECT `+findingColumns+` FROM lifecycle.finding f
		WHERE f.kind = $1 AND f.subject_type = 'node' AND f.subject_id = $2 AND f.resolved_at IS NULL FOR UPDATE`)

// OnSession applies the facts that a session reports of its host: it stores them in the gate, and opens or resolves the
// finding about its agent's disk at once. It ignores a report of any session but the gate's own.
func OnSession(ctx context.Context, tx pgx.Tx, f *nodev1.SessionChanged) error {
	host := f.GetHost()
	if host == nil {
		return nil
	}
	g, ok, err := gate.Get(ctx, tx, f.GetNodeId())
	if err != nil || !ok || g.Retired || g.SessionID != f.GetSessionId() {
		return err
	}
	var known bool
	err = pg.QueryRow(ctx, tx, diskFindingOpen, names.Of(nodeDiskFull), f.GetNodeId()).Scan(&known)
	if err != nil {
		return fmt.Errorf("look for the finding of a disk: %w", err)
	}
	full := host.GetStateDisk().GetFull()
	if known != full {
		// Before the gate is locked, as every sweep does.
		if _, err := pg.Exec(ctx, tx, takeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
	}
	if err := gate.SetHost(ctx, tx, f.GetNodeId(), f.GetSessionId(), host); err != nil || known == full {
		return err
	}
	if full {
		_, err := open(ctx, tx, sourceDisks, diskSeen(g.NodeID, g.Name, host.GetStateDisk()))
		return err
	}
	have, err := oneFinding(ctx, tx, diskFinding, names.Of(nodeDiskFull), f.GetNodeId())
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // a sweep was first
	}
	if err != nil {
		return fmt.Errorf("read the finding of a disk: %w", err)
	}
	_, _, err = resolve(ctx, tx, have)
	return err
}
