package workspace

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// roleOfLogins may connect to the workload database, and the role of each workspace through it. It has no login and
// nothing else. A grant for each role would stand in one value, which every new one wrote again.
const roleOfLogins = "workload_logins"

// movedAtOnce is how many roles of earlier builds get the right to connect through the group while one schema is made.
const movedAtOnce = 50

var loginsConnect = pg.Define(pg.RoleWorkloadAdmin, "workspace.logins_connect", `
	SELECT coalesce((SELECT has_database_privilege(oid, current_database(), 'CONNECT') FROM pg_roles WHERE rolname = $1), false)`)

// Roles are of the server: another database of it may make the group meanwhile.
var makeLogins = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "workspace.make_logins", "it makes a role", func(group string) string {
	return `DO $$ BEGIN
		IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '` + group + `') THEN
			CREATE ROLE ` + group + ` NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT;
		END IF;
	EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
	END $$`
})

// rolesWithGrants finds roles of workspaces with a grant of their own on the database, and leaves out those that another
// transaction is writing. From Postgres 16 on the maker of a role is a member without its rights, which stays.
var rolesWithGrants = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "workspace.roles_with_grants", noFenceTable, func(struct{}) string {
	return `
		SELECT f.name, EXISTS (SELECT 1 FROM pg_auth_members m WHERE m.roleid = r.oid AND m.member = to_regrole(quote_ident(current_user))
			AND to_jsonb(m) ->> 'inherit_option' IS DISTINCT FROM 'false') AS member
		FROM pg_database d
		CROSS JOIN aclexplode(d.datacl) g
		JOIN pg_roles r ON r.oid = g.grantee
		JOIN gpuaas_fence.schema f ON f.name = r.rolname
		WHERE d.datname = current_database()
		LIMIT $1
		FOR UPDATE OF f SKIP LOCKED`
})

type grantedRole struct {
	Name   string `db:"name"`
	Member bool   `db:"member"`
}

// letConnect gives the role of a workspace, which inherits, the right to connect to the workload database.
func letConnect(ctx context.Context, tx pgx.Tx, id string) error {
	ready, err := pg.Value[bool](ctx, tx, loginsConnect, roleOfLogins)
	if err != nil {
		return fmt.Errorf("look for the role of logins: %w", err)
	}
	if !ready {
		if err := shareGrants(ctx, tx); err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, makeLogins.For(roleOfLogins)); err != nil {
			return fmt.Errorf("make the role of logins: %w", err)
		}
		grant := "GRANT CONNECT ON DATABASE " + databaseOf(tx) + " TO " + roleOfLogins
		if _, err := pg.Exec(ctx, tx, changeSchema.For(grant)); err != nil {
			return fmt.Errorf("grant database: %w", err)
		}
	}
	if _, err := pg.Exec(ctx, tx, changeSchema.For("GRANT "+roleOfLogins+" TO "+id)); err != nil {
		return fmt.Errorf("let the role connect: %w", err)
	}
	return moveGrants(ctx, tx)
}

// moveGrants takes some of the roles that earlier builds granted the database by name into the group, and ends the
// memberships of workload_admin in them. Replicas of such a build drop and recreate what they are no member of.
func moveGrants(ctx context.Context, tx pgx.Tx) error {
	roles, err := pg.All[grantedRole](ctx, tx, rolesWithGrants.For(struct{}{}), movedAtOnce)
	if err != nil {
		return fmt.Errorf("look for grants of the database: %w", err)
	}
	if len(roles) == 0 {
		return nil
	}
	if err := shareGrants(ctx, tx); err != nil {
		return err
	}
	var ddl, names []string
	for _, r := range roles {
		id := pgx.Identifier{r.Name}.Sanitize()
		names = append(names, id)
		ddl = append(ddl, "ALTER ROLE "+id+" INHERIT", "GRANT "+roleOfLogins+" TO "+id)
		if r.Member {
			ddl = append(ddl, "REVOKE "+id+" FROM CURRENT_USER")
		}
	}
	ddl = append(ddl, "REVOKE CONNECT ON DATABASE "+databaseOf(tx)+" FROM "+strings.Join(names, ", "))
	for _, sql := range ddl {
		if _, err := pg.Exec(ctx, tx, changeSchema.For(sql)); err != nil {
			return fmt.Errorf("move the grants of roles: %w", err)
		}
	}
	return nil
}

func databaseOf(tx pgx.Tx) string { return pgx.Identifier{tx.Conn().Config().Database}.Sanitize() }
