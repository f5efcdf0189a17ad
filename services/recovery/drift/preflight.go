package drift

import (
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// What the evidence of an ingress that refuses the authority's certificates begins with, as package trust describes
// it: the side that has changed.
const (
	detailAuthority = "authority: "
	detailIngress   = "ingress: "
)

// The next actions by the side that has changed.
const (
	nextAuthority = "repair the authority: give it back the signing material that the ingress trusts, or add its present " +
		"root to what the ingress trusts (`gpuaas ca status`); then enrol only the nodes that are still refused"
	nextIngress = "repair the ingress: give it back the root of the authority as a trusted issuer of nodes " +
		"(`gpuaas ca status`); then enrol only the nodes that are still refused"
)

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
	case strings.HasPrefix(first.Detail, detailAuthority):
		return nextAuthority
	case strings.HasPrefix(first.Detail, detailIngress):
		return nextIngress
	}
	return row
}
