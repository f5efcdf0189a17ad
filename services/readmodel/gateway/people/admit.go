package people

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
)

const (
	minLife     = 5 * time.Minute
	defaultLife = 7 * 24 * time.Hour
	// personKept is how long a person stays listed after being ended.
	personKept = 30 * 24 * time.Hour
)

// Admission describes a person to be created.
type Admission struct {
	Name     string
	TenantID string // empty for people of the operator
	Roles    []string
	Life     time.Duration

	key string // idempotency key of the request; may be empty
}

// namePattern equals the pattern in the proto. A person's name appears in audit entries, in logs and in names of
// contexts.
var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9._@-]{0,61}[a-z0-9])?$`)

func (a Admission) validate() error {
	if !namePattern.MatchString(a.Name) || isID(a.Name) {
		return errors.New("the name of a person is 1 to 63 lower case letters, digits and . _ @ -, and no id")
	}
	if isService(a.Name) {
		return fmt.Errorf("%s is the name by which a service acts", a.Name)
	}
	if a.Life <= 0 || a.Life > sessionMax {
		return errors.New("a person lives for at most thirty days")
	}
	return nil
}

// isService reports whether a service acts by this name, in audit entries and as who closed an incident.
func isService(name string) bool {
	return slices.Contains([]string{"lifecycle", "nodeapi", "readmodel", "recovery", "watchdog", "auto_recovery"}, name)
}

func isID(text string) bool {
	_, whole := lookup.ID(text)
	return whole
}

// Admit creates a person without the API, for programs that can log in to readmodel's database: `gpuaas dev`, a
// cluster, `gpuaas compose admit`. A live person of that name with the same rights is kept, gets a later expiry and a
// further session; one with other rights is replaced. It returns the token of the new session, which is stored nowhere.
func Admit(ctx context.Context, db *pgxpool.Pool, a Admission) (string, error) {
	if err := a.validate(); err != nil {
		return "", fmt.Errorf("admit %q: %w", a.Name, err)
	}
	if a.TenantID != "" {
		id, whole := lookup.ID(a.TenantID)
		if !whole {
			return "", fmt.Errorf("admit %q: the tenant is no id", a.Name)
		}
		a.TenantID = id
	}
	a.Roles = sorted(a.Roles)
	var token string
	err := pg.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		id, err := standing(ctx, tx, a)
		if err != nil {
			return err
		}
		action := "person.admit"
		if id == "" {
			p, err := insertPerson(ctx, tx, a, "")
			if err != nil {
				return err
			}
			id, action = p.GetPersonId(), "person.create"
		}
		if token, err = issue(ctx, tx, id, a.Name, a.TenantID, a.Roles, a.Life); err != nil {
			return err
		}
		_, err = audit.Record(ctx, tx, entryOf(action, a, id))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("admit %q: %w", a.Name, err)
	}
	// The program may have no sequencer to number the audit entry. An error is ignored since it only delays the number.
	_ = events.NotifyAppended(ctx, db)
	return token, nil
}

var liveOfName = pg.Define(pg.RoleReadmodel, "people.live_person_of_name", `
	SELECT person_id::text AS id, roles = $2 AND COALESCE(tenant_id::text, '') = $3 AS same FROM readmodel.person
	WHERE name = $1 AND ended_at IS NULL AND expires_at > mesh.clock() FOR UPDATE`)

var prolongPerson = pg.Define(pg.RoleReadmodel, "people.prolong_person", `
	UPDATE readmodel.person SET expires_at = GREATEST(expires_at, mesh.clock() + $2::interval) WHERE person_id = $1::uuid`)

// standing returns the id of the live person of a name if the person has these rights, and extends the expiry. A person
// with other rights is ended.
func standing(ctx context.Context, tx pgx.Tx, a Admission) (string, error) {
	type row struct {
		ID   string `db:"id"`
		Same bool   `db:"same"`
	}
	live, err := pg.One[row](ctx, tx, liveOfName, a.Name, a.Roles, a.TenantID)
	switch {
	case pg.IsNoRows(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("read person: %w", err)
	case !live.Same:
		_, err := endPerson(ctx, tx, live.ID, a.Name, "")
		return "", err
	}
	if _, err := pg.Exec(ctx, tx, prolongPerson, live.ID, a.Life); err != nil {
		return "", fmt.Errorf("prolong person: %w", err)
	}
	return live.ID, nil
}

// entryOf returns the audit entry for a change of a person.
func entryOf(action string, a Admission, id string) audit.Entry {
	return audit.Entry{
		Action: action, SubjectType: "person", SubjectID: a.Name, TenantID: a.TenantID,
		Details: map[string]any{"person_id": id, "roles": a.Roles, "life": a.Life.String()},
	}
}

var freeName = pg.Define(pg.RoleReadmodel, "people.free_name_of_expired_person", `
	UPDATE readmodel.person SET ended_at = expires_at WHERE name = $1 AND ended_at IS NULL AND expires_at <= mesh.clock()`)

var newPerson = pg.Define(pg.RoleReadmodel, "people.insert_person", `
	INSERT INTO readmodel.person (person_id, name, tenant_id, roles, created_by, expires_at, asked_life, idempotency_key)
	VALUES ($1::uuid, $2, NULLIF($3, '')::uuid, $4, $5, mesh.clock() + $6::interval, $6::interval, $7)
	ON CONFLICT (name) WHERE ended_at IS NULL DO NOTHING`)

// insertPerson inserts the row of a person whose name no live person has.
func insertPerson(ctx context.Context, tx pgx.Tx, a Admission, by string) (*readmodelv1.Person, error) {
	// The name of a person who has expired may be used again.
	if _, err := pg.Exec(ctx, tx, freeName, a.Name); err != nil {
		return nil, fmt.Errorf("free the name of an expired person: %w", err)
	}
	id := ids.New()
	tag, err := pg.Exec(ctx, tx, newPerson, id, a.Name, a.TenantID, a.Roles, by, a.Life, a.key)
	if err != nil {
		return nil, fmt.Errorf("insert person: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return nil, fault.New(commonv1.Reason_REASON_ALREADY_EXISTS, fmt.Sprintf("there is a person named %q", a.Name),
			fault.Remedy("choose another name, or end that person first with `gpuaas people end "+a.Name+"`"))
	}
	return readPerson(ctx, tx, id)
}

var endLife = pg.Define(pg.RoleReadmodel, "people.end_person", `
	UPDATE readmodel.person SET ended_at = mesh.clock(), ended_by = $2
	WHERE person_id = $1::uuid AND ended_at IS NULL AND expires_at > mesh.clock()`)

var endSessions = pg.Define(pg.RoleReadmodel, "people.end_sessions_of_person", `
	UPDATE readmodel.person_session SET revoked_at = mesh.clock(), revoked_by = $3
	WHERE (person_id = $1::uuid OR (person_id IS NULL AND subject = $2 AND $4)) AND revoked_at IS NULL`)

// endPerson ends a live person and all of the person's sessions, and reports whether the person was live.
func endPerson(ctx context.Context, tx pgx.Tx, id, name, by string) (bool, error) {
	tag, err := pg.Exec(ctx, tx, endLife, id, by)
	if err != nil {
		return false, fmt.Errorf("end person: %w", err)
	}
	// Sessions of that name that belong to no listed person end with the person.
	if _, err := pg.Exec(ctx, tx, endSessions, id, name, by, tag.RowsAffected() > 0); err != nil {
		return false, fmt.Errorf("end sessions of person: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}
