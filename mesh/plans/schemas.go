package plans

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// schemaOf is the schema of a workspace in the workload database.
type schemaOf struct {
	Name        string `db:"deterministic_name"`
	WorkspaceID string `db:"workspace_id" expr:"@.workspace_id::text"`
}

var (
	schemasOfFleet = pg.Define(pg.RoleOwner, "plans.schemas_of_fleet", `
		SELECT `+pg.Columns[schemaOf]("c")+` FROM lifecycle.resource_claim c
			WHERE c.kind = 'schema' AND c.released_at IS NULL`)
	schemasThere = pg.DefineUnprepared(pg.RoleOwner, "plans.schemas_there", "it is of the workload database",
		func(struct{}) string {
			return `SELECT name FROM gpuaas_fence.schema`
		})
	fenceSchemas = pg.DefineUnprepared(pg.RoleOwner, "plans.fence_schemas", "it is of the workload database",
		func(struct{}) string {
			return `
			INSERT INTO gpuaas_fence.schema (name, workspace_id, epoch, op_seq, dropped)
			SELECT name, id, 1, 1, false FROM unnest($1::text[], $2::uuid[]) x (name, id)`
		})
)

// makeSchemas makes the schemas and roles that the workspaces of a fleet have claims on, empty and without a password,
// in the workload database of the mesh that the template is from.
func makeSchemas(ctx context.Context, meshURL, workloadsURL string) error {
	mesh, err := pgx.Connect(ctx, meshURL)
	if err != nil {
		return fmt.Errorf("connect to the database of the fleet: %w", err)
	}
	defer mesh.Close(context.WithoutCancel(ctx)) // nothing is kept
	list, err := pg.All[schemaOf](ctx, mesh, schemasOfFleet)
	if err != nil {
		return fmt.Errorf("read the claims on schemas: %w", err)
	}
	conn, err := pgx.Connect(ctx, workloadsURL)
	if err != nil {
		return fmt.Errorf("connect to the workload database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	there, err := pg.Values[string](ctx, conn, schemasThere.For(struct{}{}))
	if err != nil {
		return fmt.Errorf("read the schemas of the template: %w", err)
	}
	list = slices.DeleteFunc(list, func(s schemaOf) bool { return slices.Contains(there, s.Name) })
	for batch := range slices.Chunk(list, 200) {
		var ddl strings.Builder
		var names, workspaces []string
		for _, s := range batch {
			id := pgx.Identifier{s.Name}.Sanitize()
			fmt.Fprintf(&ddl, "CREATE ROLE %s LOGIN; CREATE SCHEMA %s AUTHORIZATION %s; ", id, id, pg.RoleWorkloadAdmin)
			names, workspaces = append(names, s.Name), append(workspaces, s.WorkspaceID)
		}
		if _, err := conn.PgConn().Exec(ctx, ddl.String()).ReadAll(); err != nil {
			return fmt.Errorf("make schemas: %w", err)
		}
		if _, err := pg.Exec(ctx, conn, fenceSchemas.For(struct{}{}), names, workspaces); err != nil {
			return fmt.Errorf("fence schemas: %w", err)
		}
	}
	return nil
}
