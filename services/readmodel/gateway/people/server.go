package people

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Deps are the dependencies of Server.
type Deps struct {
	DB       *pgxpool.Pool
	Audit    *audit.Log
	Wake     *events.Signal // notified after commits that appended events
	Sessions *Sessions
	Reads    caller.Reads // resolves the names of tenants
}

// Server serves PeopleService.
type Server struct{ deps Deps }

// NewServer returns the server.
func NewServer(deps Deps) *Server { return &Server{deps: deps} }

// CreatePerson creates a person and returns the token.
func (p *Server) CreatePerson(
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
	err = pg.InTx(ctx, p.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
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
		_, err = p.deps.Audit.Record(ctx, tx, entryOf("person.create", a, out.GetPerson().GetPersonId()))
		return err
	})
	if err != nil {
		return nil, err
	}
	if replaced != "" {
		p.deps.Sessions.recheck(replaced)
	}
	p.deps.Wake.Notify()
	return out, nil
}

// giverOf returns the person behind a call, and refuses one who is bound to a tenant.
func giverOf(ctx context.Context) (rpc.Person, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
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
	if isService(a.Name) {
		unmet = append(unmet, "name: it is the name by which a service acts")
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

// tenant returns the id of a tenant that exists.
func (p *Server) tenant(ctx context.Context, nameOrID string) (string, error) {
	t, err := caller.Find(ctx, p.deps.Reads, (*view.Snapshot).Tenant, nameOrID)
	if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		return "", fault.New(
			commonv1.Reason_REASON_TENANT_UNKNOWN,
			fmt.Sprintf("there is no tenant %q", nameOrID),
			fault.Cause(err),
		)
	}
	return t.GetTenantId(), err
}

// EndPerson ends a person. For a person who was ended already it changes nothing and returns the person.
func (p *Server) EndPerson(
	ctx context.Context,
	req *readmodelv1.EndPersonRequest,
) (*readmodelv1.EndPersonResponse, error) {
	by, err := giverOf(ctx)
	if err != nil {
		return nil, err
	}
	out := &readmodelv1.EndPersonResponse{}
	ended := false
	err = pg.InTx(ctx, p.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
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
		_, err = p.deps.Audit.Record(ctx, tx, audit.Entry{
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
		p.deps.Wake.Notify()
	}
	return out, nil
}
