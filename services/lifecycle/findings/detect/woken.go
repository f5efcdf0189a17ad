package detect

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// EndedWoke is the kind of the findings of Woken.
const EndedWoke = commonv1.FindingKind_FINDING_KIND_ENDED_INSTANCE_WOKE

const (
	nextWoke = "find the host that started the old instance and delete it there, disk images and snapshots included; " +
		"nothing of it runs, and the workspace is not " +
		"touched; the finding ends an hour after the last refusal"
	nextStrays = "find out what started the old instance on this host again, a restored backup for example, and remove " +
		"it; its processes were ended"

	refusedKind   = "instance.refused"
	wokenConsumer = "woken-instances"
)

// WokenConsumer is the configuration of the consumer that ApplyWoken is for.
func WokenConsumer() events.ConsumerConfig {
	return events.ConsumerConfig{Name: wokenConsumer, Schema: pg.RoleLifecycle, Kinds: []string{refusedKind}}
}

var noteRefused = pg.Define(pg.RoleLifecycle, "detect.note_refused", `
		INSERT INTO lifecycle.woken_instance AS w
			(instance_id, version, workspace_id, tenant_id, epoch, node_id, reason, remote_address, machine_id, boot_id,
				refused_at)
		VALUES ($1, $2, $3, nullif($4, '')::uuid, $5, nullif($6, '')::uuid, $7, $8, $9, $10, $11)
		ON CONFLICT (instance_id) DO UPDATE
			SET version = EXCLUDED.version, reason = EXCLUDED.reason, remote_address = EXCLUDED.remote_address,
			machine_id = EXCLUDED.machine_id, boot_id = EXCLUDED.boot_id, refused_at = EXCLUDED.refused_at
		WHERE w.version < EXCLUDED.version`)

// ApplyWoken stores that recovery refused an instance of an epoch that is over. SweepWoken makes the finding of it.
func ApplyWoken(ctx context.Context, tx pgx.Tx, r events.Record) error {
	if r.Kind != refusedKind || r.Source != pg.RoleRecovery {
		return nil
	}
	var f recoveryv1.InstanceRefused
	if err := r.Decode(&f); err != nil {
		return err
	}
	if !ids.Valid(f.GetInstanceId()) || !ids.Valid(f.GetWorkspaceId()) {
		return nil
	}
	_, err := pg.Exec(ctx, tx, noteRefused,
		f.GetInstanceId(), f.GetVersion(), f.GetWorkspaceId(), f.GetTenantId(), f.GetEpoch(), f.GetNodeId(),
		names.Of(f.GetReason()), f.GetRemoteAddress(), f.GetMachineId(), f.GetBootId(), f.GetRefusedAt().AsTime())
	if err != nil {
		return fmt.Errorf("write down refused instance: %w", err)
	}
	return nil
}

var forgetRefused = pg.Define(pg.RoleLifecycle, "detect.forget_refused",
	`DELETE FROM lifecycle.woken_instance WHERE refused_at < mesh.clock() - make_interval(secs => $1)`)

// ForgetRefused deletes old refusals.
func (d *Detectors) ForgetRefused(ctx context.Context) error {
	_, err := pg.Exec(ctx, d.db, forgetRefused, d.cfg.Keep.Seconds())
	return err
}

// refusedFields are the columns of woken_instance.
type refusedFields struct {
	WorkspaceID   string    `db:"workspace_id" expr:"@.workspace_id::text"`
	TenantID      string    `db:"tenant_id" expr:"coalesce(@.tenant_id::text, '')"`
	Epoch         int64     `db:"epoch"`
	NodeID        string    `db:"node_id" expr:"coalesce(@.node_id::text, '')"`
	InstanceID    string    `db:"instance_id" expr:"@.instance_id::text"`
	Reason        string    `db:"reason"`
	RemoteAddress string    `db:"remote_address"`
	MachineID     string    `db:"machine_id"`
	BootID        string    `db:"boot_id"`
	RefusedAt     time.Time `db:"refused_at"`
	Version       int64     `db:"version"`
}

// refusedInstance is an instance that was refused, with its workspace's name and epoch where that is known.
type refusedInstance struct {
	refusedFields

	Name         string `db:"name"`
	PresentEpoch int64  `db:"present_epoch"`
}

