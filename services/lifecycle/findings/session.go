package findings

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"

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

// hostsChanged reads, of sessions with facts of their hosts, the nodes whose gate is that session's and has other
// facts, or a finding about the disk that is not as they say.
var hostsChanged = pg.Define(pg.RoleLifecycle, "findings.hosts_changed", `
	SELECT g.node_id::text FROM unnest($1::uuid[], $2::uuid[], $3::jsonb[], $4::boolean[])
			AS n (node_id, session_id, host, is_full)
		JOIN lifecycle.node_gate g ON g.node_id = n.node_id AND g.session_id = n.session_id
	WHERE NOT g.retired AND (g.host <> n.host OR n.is_full <> EXISTS (SELECT 1 FROM lifecycle.finding f
		WHERE f.kind = $5 AND f.subject_id = n.node_id::text AND f.resolved_at IS NULL))`)

// ApplyHostFacts applies, in their order, the facts that sessions report of their hosts: it stores them in the gates,
// and opens or resolves the findings about their agents' disks at once. It ignores a report of any session but the
// gate's own. Most of a fleet that returns change nothing: one statement finds the others.
func ApplyHostFacts(ctx context.Context, tx pgx.Tx, reports []*nodev1.SessionChanged) error {
	var applied []*nodev1.SessionChanged
	var nodes, sessions, hosts []string
	var full []bool
	for _, f := range reports {
		if f.GetHost() == nil {
			continue
		}
		host, err := protojson.Marshal(f.GetHost())
		if err != nil {
			return fmt.Errorf("encode host facts: %w", err)
		}
		applied, nodes, sessions = append(applied, f), append(nodes, f.GetNodeId()), append(sessions, f.GetSessionId())
		hosts, full = append(hosts, string(host)), append(full, f.GetHost().GetStateDisk().GetFull())
	}
	if len(applied) == 0 {
		return nil
	}
	changed, err := pg.Values[string](ctx, tx, hostsChanged, nodes, sessions, hosts, full, names.Of(detect.NodeDiskFull))
	if err != nil {
		return fmt.Errorf("compare facts of hosts: %w", err)
	}
	for _, f := range applied {
		if !slices.Contains(changed, f.GetNodeId()) {
			continue
		}
		if err := applyHostFacts(ctx, tx, f); err != nil {
			return err
		}
	}
	return nil
}

// applyHostFacts applies the facts of one report.
func applyHostFacts(ctx context.Context, tx pgx.Tx, f *nodev1.SessionChanged) error {
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
		// Before this node's gate is locked, as every sweep does. The transaction may have locked the gates of other reports
		// already: a deadlock with a sweep that waits for one of these ends the transaction, which is run again.
		if _, err := pg.Exec(ctx, tx, finding.TakeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
	}
	if err := gate.SetHost(ctx, tx, f.GetNodeId(), f.GetSessionId(), host); err != nil || known == full {
		return err
	}
	if full {
		return finding.OpenOne(ctx, tx, sourceDisks, detect.DiskFull(g.NodeID, g.Name, host.GetStateDisk()))
	}
	have, err := finding.One(ctx, tx, diskFinding, names.Of(detect.NodeDiskFull), f.GetNodeId())
	if errors.Is(err, pgx.ErrNoRows) || finding.Unread(err) {
		return nil // a sweep was first, or a replica of another build has to end it
	}
	if err != nil {
		return fmt.Errorf("read the finding of a disk: %w", err)
	}
	_, _, err = finding.Resolve(ctx, tx, have.ID)
	return err
}
