package drift

import (
	"strings"

	"github.com/gpuaas/mesh/services/recovery/trust"
)

// nextOfUntrusted returns the next action that names the side at fault, if the evidence about the control plane has it;
// else the row's.
func nextOfUntrusted(first *Evidence, row string) string {
	switch {
	case first.NodeID != "":
		return row
	case strings.HasPrefix(first.Detail, trust.OfAuthority):
		return trust.NextAuthority
	case strings.HasPrefix(first.Detail, trust.OfIngress):
		return trust.NextIngress
	}
	return row
}
