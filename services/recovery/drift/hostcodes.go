package drift

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// explained is what each diagnostic code is evidence of. Unspecified as a reason: it names no verdict, and its text
// stands beside the verdict that the agent is not heard. Codes that are not in it are evidence of nothing: what they
// tell is recovery's own to know, or no matter of whether the agent is heard.
var explained = map[commonv1.DiagnosticCode]struct {
	reason commonv1.DriftReason
	part   commonv1.DriftPart
}{
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED: {
		commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED, commonv1.DriftPart_DRIFT_PART_ENDPOINT,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENDPOINT_PROFILE_DRIFT: {
		commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT, commonv1.DriftPart_DRIFT_PART_ENDPOINT,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED: {
		commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED, commonv1.DriftPart_DRIFT_PART_AUTHORITY,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_NAME_MISMATCH: {
		commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED, commonv1.DriftPart_DRIFT_PART_AUTHORITY,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED: {
		commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED, commonv1.DriftPart_DRIFT_PART_CERTIFICATE,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_TOKEN_MISSING: {
		commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING, commonv1.DriftPart_DRIFT_PART_CERTIFICATE,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED: {
		commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED, commonv1.DriftPart_DRIFT_PART_CERTIFICATE,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CLOCK_SKEWED: {
		commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, commonv1.DriftPart_DRIFT_PART_HOST,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_NOT_YET_VALID: {
		commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, commonv1.DriftPart_DRIFT_PART_HOST,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED:        {part: commonv1.DriftPart_DRIFT_PART_ENDPOINT},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED:       {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED:     {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_TIMED_OUT:   {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED: {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED:        {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED:     {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED:       {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED: {part: commonv1.DriftPart_DRIFT_PART_PROCESS},
}

// ExplainedBy returns the reason of the verdict that a diagnostic code names, the part that it is about, and whether it
// is evidence at all: one that is, and names no reason, explains why an agent is not heard.
func ExplainedBy(code commonv1.DiagnosticCode) (commonv1.DriftReason, commonv1.DriftPart, bool) {
	e, ok := explained[code]
	return e.reason, e.part, ok
}
