package schema

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

var roleExists = pg.Define(pg.RoleWorkloadAdmin, "schema.role_exists",
	`SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = $1)`)

// Drop ends the sessions of the role, then drops the schema and the role. Dropping what does not exist succeeds. With
// keepRole the role stays, without its login and its sessions.
func Drop(ctx context.Context, tx pgx.Tx, name string, keepRole bool) error {
	id := pgx.Identifier{name}.Sanitize()
	role, err := pg.Value[bool](ctx, tx, roleExists, name)
	if err != nil {
		return fmt.Errorf("look for role: %w", err)
	}
	if role {
		if err := join(ctx, tx, name); err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, endSessionsOfRole, name); err != nil {
			return fmt.Errorf("end sessions of role: %w", err)
		}
	}
	// This may wait for sessions that read the schema.
	if _, err := pg.Exec(ctx, tx, changeSchema.For("DROP SCHEMA IF EXISTS "+id+" CASCADE")); err != nil {
		return fmt.Errorf("drop schema: %w", err)
	}
	if !role {
		return nil
	}
	if keepRole {
		return leave(ctx, tx, name)
	}
	if err := ShareGrants(ctx, tx); err != nil {
		return err
	}
	for _, sql := range []string{"DROP OWNED BY " + id + " CASCADE", "DROP ROLE IF EXISTS " + id} {
		if _, err := pg.Exec(ctx, tx, changeSchema.For(sql)); err != nil {
			return fmt.Errorf("drop role: %w", err)
		}
	}
	return nil
}
