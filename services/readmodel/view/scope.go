package view

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// Scope is whose rows may be met. The zero value meets none.
type Scope struct {
	all      bool
	tenantID string
}

// ScopeOf answers a person's. A person with a tenant is bound to it, whatever the roles say; one without must be of the operator's people.
func ScopeOf(p rpc.Person) (Scope, error) {
	if p.TenantID != "" {
		return Scope{tenantID: p.TenantID}, nil
	}
	if p.Has("operator", "security", "viewer") {
		return Scope{all: true}, nil
	}
	return Scope{}, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your session belongs to no tenant")
}

// All meets every tenant's rows.
func All() Scope { return Scope{all: true} }

// Everything says whether nothing is hidden.
func (s Scope) Everything() bool { return s.all }

// TenantID is the only tenant that is met, empty if all are.
func (s Scope) TenantID() string { return s.tenantID }

// Meets says whether a row of a tenant is met.
func (s Scope) Meets(tenantID string) bool {
	return s.all || (s.tenantID != "" && s.tenantID == tenantID)
}

// arg is the scope in SQL: NULL meets all.
func (s Scope) arg() any {
	if s.all {
		return nil
	}
	if s.tenantID == "" {
		return "00000000-0000-0000-0000-000000000000" // nobody's
	}
	return s.tenantID
}

// operatorsOnly refuses what is of no tenant: an empty answer would say that there is nothing.
func operatorsOnly() error {
	return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this is for people of the operator")
}

// notFound is the one answer to what does not exist and to what is another tenant's.
func notFound(what string) error {
	return fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such "+what)
}
