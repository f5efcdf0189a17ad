package runbook

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Reason is the entry of the runbook for one reason of a node's verdict. What the reason means and who acts is in the
// catalogue of package fault.
type Reason struct {
	Check []string // what tells more, in this order
	Steps []string // what an operator does, in this order
}

// OfReason returns the entry of a reason; the bool is false if there is none. The pages of docs/runbooks are made of it
// by a test.
func OfReason(reason commonv1.DriftReason) (Reason, bool) {
	r, ok := reasons[reason]
	return r, ok
}

// What several reasons have in common.
const (
	getNode    = "`gpuaas nodes get NODE` shows identity, session and gate apart, and the evidence of the verdict"
	hostDiag   = "on the host, `gpuaas-node-agent diag` prints what it recorded while it could not reach the mesh"
	newBundle  = "`gpuaas nodes bundle NODE --reason TEXT`, then on the host the command that it prints"
	newNode    = "`gpuaas nodes enroll --name NAME --out DIR`, then `gpuaas-node-agent enroll` with the bundle on the host"
	reactivate = "`gpuaas nodes reactivate NODE --reason TEXT`"
	anew       = reactivate + ", by a person with the security role: it ends the certificates and tokens of both hosts, " +
		"so that neither comes back by itself"
	orRetire = "or end the node for good, which frees its name: `gpuaas nodes retire NODE --reason TEXT`, then " + newNode
	howMany  = "`gpuaas incidents list` shows whether many nodes have it at once: then the cause is not at the node"
	auditOf  = "`gpuaas audit list` shows who decided it and why"
)

