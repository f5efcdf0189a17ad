package fault

import commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"

// Impact is how a reason of a node's verdict touches the active workspaces on the node, as long as nothing else is
// known of their runtime and their edge.
type Impact struct {
	// Family is what their users see: normal if the reason touches neither runtime nor access, else the node's family.
	Family commonv1.UserState
	Why    string
}

// ImpactOf returns the impact of a reason. A reason that this build does not know touches no workspace: it is no
// evidence.
func ImpactOf(reason commonv1.DriftReason) Impact {
	if impact, ok := impacts[reason]; ok {
		return impact
	}
	return Impact{Family: commonv1.UserState_USER_STATE_NORMAL, Why: "the reason is not known here"}
}

// Suspicion reports whether a reason is a suspicion about the machine's identity, which shows nothing of what runs
// there.
func Suspicion(reason commonv1.DriftReason) bool {
	return reason == commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED ||
		reason == commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE
}

// OursIfMany reports whether a reason touches no workspace by itself while it is an incident of the fleet: the cause is
// rather ours then, as of many suspicions, or of an update that is rolled over all hosts.
func OursIfMany(reason commonv1.DriftReason) bool {
	return Suspicion(reason) || reason == commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
}

const (
	untouched = commonv1.UserState_USER_STATE_NORMAL
	byPerson  = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	bySecure  = commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
)

// impacts are never written after the process starts.
var impacts = map[commonv1.DriftReason]Impact{
	commonv1.DriftReason_DRIFT_REASON_DISCONNECTED: {untouched, "silence says nothing of what runs"},
	commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN:   {untouched, "workloads outlive their agent"},
	commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE: {
		untouched, "silence says nothing of what runs, whatever its cause",
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED: {untouched, "work is not offered yet; what runs goes on"},
	commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED: {
		untouched, "the certificate is for the way to the control plane alone",
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED: {
		untouched, "the certificate is for the way to the control plane alone",
	},
	commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS: {
		untouched, "the ingress of agents is not on the way of users",
	},
	commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT: {
		untouched, "a profile names the control plane's endpoints, none of a workspace's",
	},
	commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED: {
		untouched, "what the agent trusts is of no use to workloads",
	},
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED: {untouched, "only the agent's way back is blocked"},
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING:      {untouched, "only the agent's way back is blocked"},
	commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE: {
		untouched, "operations wait; what was done before them stands",
	},
	commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW: {
		untouched, "certificates and windows of tasks depend on the clock; whether a workload does is not known",
	},
	commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED: {
		untouched, "the limit is on the agent's way to the control plane, not on the users' edge",
	},
	commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT: {
		untouched, "the records differ from the host; whether users reach it is the edge's evidence",
	},
	commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT: {untouched, "the agent's version is no workload's"},
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE: {
		untouched, "workloads do not depend on the control plane",
	},
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK: {
		untouched, "the database went back, and what runs is kept until a person accepts",
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD: {
		untouched, "a hold is an automatic suspicion that can be taken back, and workloads run on",
	},
	commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST: {
		untouched, "the agent has lost a record of its own, and workloads run on",
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED: {
		byPerson, "a person has decided against the machine: what runs goes on, and nothing can be done for it",
	},
	commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT: {
		byPerson, "GPUs, driver, kernel or container runtime are not those that the workspace was placed on",
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL: {
		byPerson, "workloads write to the disk that has no room",
	},
	commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED: {
		bySecure, "a copy of the machine may have the workspace's data and credentials",
	},
	commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE: {
		bySecure, "a secret of the machine was used with another key: others may have read what is on it",
	},
}
