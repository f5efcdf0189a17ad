package drift

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/policy"
)

// The next actions that depend on the state of the identity.
const (
	nextPending = "enrol the machine with its bundle"
	nextFenced  = "reactivate with the security role, or enrol it again"
	nextRetired = "none: this identity is final; enrol the machine anew if it is to return"
)

const (
	records = sources(1<<identity | 1<<session | 1<<gate)
	claims  = sources(1<<host | 1<<ingress)
)

// ordered are the rows of all reasons that evidence proves, the one that wins over all others first. A row never
// follows one of a lower severity.
var ordered = []Row{
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, UserState: security, by: of(identity),
		Owner: "security", NextAction: "fence the node, find the second copy, and give the machine a new identity",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE, UserState: security, by: of(identity),
		Owner: "security", NextAction: "fence the node: its enrolment token was used with two keys",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED, UserState: operator, by: of(identity),
		Owner: "security", NextAction: "reactivate the node, or enrol it again",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK, UserState: operator, by: of(rollback),
		Owner: "control plane", NextAction: "none at the node: follow docs/restore.md (`gpuaas rollback status`)",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS, UserState: operator,
		by: records | of(replicas, ingress), Owner: "control plane",
		NextAction: "repair what the ingress trusts first, then enrol only the nodes that still need it",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD, UserState: operator, by: of(identity),
		Owner: "operator", NextAction: "look at the reason of the hold, then reactivate, quarantine or fence",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST, UserState: operator, by: of(identity, host),
		Owner: "operator", NextAction: "let the node recover, or issue a bundle",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE, UserState: temporary, by: of(replicas),
		holds: unheard, Owner: "control plane",
		NextAction: "none at the node: no replica of nodeapi listens; restore the control plane",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, UserState: operator, by: of(session, gate, host),
		Owner: "host", NextAction: "free room on its disk",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT, UserState: operator, by: of(session, gate, host),
		Owner: "provider", NextAction: "cordon the node, diagnose it, then repair or reimage it",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, UserState: operator, by: records | of(host),
		Owner: "host", NextAction: "set the host's clock right; certificates are judged again after that",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING, UserState: operator, by: records | of(host),
		Owner: "operator", NextAction: "issue a bundle: the node has no recovery token that may still be used",
	},
	{
		Reason:    commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED,
		UserState: operator, by: records | of(host), Owner: "profile",
		NextAction: "repair the node's profile, or issue a bundle: it trusts neither the mesh nor its recovery endpoint",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED, UserState: repairing, by: records | of(host),
		Owner: "profile", NextAction: "wait for the recovery by pinned trust; if it does not come, issue a bundle",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT, UserState: operator, by: records | of(host),
		Owner: "profile", NextAction: "issue a bundle: the node's endpoints are not those of this mesh",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED, UserState: repairing, by: records | claims,
		Owner: "agent", NextAction: "wait: the agent recovers with its recovery token",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED, UserState: repairing, by: records | claims,
		Owner: "recovery", NextAction: "wait: the node enrols again, a bounded number of times",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE, UserState: temporary,
		Owner: "unknown", NextAction: "collect the host's diagnostics: nothing that is known names a cause",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED, UserState: temporary, by: records | claims,
		explains: true, Owner: "edge",
		NextAction: "wait: the agent asks less often; if it stays, repair the rule of the edge",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, UserState: temporary, by: of(session), holds: unheard,
		Owner:      "agent / host",
		NextAction: "wait for the agent; if it stays away, restart it on its host",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED, UserState: temporary, by: of(gate),
		holds: connected, Owner: "lifecycle", NextAction: "wait: lifecycle has yet to open its gate",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE, UserState: temporary, by: records,
		Owner: "lifecycle", NextAction: "wait: the next sweep ends what has expired",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT, UserState: normal, by: records,
		Owner: "rollout", NextAction: "update the agent",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT, UserState: normal, by: records,
		Owner: "recovery", NextAction: "none: the next sweep records the node's present addresses",
	},
	{
		Reason: commonv1.DriftReason_DRIFT_REASON_DISCONNECTED, UserState: temporary,
		Owner: "agent", NextAction: "wait: the agent connects again by itself",
	},
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
		budget, _ := policy.BudgetOf(drills[row.Reason])
		row.rank = len(ordered) - i
		row.Severity = commonv1.Severity(budget.Severity) + commonv1.Severity_SEVERITY_P0
		row.DetectWithin, row.RecoverWithin = budget.Detect, budget.RecoverWithin()
		out[row.Reason] = row
	}
	return out
}
