package caller

import (
	"context"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

// ScopeOf returns the scope of the person behind a call.
func ScopeOf(ctx context.Context) (list.Scope, error) {
	p, ok := rpc.PersonFrom(ctx)
	if !ok {
		return list.Scope{}, fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
	}
	return list.ScopeOf(p)
}

// OperatorsOnly refuses a person who is bound to a tenant, even if the person was given an operator's role by mistake:
// such a person has no rights over the whole mesh.
func OperatorsOnly(ctx context.Context) error {
	if p, ok := rpc.PersonFrom(ctx); !ok || p.TenantID != "" {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "this is for people of the operator")
	}
	return nil
}