// reasons are never written after the process starts.
var reasons = map[commonv1.DriftReason]Reason{
	commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN: {
		Check: []string{getNode, howMany, hostDiag},
		Steps: []string{
			"wait five minutes: an agent that is restarted, or whose network returns, connects by itself with the same " +
				"certificate",
			"if the host answers, restart the agent's service there; it resumes its tasks, and workloads are not touched",
			"if the host does not answer, repair the host or its network",
			"for workspaces that cannot wait, `gpuaas workspaces recreate WS --fenced-proof PROOF --reason TEXT` once the " +
				"machine is proved to be off",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED: {
		Check: []string{getNode, hostDiag},
		Steps: []string{
			"wait: an agent with a recovery token that is still valid enrols by itself",
			"if the verdict becomes `recovery_token_missing`, go on there",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED: {
		Check: []string{getNode, howMany},
		Steps: []string{
			"wait: the agent enrols again with its recovery token, at most node.recovery_attempts_per_hour times",
			"if its attempts are used up, issue a bundle: " + newBundle,
		},
	},
	commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS: {
		Check: []string{
			howMany, "compare both sides: `gpuaas ca status` names the one that has changed, and `gpuaas ca preflight` shows " +
				"each handshake",
		},
		Steps: []string{
			"repair the trust of the ingress, from the authority that issues now: its file, or `gpuaas ca repair --root " +
				"FINGERPRINT --reason TEXT` after you have compared the root; enrol nothing before that, for new certificates " +
				"would be refused as well",
			"see that `gpuaas nodes probe NODE` succeeds on one node",
			"only then enrol the nodes that are still refused",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT: {
		Check: []string{getNode, hostDiag},
		Steps: []string{
			"issue a bundle, which rewrites endpoints and trust: " + newBundle,
		},
	},
	commonv1.DriftReason_DRIFT_REASON_SERVER_TLS_UNTRUSTED: {
		Check: []string{hostDiag, howMany},
		Steps: []string{
			"wait for trust.dwell_seconds: an agent whose pinned recovery trust still holds repairs its profile by itself then",
			"if it does not come, issue a bundle: " + newBundle,
			"if many nodes have it, look at the certificate of the servers first",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED: {
		Check: []string{hostDiag, howMany},
		Steps: []string{
			"put good roots back on its host, as `ca-bundle.crt` for the node API or as `recovery-ca-bundle.crt` for " +
				"enrolment: the agent reads both again by itself; or issue a bundle: " + newBundle,
		},
	},
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING: {
		Check: []string{getNode, hostDiag},
		Steps: []string{
			"issue a bundle: " + newBundle,
			"if tokens are lost often, look at node.recovery_token_max_age_seconds: `gpuaas policy get`",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE: {
		Check: []string{"`gpuaas tasks list --node NODE --current`", "`gpuaas findings list`"},
		Steps: []string{
			"wait for the next sweep (node.task_stale_sweep_interval_seconds)",
			"if it stays, see that lifecycle runs: `gpuaas status`",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED: {
		Check: []string{getNode, auditOf},
		Steps: []string{
			"quarantined: when it is cleared, " + reactivate,
			"fenced: the same, by a person with the security role, who knows what became of the machine",
			"if the machine's keys may be known to others, enrol it as a new node instead: " + newNode,
			"retired: nothing; this identity is final",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED: {
		Check: []string{getNode, "the addresses, machine ids and boot ids of the two holders, in the evidence", auditOf},
		Steps: []string{
			"`gpuaas nodes fence NODE --reason TEXT`, by a person with the security role",
			"find the second machine, or the disk or image that was copied, and delete the agent's state directory there",
			anew,
			"give the real machine a new identity: " + newBundle,
			orRetire,
		},
	},
	commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW: {
		Check: []string{hostDiag, "`timedatectl` on the host"},
		Steps: []string{
			"set the host's clock right, and see that it is synchronised",
			"enrol nothing: the certificate is judged again once the clock is right",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_EDGE_RATE_LIMITED: {
		Check: []string{hostDiag, howMany},
		Steps: []string{
			"wait: the agent asks less often, and waits for as long as it is told",
			"if it stays, repair the rule of the edge that limits it",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT: {
		Check: []string{getNode},
		Steps: []string{
			"nothing: the present addresses are recorded, and the next sweep ends this. The node is not enrolled again",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT: {
		Check: []string{getNode, "`gpuaas-node-agent version` on the host"},
		Steps: []string{
			"update the agent in its maintenance window; at once if work is refused",
			"then repeat the work that was refused",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT: {
		Check: []string{getNode, hostDiag},
		Steps: []string{
			"leave it cordoned, as the verdict has it: `gpuaas nodes get NODE` shows by whom and why",
			"diagnose GPUs, driver, kernel and container runtime; change nothing under running workloads",
			"repair or reimage the host: with the former facts, or as a new node instance, verdict and cordon end by themselves",
			"`gpuaas nodes accept-facts NODE --reason TEXT` if the change was meant",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE: {
		Check: []string{"`gpuaas status`", "the logs of the replicas of nodeapi, and the state of their database"},
		Steps: []string{
			"restore nodeapi or its database; do nothing at the nodes, whose silence means nothing now",
			"when a replica listens, agents return by themselves, spread over time; each is given the full threshold of " +
				"agent_down again",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK: {
		Check: []string{"`gpuaas rollback status`"},
		Steps: []string{
			"follow [restore](../restore.md)",
			"`gpuaas rollback accept --reason TEXT`, when what was lost is known",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE: {
		Check: []string{getNode + ", and what is missing", hostDiag},
		Steps: []string{
			"get what is missing; the verdict becomes a finer one as soon as evidence names a cause",
			"if the host cannot be reached either, treat it as `agent_down`",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_DISCONNECTED: {
		Check: []string{getNode},
		Steps: []string{
			"nothing: it is a fact and no verdict. After node.heartbeat_stale_after_seconds it becomes `agent_down`",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD: {
		Check: []string{getNode, auditOf},
		Steps: []string{
			"if the reason of the hold is explained, " + reactivate,
			"if it has to stay out, `gpuaas nodes quarantine NODE --reason TEXT`",
			"if it may be copied or stolen, `gpuaas nodes fence NODE --reason TEXT`, by a person with the security role",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST: {
		Check: []string{getNode, hostDiag, howMany},
		Steps: []string{
			"wait: an agent with a recovery token recovers by itself",
			"else issue a bundle: " + newBundle,
			"if many nodes have it, compare the keys of the replicas of recovery: `gpuaas keys list`",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE: {
		Check: []string{getNode, auditOf},
		Steps: []string{
			"`gpuaas nodes fence NODE --reason TEXT`, by a person with the security role",
			"find out who had the bundle, and who used it second",
			anew,
			"give the machine a new identity: " + newBundle,
			orRetire,
		},
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED: {
		Check: []string{getNode, "`gpuaas status`"},
		Steps: []string{
			"wait: lifecycle opens the gate within seconds of the session",
			"if it stays, see that lifecycle and recovery run, and that the identity is active",
		},
	},
	commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL: {
		Check: []string{getNode + "; the next action names the directory", "`gpuaas findings list`"},
		Steps: []string{
			"free room in that directory on the host",
			"nothing else: the node takes work again by itself once its agent sees room",
		},
	},
}
