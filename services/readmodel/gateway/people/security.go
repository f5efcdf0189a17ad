package people

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
)

const (
	roleSecurity = "security"
	// securityRemains is how long another person's role security must still last before a person with that role may be
	// ended.
	securityRemains = 24 * time.Hour
)

type securityPerson struct {
	ID        string    `db:"person_id" expr:"@.person_id::text"`
	Name      string    `db:"name"`
	ExpiresAt time.Time `db:"expires_at"`
	Lasts     bool      `db:"lasts" expr:"@.expires_at > mesh.clock() + $2::interval"`
}

var lockSecurity = pg.Define(pg.RoleReadmodel, "people.lock_people_with_security", `
	SELECT `+pg.Columns[securityPerson]("p")+` FROM readmodel.person p
	WHERE p.ended_at IS NULL AND p.expires_at > mesh.clock() AND p.tenant_id IS NULL AND $1 = ANY (p.roles)
		ORDER BY p.person_id FOR UPDATE`)

// keepOneSecurity refuses to end a live person of the operator who has the role security, unless another such person
// remains for securityRemains. It locks the rows of all of them, so that of two people who end each other at the same
// time the second transaction sees the first.
func keepOneSecurity(ctx context.Context, tx pgx.Tx, found *readmodelv1.Person) error {
	locked, err := pg.All[securityPerson](ctx, tx, lockSecurity, roleSecurity, securityRemains)
	if err != nil {
		return fmt.Errorf("lock people with the role security: %w", err)
	}
	var isOne, remains bool
	var soon []string
	for _, p := range locked {
		switch {
		case p.ID == found.GetPersonId():
			isOne = true
		case p.Lasts:
			remains = true
		default:
			soon = append(soon, fmt.Sprintf("%s, who has the role security, expires at %s, in less than %dh",
				p.Name, p.ExpiresAt.UTC().Format(time.RFC3339), int(securityRemains.Hours())))
		}
	}
	if !isOne || remains {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_LAST_SECURITY_PERSON, "",
		fault.Unmet(soon[:min(len(soon), lookup.Candidates)]...))
}
