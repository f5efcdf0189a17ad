package placement

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// HasOwnInstance reports whether a placement makes an instance for the workspace alone: everything on that instance
// ends with it.
func HasOwnInstance(p commonv1.PlacementDriver) bool {
	return p != commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC
}
