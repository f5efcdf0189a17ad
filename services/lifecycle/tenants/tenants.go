package tenants

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/rollback"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// Quota bounds what a tenant may have at once.
type Quota struct {
	Workspaces   int32 `yaml:"workspaces"`
	GPUs         int32 `yaml:"gpus"`
	StorageBytes int64 `yaml:"storage_bytes"`
}

// Tenant is a tenant with what it may have at once.
type Tenant struct {
	ID, Name string
	Quota    Quota
	Created  *timestamppb.Timestamp
	Version  int64
}

// storedTenant is a tenant as it is read.
type storedTenant struct {
	ID           string    `db:"id" expr:"@.id::text"`
	Name         string    `db:"name"`
	Workspaces   int32     `db:"quota_workspaces"`
	GPUs         int32     `db:"quota_gpus"`
	StorageBytes int64     `db:"quota_storage_bytes"`
	CreatedAt    time.Time `db:"created_at"`
	Version      int64     `db:"version"`
}

var tenantColumns = pg.Columns[storedTenant]("t")

// oneTenant runs a statement that returns one tenant. Without a row the error is pgx.ErrNoRows.
func oneTenant(ctx context.Context, q pg.Querier, s *pg.Statement, args ...any) (Tenant, error) {
	d, err := pg.One[storedTenant](ctx, q, s, args...)
	if err != nil {
		return Tenant{}, err
	}
	return d.tenant(), nil
}

func (d storedTenant) tenant() Tenant {
	return Tenant{
		ID: d.ID, Name: d.Name, Quota: Quota{Workspaces: d.Workspaces, GPUs: d.GPUs, StorageBytes: d.StorageBytes},
		Created: timestamppb.New(d.CreatedAt),
		Version: d.Version,
	}
}

func (t Tenant) event() events.Event {
	return events.Event{
		Kind: "tenant.changed", AggregateType: "tenant", AggregateID: t.ID, AggregateVersion: t.Version, Payload: t.proto(),
		Correlation: events.Correlation{TenantID: t.ID},
	}
}

func (t Tenant) proto() *lifecyclev1.Tenant {
	return &lifecyclev1.Tenant{
		TenantId: t.ID, Name: t.Name, CreatedAt: t.Created, Version: t.Version,
		Quota: &lifecyclev1.Quota{Workspaces: t.Quota.Workspaces, Gpus: t.Quota.GPUs, StorageBytes: t.Quota.StorageBytes},
	}
}

var insertTenant = pg.Define(pg.RoleLifecycle, "tenants.insert_tenant", `
			INSERT INTO lifecycle.tenant AS t (id, name, quota_workspaces, quota_gpus, quota_storage_bytes)
				VALUES ($1, $2, $3, $4, $5)
			ON CONFLICT (name) DO NOTHING RETURNING `+tenantColumns)

var tenantByName = pg.Define(pg.RoleLifecycle, "tenants.tenant_by_name",
	`SELECT `+tenantColumns+` FROM lifecycle.tenant t WHERE t.name = $1`)

// Register makes tenants.
type Register struct {
	DB *pgxpool.Pool
	// Audit records a tenant with its making.
	Audit *audit.Log
	// DefaultQuota is the quota of a tenant that is made without one.
	DefaultQuota Quota
	// Committed is called after each commit that wrote events.
	Committed func()
}

