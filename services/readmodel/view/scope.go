package view

import (
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// Scope is whose rows may be met. The zero value meets none.
type Scope struct {
	all      bool
	tenantID string
	outputs  bool // what workloads wrote is shown
}

// ScopeOf returns a person's. A person with a tenant is bound to it, whatever the roles say; one without must be of the operator's people.
func ScopeOf(p rpc.Person) (Scope, error) {
	if p.TenantID != "" {
		return Scope{tenantID: p.TenantID, outputs: true}, nil
	}
	if p.Has("operator", "security", "viewer") {
		return Scope{all: true, outputs: p.Has("operator")}, nil
	}
	return Scope{}, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your session belongs to no tenant")
}

// All meets every tenant's rows.
func All() Scope { return Scope{all: true, outputs: true} }

// Outputs reports whether what workloads wrote is shown: to people of their tenant, and of the operator's people to operators alone.
func (s Scope) Outputs() bool { return s.outputs }

// Step returns an attempt as it is shown in the scope: itself, or a copy without what is hidden.
func (s Scope) Step(a *lifecyclev1.StepAttempt) *lifecyclev1.StepAttempt {
	hideCause, hideOutput := !s.all && a.GetCause() != "", !s.outputs && a.GetLastOutput() != ""
	if !hideCause && !hideOutput {
		return a
	}
	a = proto.CloneOf(a)
	if hideCause {
		a.Cause = "" // it may name what stands behind the mesh
	}
	if hideOutput {
		a.LastOutput = ""
	}
	return a
}

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
