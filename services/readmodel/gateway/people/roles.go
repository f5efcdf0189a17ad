package people

import (
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
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

func sorted(roles []string) []string { return slices.Compact(slices.Sorted(slices.Values(roles))) }
