package detect

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// schemaClaim is a claim on a schema and the login role of its name.
type schemaClaim struct {
	ID          string `db:"id" expr:"@.id::text"`
	Name        string `db:"deterministic_name"`
	WorkspaceID string `db:"workspace_id" expr:"@.workspace_id::text"`
	TenantID    string `db:"tenant_id" expr:"@.tenant_id::text"`
}

var claimedSchemas = pg.Define(pg.RoleLifecycle, "detect.claimed_schemas", `
		SELECT `+pg.Columns[schemaClaim]("c")+` FROM lifecycle.resource_claim c
		WHERE `+scan.Page("c.workspace_id")+` AND c.kind = 'schema' AND c.released_at IS NULL
			AND (CASE WHEN $3 THEN c.orphaned_at IS NULL OR `+busy("c.workspace_id")+`
				ELSE c.confirmed_at IS NOT NULL AND c.orphaned_at IS NULL AND NOT `+busy("c.workspace_id")+` END)`)

// heldSchemas reads the claims on schemas that exist according to our rows. With all, it includes unconfirmed claims
// and those of workspaces with work under way. A claim that was given up counts only with all, and only if a run may
// adopt it again.
func (d *Detectors) heldSchemas(ctx context.Context, all bool) (map[schemaClaim]bool, error) {
	list, err := scan.All[schemaClaim](ctx, d.pages, "workspace", claimedSchemas, all)
	if err != nil {
		return nil, fmt.Errorf("read claims on schemas: %w", err)
	}
	out := make(map[schemaClaim]bool, len(list))
	for _, c := range list {
		out[c] = true
	}
	return out, nil
}

var schemasGivenUp = pg.Define(pg.RoleLifecycle, "detect.schemas_given_up", `
		SELECT `+pg.Columns[schemaClaim]("c")+` FROM lifecycle.resource_claim c
		WHERE c.kind = 'schema' AND c.released_at IS NULL AND c.orphaned_at IS NOT NULL ORDER BY c.id`)

// leftSchemas reads the claims on schemas that were given up, by name: a forced release leaves their schemas in the
// database.
func (d *Detectors) leftSchemas(ctx context.Context) (map[string]schemaClaim, error) {
	list, err := pg.All[schemaClaim](ctx, d.db, schemasGivenUp)
	if err != nil {
		return nil, fmt.Errorf("read claims on schemas that were given up: %w", err)
	}
	out := make(map[string]schemaClaim, len(list))
	for _, c := range list {
		out[c.Name] = c
	}
	return out, nil
}

// schemaThere describes what the workload database has under one name.
type schemaThere struct {
	schema, role bool
	workspaceID  string // the last to write it, by its fence
}

// covered reports whether all that stands in the workload database is held.
func covered(there map[string]schemaThere, held map[string]bool) bool {
	for name, t := range there {
		if !held[name] && (t.schema || t.role) {
			return false
		}
	}
	return true
}