// Create makes a tenant. A second request with the same name and the same quota returns the tenant that exists.
func (r *Register) Create(ctx context.Context,
	req *lifecyclev1.CreateTenantRequest,
) (*lifecyclev1.CreateTenantResponse, error) {
	q := r.DefaultQuota
	if req.GetQuota() != nil {
		q = Quota{
			Workspaces: req.GetQuota().GetWorkspaces(), GPUs: req.GetQuota().GetGpus(),
			StorageBytes: req.GetQuota().GetStorageBytes(),
		}
	}
	res := &lifecyclev1.CreateTenantResponse{}
	err := pg.InTx(ctx, r.DB, func(ctx context.Context, tx pgx.Tx) error {
		if err := rollback.Refuse(ctx, tx); err != nil {
			return err
		}
		t, err := oneTenant(ctx, tx, insertTenant, ids.New(), req.GetName(), q.Workspaces, q.GPUs, q.StorageBytes)
		if errors.Is(err, pgx.ErrNoRows) {
			if t, err = oneTenant(ctx, tx, tenantByName, req.GetName()); err != nil {
				return fmt.Errorf("read tenant: %w", err)
			}
			if req.GetQuota() != nil && t.Quota != q {
				return fault.New(commonv1.Reason_REASON_ALREADY_EXISTS, "a tenant of this name has another quota",
					fault.Conflicting(t.ID))
			}
			res.Tenant, res.Existed = t.proto(), true
			return nil
		}
		if err != nil {
			return fmt.Errorf("insert tenant: %w", err)
		}
		res.Tenant = t.proto()
		made := t.event()
		made.CorrelationID = obs.From(ctx).CorrelationID
		res.Pos, err = events.Append(ctx, tx, made)
		if err != nil {
			return fmt.Errorf("report tenant: %w", err)
		}
		_, err = r.Audit.Record(ctx, tx, audit.Entry{
			Action: "tenant.create", SubjectType: "tenant", SubjectID: t.ID, TenantID: t.ID,
			Details: map[string]any{"name": t.Name, "quota": t.proto().GetQuota()},
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	r.Committed()
	return res, nil
}

// tenantRef selects how a tenant is named, and whether its row is locked.
type tenantRef struct{ byID, locked bool }

var tenantBy = pg.DefineDynamic(pg.RoleLifecycle, "tenants.tenant_by", func(ref tenantRef) string {
	sql := `SELECT ` + tenantColumns + ` FROM lifecycle.tenant t WHERE t.name = $1`
	if ref.byID {
		sql = `SELECT ` + tenantColumns + ` FROM lifecycle.tenant t WHERE t.id::text = $1`
	}
	if ref.locked {
		sql += ` FOR UPDATE`
	}
	return sql
}, tenantRef{}, tenantRef{byID: true, locked: true})

// For reads a tenant by name or id for the caller. A tenant that is not the caller's is not found, like one that
// does not exist.
func For(ctx context.Context, q pg.Querier, ref string, lockRow bool) (Tenant, error) {
	t, err := oneTenant(ctx, q, tenantBy.For(tenantRef{byID: ids.Valid(ref), locked: lockRow}), ref)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return Tenant{}, fmt.Errorf("read tenant: %w", err)
	}
	if person, ok := rpc.PersonFrom(ctx); err != nil || (ok && person.TenantID != "" && person.TenantID != t.ID) {
		return Tenant{}, fault.New(commonv1.Reason_REASON_TENANT_UNKNOWN, "there is no tenant "+fault.Named(ref))
	}
	return t, nil
}

var usageWithin = pg.Define(pg.RoleLifecycle, "tenants.usage_within", `
		SELECT count(*)::int AS workspaces, coalesce(sum((w.spec->>'gpus')::bigint), 0)::bigint AS gpus,
			coalesce(sum((w.spec->>'storage_bytes')::bigint), 0)::bigint AS storage_bytes
		FROM lifecycle.workspace w WHERE w.id::text <> $2 AND w.id = ANY (ARRAY(
			SELECT u.id FROM lifecycle.workspace u WHERE u.tenant_id = $1 AND u.standing = 2
			UNION SELECT a.workspace_id FROM lifecycle.allocation a WHERE a.tenant_id = $1 AND a.state <> 'released'))`)

// Within enforces the quota of a tenant, whose row the caller has locked. What a failed workspace still has allocated
// counts; the workspace with the id except does not.
func Within(ctx context.Context, tx pgx.Tx, t Tenant, except string, spec *lifecyclev1.WorkspaceSpec) error {
	used, err := pg.One[struct {
		Workspaces   int32 `db:"workspaces"`
		GPUs         int64 `db:"gpus"`
		StorageBytes int64 `db:"storage_bytes"`
	}](ctx, tx, usageWithin, t.ID, except)
	if err != nil {
		return fmt.Errorf("count what the tenant has: %w", err)
	}
	var unmet []string
	if used.Workspaces+1 > t.Quota.Workspaces {
		unmet = append(unmet, fmt.Sprintf("the quota is %d workspaces, and %d exist", t.Quota.Workspaces,
			used.Workspaces))
	}
	if used.GPUs+int64(spec.GetGpus()) > int64(t.Quota.GPUs) {
		unmet = append(unmet, fmt.Sprintf("the quota is %d GPUs, %d are in use, and %d more are asked for", t.Quota.GPUs,
			used.GPUs, spec.GetGpus()))
	}
	if used.StorageBytes+spec.GetStorageBytes() > t.Quota.StorageBytes {
		unmet = append(unmet, fmt.Sprintf("the quota is %d bytes of storage, %d are in use, and %d more are asked for",
			t.Quota.StorageBytes, used.StorageBytes, spec.GetStorageBytes()))
	}
	if len(unmet) > 0 {
		return fault.New(commonv1.Reason_REASON_QUOTA_EXCEEDED, "tenant "+t.Name+" has no room for this workspace",
			fault.Unmet(unmet...))
	}
	return nil
}

// Workspace reads a workspace for the caller. A workspace of another tenant is not found.
func Workspace(ctx context.Context, q pg.Querier, id string) (workspace.Row, error) {
	w, err := workspace.Get(ctx, q, id)
	if err != nil && !pg.IsNoRows(err) {
		return workspace.Row{}, err
	}
	if person, ok := rpc.PersonFrom(ctx); err != nil || (ok && person.TenantID != "" && person.TenantID != w.TenantID) {
		return workspace.Row{}, fault.NoSuch("workspace", id)
	}
	return w, nil
}
