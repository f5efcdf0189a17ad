package allocation

import (
	"context"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// Identities is the client of recovery for the identities of instances.
type Identities interface {
	PrepareInstance(context.Context, *recoveryv1.PrepareInstanceRequest) (*recoveryv1.PrepareInstanceResponse, error)
	RetireInstance(context.Context, *recoveryv1.RetireInstanceRequest) (*recoveryv1.RetireInstanceResponse, error)
}
