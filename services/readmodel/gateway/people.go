package gateway

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	roleSecurity = "security"
	// securityRemains is how long another person's role security must still last before a person with that role may be
	// ended.
	securityRemains = 24 * time.Hour
)

// Includes returns the roles whose rights a role has, the role itself included: every method that admits one of them
// admits the role.
func Includes(role string) []string {
	switch role {
	case "operator":
		return []string{"operator", "tenant", "viewer"}
	case roleSecurity:
		return []string{roleSecurity, "viewer"}
	default:
		return []string{role}
	}
}

// PeopleDeps are the dependencies of People beyond the Deps that all servers share.
type PeopleDeps struct {
	DB    *pgxpool.Pool
	Audit *audit.Log
	Wake  *events.Signal // notified after commits that appended events
}

// People serves PeopleService.
type People struct {
	deps  Deps
	own   PeopleDeps
	names *Command // resolves names of tenants
}

// NewPeople returns the server.
func NewPeople(deps Deps, own PeopleDeps) *People {
	return &People{deps: deps, own: own, names: NewCommand(deps)}
}

// CreatePerson creates a person and returns the token.
func (p *People) CreatePerson(
	ctx context.Context, req *readmodelv1.CreatePersonRequest,
) (*readmodelv1.CreatePersonResponse, error) {
	giver, err := giverOf(ctx)
	if err != nil {
		return nil, err
	}
	a := Admission{Name: req.GetName(), Roles: sorted(req.GetRoles()), Life: defaultLife, key: req.GetIdempotencyKey()}
	if req.GetExpiresIn() != nil {
		a.Life = req.GetExpiresIn().AsDuration()
	}
	if err := checkAdmission(a, req); err != nil {
		return nil, err
	}
	if err := mayGive(giver, a.Roles); err != nil {
		return nil, err
	}
	if req.GetTenant() != "" {
		if a.TenantID, err = p.tenant(ctx, req.GetTenant()); err != nil {
			return nil, err
		}
	}
	replaced, out := "", &readmodelv1.CreatePersonResponse{}
	err = pg.InTx(ctx, p.own.DB, func(ctx context.Context, tx pgx.Tx) error {
		out.Reset()
		made, err := madeBefore(ctx, tx, a, giver.Subject)
		if err != nil {
			return err
		}
		if made != "" {
			replaced = a.Name
			return p.renew(ctx, tx, a, made, giver.Subject, out)
		}
		if out.Person, err = insertPerson(ctx, tx, a, giver.Subject); err != nil {
			return err
		}
		if out.Token, err = issue(
			ctx,
			tx,
			out.GetPerson().GetPersonId(),
			a.Name,
			a.TenantID,
			a.Roles,
			a.Life,
		); err != nil {
			return err
		}
		_, err = p.own.Audit.Record(ctx, tx, entryOf("person.create", a, out.GetPerson().GetPersonId()))
		return err
	})
	if err != nil {
		return nil, err
	}
	if replaced != "" {
		p.deps.Sessions.recheck(replaced)
	}
	p.own.Wake.Notify()
	return out, nil
}

// giverOf returns the person behind a call, and refuses one who is bound to a tenant.
func giverOf(ctx context.Context) (rpc.Person, error) {
	if err := operatorsOnly(ctx); err != nil {
		return rpc.Person{}, err
	}
	giver, _ := rpc.PersonFrom(ctx)
	return giver, nil
}

// checkAdmission checks the rules that the validation of single fields cannot express.
func checkAdmission(a Admission, req *readmodelv1.CreatePersonRequest) error {
	var unmet []string
	if isID(a.Name) {
		unmet = append(unmet, "name: it has the form of an id")
	}
	if slices.Contains(a.Roles, "tenant") && req.GetTenant() == "" {
		unmet = append(unmet, "tenant: the role tenant needs the tenant whose person it is")
	}
	if a.Life < minLife || a.Life > sessionMax {
		unmet = append(unmet, fmt.Sprintf("expires_in: from %dm to %dd", int(minLife.Minutes()),
			int(sessionMax/(24*time.Hour))))
	}
	if len(unmet) > 0 {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "", fault.Unmet(unmet...))
	}
	return nil
}

// mayGive refuses roles that no role of the giver includes.
func mayGive(giver rpc.Person, roles []string) error {
	var held, unmet []string
	for _, role := range giver.Roles {
		held = append(held, Includes(role)...)
	}
	for _, role := range roles {
		if !slices.Contains(held, role) {
			unmet = append(unmet, "none of your roles ("+strings.Join(giver.Roles, ", ")+") includes "+role)
		}
	}
	if len(unmet) > 0 {
		return fault.New(commonv1.Reason_REASON_ROLE_NOT_HELD, "", fault.Unmet(unmet...))
	}
	return nil
}

