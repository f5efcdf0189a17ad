package list

import (
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// Scope determines whose rows a caller may see. The zero value includes none.
type Scope struct {
	all      bool
	tenantID string
	outputs  bool // the output of workloads is included
}

// ScopeOf returns the scope of a person. A person with a tenant is bound to it, whatever the roles are; a person
// without one must have the role operator, security or viewer.
func ScopeOf(p rpc.Person) (Scope, error) {
	if p.TenantID != "" {
		return Scope{tenantID: p.TenantID, outputs: true}, nil
	}
	if p.Has("operator", "security", "viewer") {
		return Scope{all: true, outputs: p.Has("operator")}, nil
	}
	return Scope{}, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "your session belongs to no tenant")
}

// All returns the scope that includes every tenant's rows.
func All() Scope { return Scope{all: true, outputs: true} }

// Outputs reports whether the output of workloads is included: for people of the workload's tenant, and among the
// operator's people for the role operator alone.
func (s Scope) Outputs() bool { return s.outputs }

// Step returns an attempt as the scope may see it: itself, or a copy without the hidden fields.
func (s Scope) Step(a *lifecyclev1.StepAttempt) *lifecyclev1.StepAttempt {
	hideCause, hideOutput := !s.all && a.GetCause() != "", !s.outputs && a.GetLastOutput() != ""
	if !hideCause && !hideOutput {
		return a
	}
	a = proto.CloneOf(a)
	if hideCause {
		a.Cause = "" // it may name systems behind the mesh
	}
	if hideOutput {
		a.LastOutput = ""
	}
	return a
}

// Everything reports whether the scope includes every tenant's rows.
func (s Scope) Everything() bool { return s.all }

// TenantID returns the id of the only tenant that is included, empty if all are.
func (s Scope) TenantID() string { return s.tenantID }

// Meets reports whether the scope includes the rows of a tenant.
func (s Scope) Meets(tenantID string) bool {
	return s.all || (s.tenantID != "" && s.tenantID == tenantID)
}

// Arg returns the scope as an SQL argument: NULL includes all tenants.
func (s Scope) Arg() any {
	if s.all {
		return nil
	}
	if s.tenantID == "" {
		return "00000000-0000-0000-0000-000000000000" // the id of no tenant
	}
	return s.tenantID
}

// OperatorsOnly returns the refusal of a request for objects that belong to no tenant. An empty list would suggest that
// there are none.
func OperatorsOnly() error {
	return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this is for people of the operator")
}

// NotFound returns the same error for an object that does not exist and for one of another tenant: what kind of object
// the request asked for, and as what it named it.
func NotFound(what, asked string) error { return fault.NoSuch(what, asked) }
