package findings

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// sourceDisks names the detector of disks in the findings it opens, whether by a sweep or by a report.
const sourceDisks = "disks"

var diskFindingOpen = pg.Define(pg.RoleLifecycle, "findings.disk_finding_open",
	`SELECT EXISTS (SELECT 1 FROM lifecycle.finding f
		WHERE f.kind = $1 AND f.subject_id = $2 AND f.resolved_at IS NULL)`)

var diskFinding = pg.Define(pg.RoleLifecycle, "findings.disk_finding",
	`SELECT `+finding.Columns+` FROM lifecycle.finding f
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
	known, err := pg.Value[bool](ctx, tx, diskFindingOpen, names.Of(detect.NodeDiskFull), f.GetNodeId())
	if err != nil {
		return fmt.Errorf("look for the finding of a disk: %w", err)
	}
	full := host.GetStateDisk().GetFull()
	if known != full {
		// Before the gate is locked, as every sweep does.
		if _, err := pg.Exec(ctx, tx, finding.TakeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
	}
	if err := gate.SetHost(ctx, tx, f.GetNodeId(), f.GetSessionId(), host); err != nil || known == full {
		return err
	}
	if full {
		_, err := finding.Open(ctx, tx, sourceDisks, detect.DiskFull(g.NodeID, g.Name, host.GetStateDisk()))
		return err
	}
	have, err := finding.One(ctx, tx, diskFinding, names.Of(detect.NodeDiskFull), f.GetNodeId())
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // a sweep was first
	}
	if err != nil {
		return fmt.Errorf("read the finding of a disk: %w", err)
	}
	_, _, err = finding.Resolve(ctx, tx, have)
	return err
}
