package fault

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// ExplainDrift returns the explanation of one reason of a node's verdict. Its code is the reason's spelling. For an
// unknown reason, and for the unspecified one, only the code is set.
//
// Recovery takes owner and next action of its verdicts from here. Where a refusal has the same code, meaning, impact
// and action are those of the refusal.
func ExplainDrift(reason commonv1.DriftReason) Explanation {
	e := driftRows[reason]
	e.Code = names.Of(reason)
	if refusal, err := names.Parse[commonv1.Reason](e.Code); err == nil && e.Owner != "" {
		row := table[refusal]
		e.Meaning, e.Impact, e.Action = row.Public, row.Impact, row.Action
	}
	return e
}

// DriftCatalogue returns the explanations of all reasons of verdicts, in the order of the enum.
func DriftCatalogue() []Explanation { return explainAll(ExplainDrift) }

const noWork = "no work is offered to the node; its workloads go on"

// driftRows are never written after the process starts.
var driftRows = map[commonv1.DriftReason]Explanation{
	commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN: {
		Meaning: "nothing was heard of the agent for longer than node.heartbeat_stale_after_seconds, while we listened",
		Impact:  "no work is offered to it; its workloads go on unless the host is down", Owner: "agent / host",
		NextAction: "wait for the agent; if it stays away, restart it on its host", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED: {
		Meaning: "the node's certificate has expired, so it opens no session",
		Impact:  noWork, Owner: ownerAgent,
		NextAction: "wait: the agent recovers with its recovery token", Action: recov,
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED: {
		Meaning: "the node shows a certificate that recovery does not accept for it",
		Impact:  noWork, Owner: ownerRecovery,
		NextAction: "wait: the node enrols again, a bounded number of times", Action: recov,
	},
	commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS: {
		Meaning:    "the ingress refuses certificates that this mesh's authority issued: what it trusts is not what issues",
		Impact:     "nodes that connect anew cannot; more of the fleet goes as sessions end. Workloads go on",
		Owner:      ownerControl,
		NextAction: "repair what the ingress trusts first, then enrol only the nodes that still need it",
		Action:     wait,
	},
	commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT: {
		Meaning: "the node's endpoints are not those of this mesh",
		Impact:  noWork, Owner: ownerProfile,
		NextAction: "issue a bundle (`gpuaas nodes bundle NODE`): the node's endpoints are not those of this mesh",
		Action:     rebundle,
	},
	commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED: {
		Meaning: "the node does not trust the certificate of the server that it reaches",
		Impact:  noWork, Owner: ownerProfile,
		NextAction: "wait for the recovery by pinned trust; if it does not come, issue a bundle (`gpuaas nodes bundle NODE`)",
		Action:     recov,
	},
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED: {
		Meaning: "the node cannot recover, as the evidence says: it trusts neither the mesh nor the endpoint at which it " +
			"would, its attempts are used up or were in vain, or the policy leaves it to operators (node.auto_recovery)",
		Impact: noWork + "; it does not come back by itself", Owner: ownerProfile,
		NextAction: "repair what the evidence names, such as the node's profile, or issue a bundle " +
			"(`gpuaas nodes bundle NODE`)",
		Action: rebundle,
	},
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING: {
		Meaning: "the node needs its recovery token, which is absent, used or too old",
		Impact:  noWork + "; it does not come back by itself", Owner: ownerOperator,
		NextAction: "issue a bundle (`gpuaas nodes bundle NODE`): the node has no recovery token that may still be used",
		Action:     rebundle,
	},
	commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE: {
		Meaning: "tasks of the node expired in the queue and are still recorded as under way",
		Impact:  "what is shown of these tasks is old; what runs on the node is not touched", Owner: ownerLifecycle,
		NextAction: "wait: the next sweep ends what has expired", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED: {
		Owner:      ownerSecurity,
		NextAction: "reactivate the node; to enrol it again, issue a bundle then (`gpuaas nodes bundle NODE`)",
	},
	commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED: {
		Owner: ownerSecurity, NextAction: "fence the node, find the second copy, and give the machine a new identity",
	},
	commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW: {
		Meaning: "the host's clock differs from ours by more than certificates allow",
		Impact:  noWork + ". Nothing is enrolled again on a wrong clock's word", Owner: ownerHost,
		NextAction: "set the host's clock right; certificates are judged again after that", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED: {
		Meaning: "an edge in front of the mesh answers the agent that it asks too often",
		Impact:  noWork + " while it lasts", Owner: "edge",
		NextAction: "wait: the agent asks less often; if it stays, repair the rule of the edge", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT: {
		Meaning: "the node's addresses are not those that are recorded",
		Impact:  "none for its workloads; its identity is untouched", Owner: ownerRecovery,
		NextAction: "none: the present addresses are recorded, and the next sweep ends this", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT: {
		Meaning: "the agent does not know a type of task that the control plane queues",
		Impact:  "tasks of types that it does not know are refused; all else goes on", Owner: "rollout",
		NextAction: "update the agent", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT: {
		Meaning: "GPUs, driver, kernel or container runtime of the host are not what they were",
		Impact: "workloads on the node may fail; it is cordoned while this lasts: nothing new is placed there, and nothing " +
			"is started on it but what diagnoses, ends or releases",
		Owner: "provider",
		NextAction: "diagnose the node, then repair or reimage it; `gpuaas nodes accept-facts NODE --reason TEXT` if the " +
			"change was meant", Action: stop,
	},
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE: {
		Meaning: "no replica of nodeapi listens, so no silence means anything",
		Impact:  "running workloads go on; operations wait", Owner: ownerControl,
		NextAction: "none at the node: no replica of nodeapi listens; restore the control plane", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK: {
		Owner: ownerControl, NextAction: "none at the node: follow docs/restore.md (`gpuaas rollback status`)",
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE: {
		Meaning: "the agent is not known to be connected, and nothing that is known names a cause",
		Impact:  noWork + " as far as is known", Owner: "unknown",
		NextAction: "collect the host's diagnostics: nothing that is known names a cause", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_DISCONNECTED: {
		Meaning: "the node has no session now; it was heard a short time ago",
		Impact:  "no work is offered to it; its workloads go on", Owner: ownerAgent,
		NextAction: "wait: the agent connects again by itself; if it does not, look on its host whether the agent runs, " +
			"and at what `gpuaas-node-agent diag` prints there", Action: wait,
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD: {
		Owner: ownerOperator, NextAction: "look at the reason of the hold, then reactivate, quarantine or fence",
	},
	commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST: {
		Owner: ownerOperator, NextAction: "let the node recover, or issue a bundle (`gpuaas nodes bundle NODE`)",
	},
	commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE: {
		Meaning: "an enrolment token was used with two keys; its family is revoked",
		Impact:  "the node is on hold", Owner: ownerSecurity,
		NextAction: "fence the node: its enrolment token was used with two keys", Action: stop,
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED: {
		Owner: ownerLifecycle, NextAction: "wait: lifecycle has yet to open its gate",
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL: {
		Owner: ownerAgent + " / host", NextAction: "free room on its disk",
	},
}
