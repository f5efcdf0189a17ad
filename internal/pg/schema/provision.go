package schema

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// provisionLock is the advisory lock of Provision, in the maintenance database.
const provisionLock = 0x67707561_0001

// Provisioning describes what Provision makes.
type Provisioning struct {
	// Database is the mesh's; empty means gpuaas.
	Database string
	// WorkloadDatabase is the tenants'; empty means gpuaas_workloads, "-" makes none.
	WorkloadDatabase string
	// Passwords holds a password of printable ASCII for each of pg.Roles. If it holds one for gpuaas_owner, that role may
	// log in; otherwise migrations are run by the administrator, who takes the owner's role.
	Passwords map[string]string
	// Exclusive means that the cluster is ours alone: then only administrators may connect to its other databases.
	Exclusive bool
}

// Provision makes the databases and roles as an administrator (superuser, or CREATEDB and CREATEROLE) and sets rights
// and passwords as in p. It may be run again at any time; it revokes only what it granted.
//
// Before Postgres 16 CREATEROLE, which workload_admin needs, reaches every role that is not a superuser: there only the
// secrecy of its password protects the services' roles from it.
func Provision(ctx context.Context, adminURL string, p Provisioning) error {
	if p.Database == "" {
		p.Database = pg.DatabaseMesh
	}
	if p.WorkloadDatabase == "" {
		p.WorkloadDatabase = pg.DatabaseWorkloads
	}
	verifiers := map[string]string{}
	var problems []error
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		password, ok := p.Passwords[role]
		if !ok {
			if role != pg.RoleOwner {
				problems = append(problems, fmt.Errorf("no password for role %s", role))
			}
			continue
		}
		v, err := scramVerifier(password)
		if err != nil {
			problems = append(problems, fmt.Errorf("password of role %s: %w", role, err))
		}
		verifiers[role] = v
	}
	if err := errors.Join(problems...); err != nil {
		return fmt.Errorf("provision database: %w", err)
	}
	conn, err := pgx.Connect(ctx, adminURL)
	if err != nil {
		return fmt.Errorf("provision database: connect as administrator: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	a := admin{conn: conn}
	a.exec(ctx, "SELECT pg_advisory_lock($1)", int64(provisionLock))
	a.roles(ctx, verifiers)
	a.database(ctx, p.Database, pg.RoleOwner, pg.ServiceRoles())
	if p.WorkloadDatabase != "-" {
		a.database(ctx, p.WorkloadDatabase, pg.RoleWorkloadAdmin, nil)
	}
	if p.Exclusive {
		for _, other := range []string{"postgres", "template1"} {
			a.exec(ctx, "REVOKE ALL ON DATABASE "+quote(other)+" FROM PUBLIC")
		}
	}
	a.exec(ctx, "SELECT pg_advisory_unlock($1)", int64(provisionLock))
	if a.err != nil {
		return fmt.Errorf("provision database: %w", a.err)
	}
	names := []string{p.Database}
	if p.WorkloadDatabase != "-" {
		names = append(names, p.WorkloadDatabase)
	}
	for _, name := range names {
		if err := closePublicSchema(ctx, adminURL, name); err != nil {
			return fmt.Errorf("provision database: %w", err)
		}
	}
	return nil
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// attempts is how often a statement is run that the server refused because of another one.
const attempts = 6

// admin runs statements until the first one fails.
type admin struct {
	conn *pgx.Conn
	err  error
}

// exec runs a statement. Tenants' roles may be granted the workload database at the same time, and the server refuses a
// grant if another one was committed after it began: exec then runs the statement again.
func (a *admin) exec(ctx context.Context, sql string, args ...any) {
	for attempt := 1; a.err == nil; attempt++ {
		_, err := a.conn.Exec(ctx, sql, args...)
		if err == nil {
			return
		}
		if !pg.IsRetryable(err) || attempt == attempts {
			a.err = err
		}
	}
}

func (a *admin) exists(ctx context.Context, sql string, args ...any) bool {
	var ok bool
	if a.err == nil {
		a.err = a.conn.QueryRow(ctx, "SELECT EXISTS ("+sql+")", args...).Scan(&ok)
	}
	return ok
}

func (a *admin) roles(ctx context.Context, verifiers map[string]string) {
	super := a.exists(ctx, "SELECT FROM pg_roles WHERE rolname = current_user AND rolsuper")
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		if !a.exists(ctx, "SELECT FROM pg_roles WHERE rolname = $1", role) {
			a.exec(ctx, "CREATE ROLE "+quote(role))
		}
		attributes := " NOCREATEDB NOINHERIT NOCREATEROLE"
		if role == pg.RoleWorkloadAdmin {
			// The role acts for the roles that it makes: it gives them schemas and drops what they own.
			attributes = " NOCREATEDB INHERIT CREATEROLE"
		}
		if super {
			attributes += " NOSUPERUSER NOREPLICATION NOBYPASSRLS"
		}
		if v, ok := verifiers[role]; ok {
			// The verifier, not the password, so that neither the server's log nor its statistics ever hold one.
			attributes += " LOGIN PASSWORD '" + v + "'"
		} else {
			attributes += " NOLOGIN"
		}
		a.exec(ctx, "ALTER ROLE "+quote(role)+attributes)
		// A session that forgot its transaction holds locks, and keeps vacuum from removing dead rows. Pools of services set
		// this for themselves; a person who logs in by hand gets it here.
		a.exec(ctx, "ALTER ROLE "+quote(role)+" SET idle_in_transaction_session_timeout = '"+pg.IdleInTxTimeout+"'")
	}
	// Migrations, as the owner, transfer to it the functions that delete rows.
	if !a.exists(ctx, "SELECT FROM pg_roles WHERE rolname = $1", pg.RoleRetention) {
		a.exec(ctx, "CREATE ROLE "+quote(pg.RoleRetention))
	}
	a.exec(ctx, "ALTER ROLE "+quote(pg.RoleRetention)+" NOLOGIN NOCREATEDB NOINHERIT NOCREATEROLE")
	a.exec(ctx, "GRANT "+quote(pg.RoleRetention)+" TO "+quote(pg.RoleOwner))
	if !super {
		// An administrator who is not superuser may give a database only to a role of which it is a member.
		for _, role := range []string{pg.RoleOwner, pg.RoleWorkloadAdmin} {
			a.exec(ctx, "GRANT "+quote(role)+" TO current_user")
		}
	}
}

func (a *admin) database(ctx context.Context, name, owner string, users []string) {
	if !a.exists(ctx, "SELECT FROM pg_database WHERE datname = $1", name) {
		a.exec(ctx, "CREATE DATABASE "+quote(name)+" OWNER "+quote(owner)+" ENCODING 'UTF8' TEMPLATE template0")
	}
	a.exec(ctx, "REVOKE ALL ON DATABASE "+quote(name)+" FROM PUBLIC")
	for _, user := range users {
		a.exec(ctx, "GRANT CONNECT ON DATABASE "+quote(name)+" TO "+quote(user))
	}
}

// closePublicSchema revokes the rights that versions before 15 grant to PUBLIC.
func closePublicSchema(ctx context.Context, adminURL, database string) error {
	cfg, err := pgx.ParseConfig(adminURL)
	if err != nil {
		return fmt.Errorf("parse administrator's url: %w", err)
	}
	cfg.Database = database
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", database, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "REVOKE ALL ON SCHEMA public FROM PUBLIC"); err != nil {
		return fmt.Errorf("close public schema of %s: %w", database, err)
	}
	return nil
}

// scramVerifier returns the form in which Postgres stores a password (RFC 5803). Printable ASCII needs no SASLprep.
func scramVerifier(password string) (string, error) {
	const iterations = 4096
	if password == "" || slices.ContainsFunc([]byte(password), func(c byte) bool { return c < 0x20 || c > 0x7e }) {
		return "", errors.New("must be one or more printable ASCII characters")
	}
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return "", fmt.Errorf("draw salt: %w", err)
	}
	salted, err := pbkdf2.Key(sha256.New, password, salt, iterations, sha256.Size)
	if err != nil {
		return "", fmt.Errorf("derive key: %w", err)
	}
	mac := func(text string) []byte {
		h := hmac.New(sha256.New, salted)
		_, _ = h.Write([]byte(text)) // a hash never fails
		return h.Sum(nil)
	}
	stored := sha256.Sum256(mac("Client Key"))
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", iterations, b64(salt), b64(stored[:]), b64(mac("Server Key"))), nil
}
