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
)

// againFor is how long the request that created a person may be repeated. A client that lost the answer repeats the
// request soon; a repeat that comes much later must not end a token that is in use.
const againFor = 24 * time.Hour

var lockKey = pg.Define(pg.RoleReadmodel, "people.lock_idempotency_key", `
	SELECT pg_advisory_xact_lock(hashtextextended('person/' || $1::text || '/' || $2::text, 1))`)

var personOfKey = pg.Define(pg.RoleReadmodel, "people.person_of_idempotency_key", `
	SELECT person_id::text AS id, name = $3 AND roles = $4 AND COALESCE(tenant_id::text, '') = $5
		AND asked_life = $6::interval AS same,
		ended_at IS NULL AND expires_at > mesh.clock() AS live, created_at + $7::interval > mesh.clock() AS fresh
	FROM readmodel.person WHERE created_by = $1 AND idempotency_key = $2`)

// madeBefore returns the id of the person that the same request of the same giver created; empty if there is none. It
// locks the key until the end of the transaction, so that of two concurrent requests one creates the person and the
// other finds it.
func madeBefore(ctx context.Context, tx pgx.Tx, a Admission, by string) (string, error) {
	if a.key == "" {
		return "", nil
	}
	if _, err := pg.Exec(ctx, tx, lockKey, by, a.key); err != nil {
		return "", fmt.Errorf("lock idempotency key: %w", err)
	}
	type row struct {
		ID    string `db:"id"`
		Same  bool   `db:"same"`
		Live  bool   `db:"live"`
		Fresh bool   `db:"fresh"`
	}
	made, err := pg.One[row](ctx, tx, personOfKey, by, a.key, a.Name, a.Roles, a.TenantID, a.Life, againFor)
	const fresher = "ask again with another idempotency key"
	switch {
	case pg.IsNoRows(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("look for the same request: %w", err)
	case !made.Same:
		return "", fault.New(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED, "")
	case !made.Live:
		return "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the person of this request has ended",
			fault.Unmet("the person has ended"),
			fault.Remedy(fresher))
	case !made.Fresh:
		return "", fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the person of this request was made more than a day ago, and the token may be in use",
			fault.Unmet("the request comes more than a day after the first"),
			fault.Remedy("end that person first with `gpuaas people end "+a.Name+"`, and "+fresher))
	}
	return made.ID, nil
}

// replaceTokens ends the sessions of a person and returns how many seconds of the person's life are left.
var replaceTokens = pg.Define(pg.RoleReadmodel, "people.replace_tokens_of_person", `
	WITH lost AS (
		UPDATE readmodel.person_session SET revoked_at = mesh.clock(), revoked_by = $2
			WHERE person_id = $1::uuid AND revoked_at IS NULL)
	SELECT extract(epoch FROM expires_at - mesh.clock())::float8 FROM readmodel.person WHERE person_id = $1::uuid`)

// renew issues a new token in place of all earlier ones of a person. It expires when the person does.
func (p *Server) renew(ctx context.Context, tx pgx.Tx, a Admission, id, by string,
	out *readmodelv1.CreatePersonResponse,
) error {
	left, err := pg.Value[float64](ctx, tx, replaceTokens, id, by)
	if err != nil {
		return fmt.Errorf("end the lost token of a person: %w", err)
	}
	if out.Person, err = readPerson(ctx, tx, id); err != nil {
		return err
	}
	life := max(time.Second, time.Duration(left*float64(time.Second)))
	if out.Token, err = issue(ctx, tx, id, a.Name, a.TenantID, a.Roles, life); err != nil {
		return err
	}
	entry := entryOf("person.create", a, id)
	entry.Details["again"] = true
	_, err = p.deps.Audit.Record(ctx, tx, entry)
	return err
}
