package collect

import commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"

// The sources of the evidence that is kept here.
const (
	identity   = commonv1.EvidenceSource_EVIDENCE_SOURCE_IDENTITY
	session    = commonv1.EvidenceSource_EVIDENCE_SOURCE_SESSION
	host       = commonv1.EvidenceSource_EVIDENCE_SOURCE_HOST
	ingress    = commonv1.EvidenceSource_EVIDENCE_SOURCE_INGRESS
	attempts   = commonv1.EvidenceSource_EVIDENCE_SOURCE_ENROLLMENT
	taskRecord = commonv1.EvidenceSource_EVIDENCE_SOURCE_TASKS
)
