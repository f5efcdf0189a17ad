package workspace

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// movedAtOnce is how many roles of earlier builds get the right to connect through the group while one schema is made.
const movedAtOnce = 50

// loginGroup is the role that may connect to the workload database, and the role of each workspace through it. It has no
// login and nothing else. Roles are of the server: the group has the number of its database in its name, so that the
// tenants of one mesh do not connect to the database of another. A grant for each role would stand in one value, which
// every new one wrote again.
type loginGroup struct {
	Name    string `db:"name"`
	Ready   bool   `db:"ready"`   // it stands and may connect
	Version int    `db:"version"` // of the server
}

var findLoginGroup = pg.Define(pg.RoleWorkloadAdmin, "workspace.find_login_group", `
	SELECT g.name, coalesce(has_database_privilege(r.oid, current_database(), 'CONNECT'), false) AS ready,
		current_setting('server_version_num')::int AS version
	FROM (SELECT ('workload_logins_' || oid)::name AS name FROM pg_database WHERE datname = current_database()) g
	LEFT JOIN pg_roles r ON r.rolname = g.name`)

var makeLogins = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "workspace.make_logins", "it makes a role", func(group string) string {
	return `DO $$ BEGIN
		IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '` + group + `') THEN
			CREATE ROLE ` + group + ` NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT;
		END IF;
	END $$`
})

// firstWithSet is the first version of Postgres in which a member of a role can be kept from becoming it.
const firstWithSet = 160000

// admit returns the statement that makes the role id, quoted, a member of the group. A member that can become the group
// can leave large objects that are the group's, and outlast the workspace.
func (g loginGroup) admit(id string) string {
	sql := "GRANT " + g.Name + " TO " + id
	if g.Version >= firstWithSet {
		sql += " WITH INHERIT TRUE, SET FALSE"
	}
	return sql
}

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
	group, err := pg.One[loginGroup](ctx, tx, findLoginGroup)
	if err != nil {
		return fmt.Errorf("look for the group of logins: %w", err)
	}
	if !group.Ready {
		if err := shareGrants(ctx, tx); err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, makeLogins.For(group.Name)); err != nil {
			return fmt.Errorf("make the group of logins: %w", err)
		}
		grant := "GRANT CONNECT ON DATABASE " + databaseOf(tx) + " TO " + group.Name
		if _, err := pg.Exec(ctx, tx, changeSchema.For(grant)); err != nil {
			return fmt.Errorf("grant database: %w", err)
		}
	}
	if _, err := pg.Exec(ctx, tx, changeSchema.For(group.admit(id))); err != nil {
		return fmt.Errorf("let the role connect: %w", err)
	}
	return moveGrants(ctx, tx, group)
}

// moveGrants takes some of the roles that earlier builds granted the database by name into the group, and ends the
// memberships of workload_admin in them. Replicas of such a build drop and recreate what they are no member of.
func moveGrants(ctx context.Context, tx pgx.Tx, group loginGroup) error {
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
		ddl = append(ddl, "ALTER ROLE "+id+" INHERIT", group.admit(id))
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
