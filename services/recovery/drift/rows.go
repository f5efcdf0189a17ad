package drift

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/policy"
)

// The next actions that depend on the state of the identity.
const (
	nextPending = "enrol the machine with its bundle"
	nextFenced  = "reactivate with the security role; to enrol it again, issue a bundle then (`gpuaas nodes bundle NODE`)"
	nextRetired = "none: this identity is final; enrol the machine anew if it is to return"
)

// offByPolicy has the owner and the next action for a node that may not recover by itself while the policy is off.
var offByPolicy = fault.Explain(commonv1.Reason_REASON_AUTO_RECOVERY_OFF)

const unproven = sources(1<<FromHost | 1<<FromIngress)

// ordered are the rows of all reasons that evidence proves, the one that wins over all others first. A row never
// follows one of a lower severity.
var ordered = []Row{
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, UserState: security,
		by: of(FromIdentity, FromEnrolment),
	},
	{Reason: commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE, UserState: security, by: of(FromIdentity)},
	{Reason: commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED, UserState: operator, by: of(FromIdentity)},
	{Reason: commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK, UserState: operator, by: of(FromRollback)},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS, UserState: operator,
		by: of(FromReplicas, FromIngress),
	},
	{Reason: commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD, UserState: operator, by: of(FromIdentity)},
	{Reason: commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST, UserState: operator, by: of(FromIdentity)},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE, UserState: temporary, by: of(FromReplicas),
		holds: unheard,
	},
	{Reason: commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, UserState: operator, by: of(FromGate)},
	{Reason: commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT, UserState: operator, by: of(FromSession)},
	{Reason: commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, UserState: operator, by: of(FromSession, FromHost)},
	{
		Reason:    commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING,
		UserState: operator, by: of(FromHost, FromEnrolment),
	},
	{
		Reason:    commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED,
		UserState: operator, by: of(FromHost, FromEnrolment),
	},
	{Reason: commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED, UserState: repairing, by: of(FromHost)},
	{
		Reason:    commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT,
		UserState: operator, by: of(FromSession, FromHost), AsksHost: true,
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED, UserState: repairing, by: of(FromIngress, FromHost),
		AsksHost: true,
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED, UserState: repairing, by: of(FromIngress),
		AsksHost: true,
	},
	{Reason: commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE, UserState: temporary, AsksHost: true},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED, UserState: temporary, by: of(FromHost),
		explains: true,
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, UserState: temporary, by: of(FromSession), holds: unheard,
		AsksHost: true,
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED, UserState: temporary, by: of(FromGate),
		holds: connected,
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE, UserState: temporary, by: of(FromTasks),
		holds: connected,
	},
	{Reason: commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT, UserState: normal, by: of(FromSession, FromTasks)},
	{Reason: commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT, UserState: normal, by: of(FromSession)},
	{Reason: commonv1.DriftReason_DRIFT_REASON_DISCONNECTED, UserState: temporary},
}

// drills name the row of the failure matrix whose severity and budgets each reason has.
var drills = map[commonv1.DriftReason]string{
	commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN:                  "short-node-outage",
	commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED:                "long-node-outage",
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED:           "identity-rejected-after-profile-change",
	commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS:   "ingress-trust-drift",
	commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT:      "endpoint-profile-drift",
	commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED:        "host-trust-drift",
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED: "trust-drift-blocks-recovery",
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING:      "recovery-token-missing",
	commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE:          "task-backlog-stale",
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED:  "identity-fenced",
	commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED:    "cloned-identity",
	commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW:                  "clock-skew",
	commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED:           "edge-rate-limited",
	commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT:         "ip-route-drift",
	commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT:               "agent-version-drift",
	commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT:          "host-runtime-drift",
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE:        "control-plane-outage",
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK:      "control-plane-rollback",
	commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE:      "pre-auth-blind-spot",
	commonv1.DriftReason_DRIFT_REASON_DISCONNECTED:                "short-node-outage",
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD:               "identity-rejected-after-profile-change",
	commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST:             "identity-rejected-after-profile-change",
	commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE:                 "cloned-identity",
	commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED:           "short-node-outage",
	commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL:              "node-disk-full",
}

// rows are the rows by their reason. They are never written after the process starts.
var rows = byReason()

func byReason() []Row {
	out := make([]Row, len(ordered)+1)
	for i, row := range ordered {
		row.Drill = drills[row.Reason]
		budget, _ := policy.BudgetOf(row.Drill)
		explained := fault.ExplainDrift(row.Reason)
		row.Owner, row.NextAction = explained.Owner, explained.NextAction
		row.rank = len(ordered) - i
		row.Severity = commonv1.Severity(budget.Severity) + commonv1.Severity_SEVERITY_P0
		row.DetectWithin, row.RecoverWithin = budget.Detect, budget.RecoverWithin()
		out[row.Reason] = row
	}
	return out
}