var refusedInstances = pg.Define(pg.RoleLifecycle, "detect.refused_instances", `
		SELECT `+pg.Columns[refusedFields]("w")+`, coalesce(p.name, '') AS name, coalesce(p.epoch, 0) AS present_epoch
		FROM lifecycle.woken_instance w LEFT JOIN lifecycle.workspace p ON p.id = w.workspace_id
		WHERE w.refused_at > mesh.clock() - make_interval(secs => $1)`)

// Woken returns the instances that were refused within Config.WokenFor.
func (d *Detectors) Woken(ctx context.Context) ([]finding.Seen, error) {
	list, err := pg.All[refusedInstance](ctx, d.db, refusedInstances, d.cfg.WokenFor.Seconds())
	if err != nil {
		return nil, fmt.Errorf("read refused instances: %w", err)
	}
	out := make([]finding.Seen, 0, len(list))
	for _, r := range list {
		out = append(out, finding.Seen{
			Kind: EndedWoke, Severity: finding.P0, SubjectType: "instance",
			SubjectID: instanceKey{r.WorkspaceID, r.Epoch}.String(), WorkspaceID: r.WorkspaceID, TenantID: r.TenantID,
			NodeID: r.NodeID, NextAction: nextWoke, Certain: true,
			Summary: fmt.Sprintf("the instance of epoch %d of %q, which is over, was started again and asked for a session; "+
				"it was refused as %s", r.Epoch, r.Name,
				r.Reason),
			Before: map[string]any{"workspace": r.Name, "present_epoch": r.PresentEpoch},
			After: map[string]any{
				"reason": r.Reason, "epoch": r.Epoch, "instance_id": r.InstanceID, "remote_address": r.RemoteAddress,
				"machine_id": r.MachineID, "boot_id": r.BootID, "reports": r.Version,
				"refused_at": r.RefusedAt.UTC().Format(time.RFC3339Nano),
			},
		})
	}
	return out, nil
}

// ofStrays is a workspace whose instances left processes behind.
type ofStrays struct {
	ID       string `db:"id" expr:"@.id::text"`
	TenantID string `db:"tenant_id" expr:"@.tenant_id::text"`
}

var workspacesOfStrays = pg.Define(pg.RoleLifecycle, "detect.workspaces_of_strays",
	`SELECT `+pg.Columns[ofStrays]("w")+` FROM lifecycle.workspace w WHERE w.id = ANY ($1::uuid[])`)

// strays makes findings of the ended instances whose processes the driver found running, and ended, within the last
// hour.
func (d *Detectors) strays(ctx context.Context, kind commonv1.PlacementDriver,
	instances []placement.Instance) ([]finding.Seen,
	error,
) {
	var now time.Time
	var out []finding.Seen
	var ids []string // of the workspaces of out
	for _, b := range instances {
		if b.Strays == 0 || b.StraysAt.IsZero() {
			continue
		}
		if now.IsZero() {
			if err := pg.QueryRow(ctx, d.db, clockNow).Scan(&now); err != nil {
				return nil, fmt.Errorf("read clock: %w", err)
			}
		}
		if now.Sub(b.StraysAt) > d.cfg.WokenFor {
			continue
		}
		seen := finding.Seen{
			Kind: EndedWoke, Severity: finding.P0, SubjectType: "instance",
			SubjectID: instanceKey{b.WorkspaceID, b.Epoch}.String(), NextAction: nextStrays, Certain: true,
			Summary: fmt.Sprintf("%d processes of epoch %d, which the launch log says has ended, ran on its host; they "+
				"were ended", b.Strays, b.Epoch),
			Before: map[string]any{"ended_at": b.EndedAt.UTC().Format(time.RFC3339)},
			After: map[string]any{
				"processes": b.Strays, "provider_id": b.ProviderID, "placement": names.Of(kind),
				"found_at": b.StraysAt.UTC().Format(time.RFC3339),
			},
		}
		out, ids = append(out, seen), append(ids, b.WorkspaceID)
	}
	if len(out) == 0 {
		return nil, nil
	}
	list, err := pg.All[ofStrays](ctx, d.db, workspacesOfStrays, ids)
	if err != nil {
		return nil, fmt.Errorf("read workspaces of strays: %w", err)
	}
	for _, w := range list {
		for i := range out {
			if ids[i] == w.ID {
				out[i].WorkspaceID, out[i].TenantID = w.ID, w.TenantID
			}
		}
	}
	return out, nil
}
