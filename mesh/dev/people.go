package dev

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/person"
)

const roleTenant = "tenant"

// Person is a person that the mesh makes beside its own, to try what each role may do.
type Person struct {
	Role  string
	Token string
}

// admitPeople makes one person of each role; the one of the demo tenant only if there is such a tenant.
func (m *Mesh) admitPeople(ctx context.Context) error {
	url, err := config.SecretFile(m.material.URLFile(pg.RoleReadmodel)).Read()
	if err != nil {
		return err
	}
	tenantID, err := m.demoTenantID(ctx)
	if err != nil {
		m.deps.Logger.WarnContext(ctx, "the demo tenant was not made, and no person of it", obs.Err(err))
	}
	for _, role := range []string{"viewer", roleTenant, "operator", "security"} {
		s := person.Session{Subject: Subject + "-" + role, Roles: []string{role}, Life: person.SessionLife}
		if role == roleTenant {
			if tenantID == "" {
				continue
			}
			s.TenantID = tenantID
		}
		token, err := person.Admit(ctx, url.Reveal(), filepath.Join(m.material.Dir, "person-"+role+".token"), s)
		if err != nil {
			return err
		}
		m.people = append(m.people, Person{Role: role, Token: token})
	}
	return nil
}

// demoTenantID makes the demo tenant, unless it is disabled, and returns its id.
func (m *Mesh) demoTenantID(ctx context.Context) (string, error) {
	if m.cfg.NoDemo {
		return "", nil
	}
	resp, err := m.person.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{
		Name: demoTenant, Quota: &lifecyclev1.Quota{Workspaces: 1000, Gpus: 1000, StorageBytes: 1 << 40},
	})
	if err != nil {
		return "", fmt.Errorf("create tenant %s: %w", demoTenant, err)
	}
	return resp.GetTenant().GetTenantId(), nil
}

// PersonContext returns the name of the context of the person of a role, given the name of the mesh's own.
func PersonContext(mesh, role string) string { return mesh + "-" + role }

// printPeople prints the contexts of the people, in lines of at most 80 columns.
func (m *Mesh) printPeople() {
	if m.context == "" || len(m.people) == 0 {
		return
	}
	try := "status"
	list := make([]string, 0, len(m.people))
	for _, p := range m.people {
		list = append(list, PersonContext(m.context, p.Role))
	}
	shown := PersonContext(m.context, "viewer")
	if slices.ContainsFunc(m.people, func(p Person) bool { return p.Role == roleTenant }) {
		shown, try = PersonContext(m.context, roleTenant), "workspaces list"
	}
	fmt.Fprintf(m.deps.Out, "People:    %s\n", strings.Join(list, " "))
	fmt.Fprintf(m.deps.Out, "           gpuaas --context %s %s\n", shown, try)
}