// tenant returns the id of a tenant that exists.
func (p *People) tenant(ctx context.Context, nameOrID string) (string, error) {
	var id string
	err := p.names.find(ctx, func(ctx context.Context, s *view.Snapshot) error {
		t, err := s.Tenant(ctx, nameOrID)
		id = t.GetTenantId()
		return err
	})
	if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		return "", fault.New(
			commonv1.Reason_REASON_TENANT_UNKNOWN,
			fmt.Sprintf("there is no tenant %q", nameOrID),
			fault.Cause(err),
		)
	}
	return id, err
}

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

var personByID = pg.Define(pg.RoleReadmodel, "gateway.person_by_id",
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

var listPeople = pg.Define(pg.RoleReadmodel, "gateway.list_people", `
	SELECT `+pg.Columns[personRow]("p")+` `+selectPeople+`($1 = '' OR p.person_id < NULLIF($1, '')::uuid)
	AND (NOT $2 OR (p.ended_at IS NULL AND p.expires_at > mesh.clock())) ORDER BY p.person_id DESC LIMIT $3`)

// ListPeople lists people, newest first.
func (p *People) ListPeople(
	ctx context.Context,
	req *readmodelv1.ListPeopleRequest,
) (*readmodelv1.ListPeopleResponse, error) {
	if err := operatorsOnly(ctx); err != nil {
		return nil, err
	}
	after, whole := view.ID(req.GetPageToken())
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
	rows, err := pg.All[personRow](ctx, p.own.DB, listPeople, after, req.GetLiveOnly(), size+1)
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

// EndPerson ends a person. For a person who was ended already it changes nothing and returns the person.
func (p *People) EndPerson(
	ctx context.Context,
	req *readmodelv1.EndPersonRequest,
) (*readmodelv1.EndPersonResponse, error) {
	by, err := giverOf(ctx)
	if err != nil {
		return nil, err
	}
	out := &readmodelv1.EndPersonResponse{}
	ended := false
	err = pg.InTx(ctx, p.own.DB, func(ctx context.Context, tx pgx.Tx) error {
		found, err := findPerson(ctx, tx, req.GetPerson())
		if err != nil {
			return err
		}
		if err := keepOneSecurity(ctx, tx, found); err != nil {
			return err
		}
		if ended, err = endPerson(ctx, tx, found.GetPersonId(), found.GetName(), by.Subject); err != nil {
			return err
		}
		if out.Person, err = readPerson(ctx, tx, found.GetPersonId()); err != nil || !ended {
			return err
		}
		_, err = p.own.Audit.Record(ctx, tx, audit.Entry{
			Action:      "person.end",
			SubjectType: "person",
			SubjectID:   found.GetName(),
			TenantID:    found.GetTenantId(),
			Reason:      req.GetReason(),
			Details:     map[string]any{"person_id": found.GetPersonId(), "roles": found.GetRoles()},
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	if ended {
		p.deps.Sessions.recheck(out.GetPerson().GetName())
		p.own.Wake.Notify()
	}
	return out, nil
}

// Conditions by which a person is found.
const (
	byLiveName  = "p.name = $1 AND p.ended_at IS NULL"
	byEndedName = "p.person_id = (SELECT e.person_id FROM readmodel.person e WHERE e.name = $1 ORDER BY e.ended_at DESC LIMIT 1)"
	byID        = "p.person_id = $1::uuid"
)

var byPartOfID = view.PartOfID("p.person_id")

// findPeople reads the people that meet a condition: at most one more than are listed as candidates.
var findPeople = pg.DefineDynamic(pg.RoleReadmodel, "gateway.find_people", func(where string) string {
	return fmt.Sprintf("SELECT %s %s%s ORDER BY p.person_id LIMIT %d", pg.Columns[personRow]("p"), selectPeople, where,
		view.Candidates+1)
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
	if id, whole := view.ID(ref); whole {
		attempts[0] = attempt{byID, []any{id}}
	}
	if args := view.PartArgs(ref); args != nil {
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
	return nil, view.Ambiguous("person", ref, choices)
}

type securityPerson struct {
	ID        string    `db:"person_id" expr:"@.person_id::text"`
	Name      string    `db:"name"`
	ExpiresAt time.Time `db:"expires_at"`
	Lasts     bool      `db:"lasts" expr:"@.expires_at > mesh.clock() + $2::interval"`
}

var lockSecurity = pg.Define(pg.RoleReadmodel, "gateway.lock_people_with_security", `
	SELECT `+pg.Columns[securityPerson]("p")+` FROM readmodel.person p
	WHERE p.ended_at IS NULL AND p.expires_at > mesh.clock() AND p.tenant_id IS NULL AND $1 = ANY (p.roles) ORDER BY p.person_id FOR UPDATE`)

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
		fault.Unmet(soon[:min(len(soon), view.Candidates)]...))
}
