package schema

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// movedAtOnce is how many roles of earlier builds get the right to connect through the group while one schema is made.
const movedAtOnce = 10

// LoginGroup is the role that may connect to the workload database, and the role of each workspace through it. It has
// no login and no other rights. Roles belong to the server, not to one database: the group has the number of its
// database in its name, so that the tenants of one mesh do not connect to the database of another. Grants for each role
// would all be in one value, which every new grant would write again.
type LoginGroup struct {
	Name    string `db:"name"`
	Ready   bool   `db:"ready"`   // it exists and may connect
	Version int    `db:"version"` // of the server
}

var findLoginGroup = pg.Define(pg.RoleWorkloadAdmin, "schema.find_login_group", `
	SELECT g.name, coalesce(has_database_privilege(r.oid, current_database(), 'CONNECT'), false) AS ready,
		current_setting('server_version_num')::int AS version
	FROM (SELECT ('workload_logins_' || oid)::name AS name FROM pg_database WHERE datname = current_database()) g
	LEFT JOIN pg_roles r ON r.rolname = g.name`)

var makeLogins = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.make_logins", "it makes a role",
	func(group string) string {
		return `DO $$ BEGIN
		IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '` + group + `') THEN
			CREATE ROLE ` + group + ` NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT;
		END IF;
	END $$`
	})

// firstWithSet is the first version of Postgres in which a member of a role can be kept from SET ROLE to it.
const firstWithSet = 160000

// Admit returns the statement that makes the role id, quoted, a member of the group. A member that can become the group
// can leave large objects that are the group's, and outlast the workspace.
func (g LoginGroup) Admit(id string) string {
	sql := "GRANT " + g.Name + " TO " + id
	if g.Version >= firstWithSet {
		sql += " WITH INHERIT TRUE, SET FALSE"
	}
	return sql
}

// grantsOfRoles are the grants of the right to connect that roles of workspaces have of their own, of those that
// workload_admin can revoke: a grant is revoked as its grantor, which the owner of the database is for workload_admin
// if that has the rights of the owner, and not while the role may have passed it on.
const grantsOfRoles = `
		FROM pg_database d
		CROSS JOIN aclexplode(d.datacl) g
		JOIN pg_roles r ON r.oid = g.grantee
		JOIN gpuaas_fence.schema f ON f.name = r.rolname
		WHERE d.datname = current_database() AND g.privilege_type = 'CONNECT' AND NOT g.is_grantable AND NOT f.dropped
			AND g.grantor = CASE WHEN pg_has_role(d.datdba, 'USAGE') THEN d.datdba
				ELSE to_regrole(quote_ident(current_user)) END`

var rolesHaveGrants = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.roles_have_grants", noFenceTable,
	func(struct{}) string {
		return `SELECT EXISTS (SELECT 1` + grantsOfRoles + `)`
	})

// rolesWithGrants leaves out the roles that another transaction is writing. From Postgres 16 on the maker of a role is
// a member without its rights, which stays.
var rolesWithGrants = pg.DefineUnprepared(pg.RoleWorkloadAdmin, "schema.roles_with_grants", noFenceTable,
	func(struct{}) string {
		return `
		SELECT f.name, EXISTS (SELECT 1 FROM pg_auth_members m
			WHERE m.roleid = r.oid AND m.member = to_regrole(quote_ident(current_user))
			AND to_jsonb(m) ->> 'inherit_option' IS DISTINCT FROM 'false') AS member` + grantsOfRoles + `
		LIMIT $1
		FOR UPDATE OF f SKIP LOCKED`
	})

var tryLockGrants = pg.Define(pg.RoleWorkloadAdmin, "schema.try_lock_grants",
	`SELECT pg_try_advisory_xact_lock(hashtextextended('gpuaas_grants', 1))`)

type grantedRole struct {
	Name   string `db:"name"`
	Member bool   `db:"member"`
}

// letConnect gives the role of a workspace, which inherits, the right to connect to the workload database.
func letConnect(ctx context.Context, tx pgx.Tx, id string) error {
	group, err := pg.One[LoginGroup](ctx, tx, findLoginGroup)
	if err != nil {
		return fmt.Errorf("look for the group of logins: %w", err)
	}
	if !group.Ready {
		if err := ShareGrants(ctx, tx); err != nil {
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
	if err := moveGrants(ctx, tx, group); err != nil {
		return err
	}
	// Last: from Postgres 16 on it locks the group until the transaction ends, and a transaction that has the group waits
	// for no lock of grants.
	if _, err := pg.Exec(ctx, tx, changeSchema.For(group.Admit(id))); err != nil {
		return fmt.Errorf("let the role connect: %w", err)
	}
	return nil
}

// moveGrants takes some of the roles that earlier builds granted the database by name into the group, and ends the
// memberships of workload_admin in them. Replicas of such a build drop and recreate what they are no member of. While
// another transaction has the lock of grants it moves none: with the fences of other workspaces locked it would wait.
func moveGrants(ctx context.Context, tx pgx.Tx, group LoginGroup) error {
	some, err := pg.Value[bool](ctx, tx, rolesHaveGrants.For(struct{}{}))
	if err != nil {
		return fmt.Errorf("look for grants of the database: %w", err)
	}
	if !some {
		return nil
	}
	free, err := pg.Value[bool](ctx, tx, tryLockGrants)
	if err != nil {
		return fmt.Errorf("try the lock of grants: %w", err)
	}
	if !free {
		return nil
	}
	roles, err := pg.All[grantedRole](ctx, tx, rolesWithGrants.For(struct{}{}), movedAtOnce)
	if err != nil {
		return fmt.Errorf("read grants of the database: %w", err)
	}
	if len(roles) == 0 {
		return nil
	}
	var ddl, names []string
	for _, r := range roles {
		id := pgx.Identifier{r.Name}.Sanitize()
		names = append(names, id)
		ddl = append(ddl, "ALTER ROLE "+id+" INHERIT", group.Admit(id))
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
