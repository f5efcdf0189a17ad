package judge_test

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

const (
	node = "0193d1c8-0000-7000-8000-000000000001"

	process     = commonv1.DriftPart_DRIFT_PART_PROCESS
	endpoint    = commonv1.DriftPart_DRIFT_PART_ENDPOINT
	certificate = commonv1.DriftPart_DRIFT_PART_CERTIFICATE
	authority   = commonv1.DriftPart_DRIFT_PART_AUTHORITY
	tasks       = commonv1.DriftPart_DRIFT_PART_TASKS
	hostPart    = commonv1.DriftPart_DRIFT_PART_HOST

	identity = drift.FromIdentity
	session  = drift.FromSession
	replicas = drift.FromReplicas
	rollback = drift.FromRollback
	host     = drift.FromHost
	ingress  = drift.FromIngress

	unspecified   = commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED
	agentDown     = commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
	certExpired   = commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED
	rejected      = commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED
	certUntrusted = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS
	tlsUntrusted  = commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED
	blocked       = commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED
	tokenMissing  = commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING
	backlog       = commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE
	revoked       = commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED
	cloned        = commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED
	clockSkew     = commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW
	rateLimited   = commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED
	networkFacts  = commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT
	version       = commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT
	hostRuntime   = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	outage        = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE
	disconnected  = commonv1.DriftReason_DRIFT_REASON_DISCONNECTED
	held          = commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD
	notAdmitted   = commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED
	diskFull      = commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL

	normal      = commonv1.UserState_USER_STATE_NORMAL
	temporary   = commonv1.UserState_USER_STATE_TEMPORARY
	operator    = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	securityDue = commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED

	p0 = commonv1.Severity_SEVERITY_P0
	p1 = commonv1.Severity_SEVERITY_P1
	p2 = commonv1.Severity_SEVERITY_P2
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// saw returns fresh evidence about the node, observed a minute ago.
func saw(source commonv1.EvidenceSource, part commonv1.DriftPart, reason commonv1.DriftReason) drift.Evidence {
	return drift.Evidence{
		NodeID: node, Part: part, Reason: reason, Source: source, ObservedAt: now.Add(-time.Minute),
		CorrelationID: "of " + source.String(),
	}
}

// stale returns e with its end a second ago.
func stale(e drift.Evidence) drift.Evidence {
	e.FreshUntil = now.Add(-time.Second)
	return e
}

func detail(e drift.Evidence, text string) drift.Evidence {
	e.Detail = text
	return e
}

var (
	active  = detail(saw(identity, certificate, unspecified), "active")
	isHeard = saw(session, process, unspecified)
	isLost  = saw(session, process, disconnected)
	isDown  = saw(session, process, agentDown)
)
