package drift

import (
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/trust"
)

// preflightOK is the state of a preflight that has seen the ingress trust what the authority signs.
var preflightOK = names.Of(recoveryv1.PreflightState_PREFLIGHT_STATE_OK)

// trustEvidence returns what the preflight of the authority has found. That nothing was proven is no evidence.
func (s *seen) trustEvidence() Evidence {
	e := Evidence{Part: commonv1.DriftPart_DRIFT_PART_AUTHORITY, Source: replicas, ObservedAt: s.Now}
	if s.Untrusted != "" {
		e.Reason, e.Detail = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS, s.Untrusted
		e.CorrelationID = s.UntrustedIncident
		if s.UntrustedSince != nil {
			e.ObservedAt = *s.UntrustedSince
		}
	}
	return e
}

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