// Schemas compares the workload database with the claims on it. The claims are read before the schemas, and after them
// if a schema is missing; the schemas are read before the claims that should cover them, because a claim is written
// before its schema is made.
func (d *Detectors) Schemas(ctx context.Context) ([]finding.Seen, error) {
	var before map[schemaClaim]bool
	var left map[string]schemaClaim
	err := pg.InTx(ctx, d.pool, func(ctx context.Context, tx pgx.Tx) error {
		in := d.Over(tx)
		var err error
		if before, err = in.heldSchemas(ctx, false); err == nil {
			left, err = in.leftSchemas(ctx)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	claimed := slices.Collect(maps.Keys(left))
	for c := range before {
		claimed = append(claimed, c.Name)
	}
	there, err := d.schemas(ctx, claimed)
	if err != nil {
		return nil, err
	}
	held := make(map[string]bool, len(before))
	complete := true
	for c := range before {
		held[c.Name] = true
		complete = complete && there[c.Name].schema && there[c.Name].role
	}
	var after map[schemaClaim]bool
	if !complete {
		if after, err = d.heldSchemas(ctx, false); err != nil {
			return nil, err
		}
	}
	if !covered(there, held) {
		all, err := d.heldSchemas(ctx, true)
		if err != nil {
			return nil, err
		}
		held = make(map[string]bool, len(all))
		for c := range all {
			held[c.Name] = true
		}
	}
	var out []finding.Seen
	for c := range before {
		if t := there[c.Name]; after[c] && (!t.schema || !t.role) {
			out = append(out, finding.Seen{
				Kind: claimEmpty, Severity: finding.P1, SubjectType: "claim", SubjectID: c.ID, WorkspaceID: c.WorkspaceID,
				TenantID: c.TenantID, NextAction: NextClaimEmpty,
				Summary: fmt.Sprintf("the %s that is claimed as %q is gone from the workload database", missingPart(t), c.Name),
				Before:  map[string]any{"schema": true, "role": true}, After: map[string]any{"schema": t.schema, "role": t.role},
			})
		}
	}
	for name, t := range there {
		if held[name] || !t.schema && !t.role {
			continue
		}
		seen := finding.Seen{
			Kind: resourceUnclaimed, Severity: finding.P2, SubjectType: "schema", SubjectID: name, WorkspaceID: t.workspaceID,
			NextAction: nextUnclaimed,
			Summary:    fmt.Sprintf("%q stands in the workload database and no claim holds it", name),
			Before:     map[string]any{"claim": "none"}, After: map[string]any{"schema": t.schema, "role": t.role},
		}
		if c, ok := left[name]; ok {
			seen.WorkspaceID, seen.TenantID, seen.NextAction = c.WorkspaceID, c.TenantID, NextLeftBehind
			seen.Summary = fmt.Sprintf("%q was left behind in the workload database: its claim was given up", name)
			seen.Before = map[string]any{"claim": "given up", "claim_id": c.ID}
		}
		out = append(out, seen)
	}
	return out, nil
}

func missingPart(t schemaThere) string {
	switch {
	case t.schema:
		return "role"
	case t.role:
		return "schema"
	default:
		return "schema with its role"
	}
}

var fencesExist = pg.Define(pg.RoleWorkloadAdmin, "detect.fences_exist",
	`SELECT to_regclass('gpuaas_fence.schema') IS NOT NULL`)

var schemasPresent = pg.Define(pg.RoleWorkloadAdmin, "detect.schemas_present", `
		WITH n AS (SELECT nspname::text AS name FROM pg_namespace WHERE starts_with(nspname, 't_')
			UNION SELECT unnest($1::text[]))
		SELECT n.name, EXISTS (SELECT 1 FROM pg_namespace x WHERE x.nspname = n.name) AS has_schema,
			EXISTS (SELECT 1 FROM pg_roles r WHERE r.rolname = n.name) AS has_role FROM n`)

// fencedSchemas reads which workspace last wrote each schema.
var fencedSchemas = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "detect.fenced_schemas",
	"the first schema of a workspace makes the table",
	func(struct{}) string {
		return `SELECT f.name, f.workspace_id::text AS workspace_id FROM gpuaas_fence.schema f`
	})

// schemas reads the tenants' schemas and roles in the workload database: every schema, and the roles of schemas, of
// claims and of names written through a fence. A role belongs to the whole server, so that a role with none of these
// names may belong to another mesh.
func (d *Detectors) schemas(ctx context.Context, claimed []string) (map[string]schemaThere, error) {
	var out map[string]schemaThere
	err := pg.InTx(ctx, d.workloads, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		out, err = schemasIn(ctx, tx, claimed)
		return err
	})
	return out, err
}

func schemasIn(ctx context.Context, tx pgx.Tx, claimed []string) (map[string]schemaThere, error) {
	out := map[string]schemaThere{}
	fenced, err := pg.Value[bool](ctx, tx, fencesExist)
	if err != nil {
		return nil, fmt.Errorf("read whether schemas have fences: %w", err)
	}
	known := slices.Clone(claimed)
	if fenced {
		fences, err := pg.All[struct {
			Name        string `db:"name"`
			WorkspaceID string `db:"workspace_id"`
		}](ctx, tx, fencedSchemas.For(struct{}{}))
		if err != nil {
			return nil, fmt.Errorf("read fences of schemas: %w", err)
		}
		for _, f := range fences {
			out[f.Name] = schemaThere{workspaceID: f.WorkspaceID}
			known = append(known, f.Name)
		}
	}
	present, err := pg.All[struct {
		Name   string `db:"name"`
		Schema bool   `db:"has_schema"`
		Role   bool   `db:"has_role"`
	}](ctx, tx, schemasPresent, known)
	if err != nil {
		return nil, fmt.Errorf("list schemas: %w", err)
	}
	for _, p := range present {
		out[p.Name] = schemaThere{workspaceID: out[p.Name].workspaceID, schema: p.Schema, role: p.Role}
	}
	return out, nil
}
