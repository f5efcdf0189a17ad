package fault

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// ExplainDiagnostic returns the explanation of what a host records of itself. Where a verdict or a refusal has the same
// code, it is theirs. For an unknown code, and for the unspecified one, only the code is set.
func ExplainDiagnostic(code commonv1.DiagnosticCode) Explanation {
	return explainShared(code, diagnosticRows)
}

// DiagnosticCatalogue returns the explanations of all diagnostic codes, in the order of the enum.
func DiagnosticCatalogue() []Explanation { return explainAll(ExplainDiagnostic) }

const (
	hostOnly = "the node may have no session; its workloads go on"
	ownerNet = "host / network"
)

// diagnosticRows are the codes that no verdict and no refusal has. They are never written after the process starts.
var diagnosticRows = map[commonv1.DiagnosticCode]Explanation{
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROCESS_ALIVE: {
		Meaning: "the agent's process runs on its host, whether or not it reaches the mesh",
		Impact:  "none by itself: it tells an agent that cannot connect from one that does not run", Owner: ownerAgent,
		NextAction: "look at the records beside it: they say why it does not connect", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED: {
		Meaning: "the control plane refused the identity of this host: it is held, quarantined, fenced or retired, or its " +
			"epoch is over",
		Impact: hostOnly, Owner: ownerOperator,
		NextAction: "look at the node's identity with `gpuaas nodes get NODE`, and at who decided it in `gpuaas audit list`",
		Action:     stop,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED: {
		Meaning: "the stream to the control plane could not be opened, or broke, for none of the causes that have a code",
		Impact:  hostOnly, Owner: ownerAgent,
		NextAction: "wait: the agent connects again by itself; if it does not, read the detail of the record", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED: {
		Meaning: "nothing listens at the address of the control plane, or something on the way refuses the connection",
		Impact:  hostOnly, Owner: ownerNet,
		NextAction: "compare the address in the detail with the mesh's, then look at firewalls and at nodeapi", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED: {
		Meaning: "the host could not resolve the control plane's name",
		Impact:  hostOnly, Owner: ownerNet,
		NextAction: "repair the host's name resolution, or the name in node-agent.env", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_TIMED_OUT: {
		Meaning: "the control plane did not answer in time: a connect, a handshake or the opening of a session",
		Impact:  hostOnly, Owner: ownerNet,
		NextAction: "look for a firewall that drops packets between the host and the mesh, then at the load of nodeapi",
		Action:     wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_NOT_YET_VALID: {
		Meaning: "a certificate begins later than the host's clock says it is now",
		Impact:  hostOnly, Owner: ownerHost,
		NextAction: "set the host's clock right; the certificate is judged again after that", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CLOCK_SKEWED: {
		Meaning: "the host's clock differs from the control plane's by more than certificates allow",
		Impact:  noWork, Owner: ownerHost,
		NextAction: "set the host's clock right, and see that it is synchronised", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_PROFILE_REFUSED: {
		Meaning: "a profile or a bundle was not taken: its endpoints were not verified with its own trust, or it is " +
			"not for this node",
		Impact: "the host keeps the endpoints and the trust that it has", Owner: ownerOperator,
		NextAction: "correct the profile, or issue another bundle (`gpuaas nodes bundle NODE`)", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_NAME_MISMATCH: {
		Meaning: "the server that answered has a certificate of a trusted issuer that is of another identity",
		Impact:  hostOnly, Owner: ownerOperator,
		NextAction: "compare the address in node-agent.env with the mesh's: the agent may reach another mesh or service",
		Action:     wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED: {
		Meaning: "the control plane refused to enrol this host, or to renew its certificate, with the reason in the detail",
		Impact:  hostOnly, Owner: ownerOperator,
		NextAction: "explain the reason in the detail: `gpuaas explain reason CODE`", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED: {
		Meaning: "the control plane refused this host's session, with the reason in the detail",
		Impact:  hostOnly, Owner: ownerOperator,
		NextAction: "explain the reason in the detail: `gpuaas explain reason CODE`", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED: {
		Meaning: "the agent could not read or write its own directories",
		Impact:  "the agent keeps nothing new, so it opens no session and takes no task; what runs goes on", Owner: ownerHost,
		NextAction: "look at the disk and the rights of the directories in the detail", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_REFUSED: {
		Meaning: "the agent did not take a task that was offered, or its ledger had a task of another node",
		Impact:  "the task was not run here; its operation goes on or fails with that reason", Owner: ownerLifecycle,
		NextAction: "look at the task with `gpuaas tasks list --node NODE`", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_LEDGER_SET_ASIDE: {
		Meaning:    "the ledger of tasks was another node's or could not be read, and a new one began",
		Impact:     "what was under way there has an unknown outcome until it is observed; nothing is run twice",
		Owner:      ownerAgent,
		NextAction: "wait for the operations to observe what is there; keep the file that was set aside", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL: {
		Meaning: "the directories that the agent itself writes to have no room",
		Impact:  "new storage and workloads are refused on the node; what runs goes on", Owner: ownerHost,
		NextAction: "free room on the disk that the detail names", Action: wait,
	},
	commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_KEYS_REFUSED: {
		Meaning: "the list of the keys of tasks led from no key that this host holds, or could not be stored",
		Impact:  "the agent refuses tasks that are signed by the new key", Owner: ownerOperator,
		NextAction: "issue a bundle (`gpuaas nodes bundle NODE`) if the detail says that no key leads to the list; else " +
			"free its disk",
		Action: rebundle,
	},
}
