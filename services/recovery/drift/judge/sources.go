package judge

import commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"

// The sources of the evidence that is kept here.
const (
	session  = commonv1.EvidenceSource_EVIDENCE_SOURCE_SESSION
	gate     = commonv1.EvidenceSource_EVIDENCE_SOURCE_GATE
	replicas = commonv1.EvidenceSource_EVIDENCE_SOURCE_REPLICAS
	rollback = commonv1.EvidenceSource_EVIDENCE_SOURCE_ROLLBACK
	host     = commonv1.EvidenceSource_EVIDENCE_SOURCE_HOST
	ingress  = commonv1.EvidenceSource_EVIDENCE_SOURCE_INGRESS
	attempts = commonv1.EvidenceSource_EVIDENCE_SOURCE_ENROLLMENT
)
