package people

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
)

type personRow struct {
	ID        string     `db:"person_id" expr:"@.person_id::text"`
	Name      string     `db:"name"`
	Roles     []string   `db:"roles"`
	TenantID  string     `db:"tenant_id" expr:"COALESCE(@.tenant_id::text, '')"`
	Tenant    string     `db:"tenant" expr:"COALESCE(t.name, '')"`
	CreatedAt time.Time  `db:"created_at"`
	CreatedBy string     `db:"created_by"`
	ExpiresAt time.Time  `db:"expires_at"`
	EndedAt   *time.Time `db:"ended_at"`
	EndedBy   string     `db:"ended_by"`
	Expired   bool       `db:"expired" expr:"@.expires_at <= mesh.clock()"`
}

func (r personRow) person() *readmodelv1.Person {
	p := &readmodelv1.Person{
		PersonId: r.ID, Name: r.Name, Roles: r.Roles, TenantId: r.TenantID, Tenant: r.Tenant,
		State: readmodelv1.PersonState_PERSON_STATE_LIVE, CreatedAt: timestamppb.New(r.CreatedAt), CreatedBy: r.CreatedBy,
		ExpiresAt: timestamppb.New(r.ExpiresAt),
		EndedBy:   r.EndedBy,
	}
	switch {
	case r.EndedAt != nil && r.EndedAt.Before(r.ExpiresAt):
		p.State, p.EndedAt = readmodelv1.PersonState_PERSON_STATE_ENDED, timestamppb.New(*r.EndedAt)
	case r.Expired:
		p.State = readmodelv1.PersonState_PERSON_STATE_EXPIRED
	}
	return p
}

func peopleOf(rows []personRow) []*readmodelv1.Person {
	people := make([]*readmodelv1.Person, len(rows))
	for i, row := range rows {
		people[i] = row.person()
	}
	return people
}

const selectPeople = `FROM readmodel.person p LEFT JOIN readmodel.tenant t ON t.tenant_id = p.tenant_id WHERE `

var personByID = pg.Define(pg.RoleReadmodel, "people.person_by_id",
	`SELECT `+pg.Columns[personRow]("p")+` `+selectPeople+`p.person_id = $1::uuid`)

func readPerson(ctx context.Context, db pg.Querier, id string) (*readmodelv1.Person, error) {
	row, err := pg.One[personRow](ctx, db, personByID, id)
	if err != nil {
		return nil, fmt.Errorf("read person: %w", err)
	}
	return row.person(), nil
}

const (
	defaultPeople = 100
	maxPeople     = 1000
)

var listPeople = pg.Define(pg.RoleReadmodel, "people.list_people", `
	SELECT `+pg.Columns[personRow]("p")+` `+selectPeople+`($1 = '' OR p.person_id < NULLIF($1, '')::uuid)
	AND (NOT $2 OR (p.ended_at IS NULL AND p.expires_at > mesh.clock())) ORDER BY p.person_id DESC LIMIT $3`)

// ListPeople lists people, newest first.
func (p *Server) ListPeople(
	ctx context.Context,
	req *readmodelv1.ListPeopleRequest,
) (*readmodelv1.ListPeopleResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	after, whole := lookup.ID(req.GetPageToken())
	if req.GetPageToken() != "" && !whole {
		return nil, fault.New(
			commonv1.Reason_REASON_INVALID_ARGUMENT,
			"",
			fault.Unmet("page_token: not from this list"),
		)
	}
	size := int(req.GetPageSize())
	if size == 0 {
		size = defaultPeople
	}
	size = min(size, maxPeople)
	rows, err := pg.All[personRow](ctx, p.deps.DB, listPeople, after, req.GetLiveOnly(), size+1)
	if err != nil {
		return nil, fmt.Errorf("list people: %w", err)
	}
	items := peopleOf(rows)
	out := &readmodelv1.ListPeopleResponse{Items: items}
	if len(items) > size {
		out.Items = items[:size]
		out.NextPageToken = out.GetItems()[size-1].GetPersonId()
	}
	return out, nil
}

// Conditions by which a person is found.
const (
	byLiveName  = "p.name = $1 AND p.ended_at IS NULL"
	byEndedName = "p.person_id = (SELECT e.person_id FROM readmodel.person e WHERE e.name = $1 ORDER BY e.ended_at " +
		"DESC LIMIT 1)"
	byID = "p.person_id = $1::uuid"
)

var byPartOfID = lookup.PartOfID("p.person_id")

// findPeople reads the people that meet a condition: at most one more than are listed as candidates.
var findPeople = pg.DefineDynamic(pg.RoleReadmodel, "people.find_people", func(where string) string {
	return fmt.Sprintf("SELECT %s %s%s ORDER BY p.person_id LIMIT %d", pg.Columns[personRow]("p"), selectPeople, where,
		lookup.Candidates+1)
}, byLiveName, byEndedName, byID, byPartOfID)

// findPerson returns a person by id, by name, or by the beginning or end of one id. A name means the person who has not
// been ended, and if there is none the one who was ended last.
func findPerson(ctx context.Context, tx pgx.Tx, ref string) (*readmodelv1.Person, error) {
	type attempt struct {
		where string
		args  []any
	}
	name := []any{strings.ToLower(ref)}
	attempts := []attempt{{byLiveName, name}, {byEndedName, name}}
	if id, whole := lookup.ID(ref); whole {
		attempts[0] = attempt{byID, []any{id}}
	}
	if args := lookup.PartArgs(ref); args != nil {
		attempts = append(attempts, attempt{byPartOfID, args})
	}
	var items []personRow
	for _, by := range attempts {
		var err error
		if items, err = pg.All[personRow](ctx, tx, findPeople.For(by.where), by.args...); err != nil {
			return nil, fmt.Errorf("find person: %w", err)
		}
		if len(items) > 0 {
			break
		}
	}
	switch len(items) {
	case 1:
		return items[0].person(), nil
	case 0:
		return nil, fault.New(
			commonv1.Reason_REASON_NOT_FOUND,
			fmt.Sprintf("there is no person %q", ref),
			fault.Remedy("list them with `gpuaas people list`"),
		)
	}
	choices := make([]string, len(items))
	for i, p := range items {
		choices[i] = "person " + p.ID + " " + p.Name
	}
	return nil, lookup.Ambiguous("person", ref, choices)
}
