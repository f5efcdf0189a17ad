package fault

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// ExplainFinding returns the explanation of a kind of findings. Where a verdict or a refusal has the same code, it is
// theirs. For an unknown kind, and for the unspecified one, only the code is set.
func ExplainFinding(kind commonv1.FindingKind) Explanation { return explainShared(kind, findingRows) }

// FindingCatalogue returns the explanations of all kinds of findings, in the order of the enum.
func FindingCatalogue() []Explanation { return explainAll(ExplainFinding) }

// ExplainIncident returns the explanation of a kind of incidents. Where a verdict or a refusal has the same code, it is
// theirs. For an unknown kind, and for the unspecified one, only the code is set.
func ExplainIncident(kind commonv1.IncidentKind) Explanation {
	return explainShared(kind, incidentRows)
}

// IncidentCatalogue returns the explanations of all kinds of incidents, in the order of the enum.
func IncidentCatalogue() []Explanation { return explainAll(ExplainIncident) }

const (
	cordoned     = "the node takes no new workspace while it is open; what runs goes on"
	harmsNothing = "none by itself: what runs goes on"
	seeBefore    = "`gpuaas findings get ID` shows what should be and what is; "
)

// findingRows are never written after the process starts.
var findingRows = map[commonv1.FindingKind]Explanation{
	commonv1.FindingKind_FINDING_KIND_NODE_OCCUPIED_WITHOUT_ALLOCATION: {
		Meaning: "a node holds devices, a slot, an instance or workloads of a workspace that has no allocation there",
		Impact:  cordoned, Owner: ownerLifecycle,
		NextAction: seeBefore + "the reaper ends what no workspace owns; what stays is removed on the node", Action: wait,
	},
	commonv1.FindingKind_FINDING_KIND_ALLOCATION_WITHOUT_OCCUPANCY: {
		Meaning: "an active allocation has no instance that lives, or fewer devices than it is of",
		Impact:  "the workspace of the allocation may not work; its node takes no new one", Owner: ownerLifecycle,
		NextAction: seeBefore + "recreate or decommission the workspace", Action: wait,
	},
	commonv1.FindingKind_FINDING_KIND_INSTANCE_WITHOUT_ROW: {
		Meaning: "a provider lists an instance that no row names as standing, or two of one workspace",
		Impact:  "it uses resources that nothing accounts for; of two of one workspace, both may act", Owner: ownerOperator,
		NextAction: seeBefore + "end the one that no workspace needs with `gpuaas instances end INSTANCE --reason TEXT`",
		Action:     stop,
	},
	commonv1.FindingKind_FINDING_KIND_CLAIM_WITHOUT_RESOURCE: {
		Meaning: "what a workspace claims (an instance, identity, schema, slot, workload or directory) is gone",
		Impact:  "the workspace may not work. Where nothing of it is left on its machine it is recreated by itself",
		Owner:   ownerLifecycle, NextAction: seeBefore + "recreate or decommission the workspace", Action: wait,
	},
	commonv1.FindingKind_FINDING_KIND_RESOURCE_WITHOUT_CLAIM: {
		Meaning: "something exists for a workspace that no claim of it holds",
		Impact:  harmsNothing + ", and nothing would clean it up", Owner: ownerOperator,
		NextAction: seeBefore + "find out who made it, and drop it once it is not needed", Action: stop,
	},
	commonv1.FindingKind_FINDING_KIND_SUCCESSIVE_PROVISIONS: {
		Meaning: "one tenant's name was created, retried or recreated three times within a quarter of an hour",
		Impact:  "each costs a launch; something asks again and again", Owner: ownerOperator,
		NextAction: "find out who asks with `gpuaas audit list --workspace WS`", Action: stop,
	},
	commonv1.FindingKind_FINDING_KIND_ROW_CHANGED_OUTSIDE: {
		Meaning: "a row of a workspace, run or allocation was changed by hand",
		Impact:  "what the mesh believes of it may be wrong", Owner: ownerOperator,
		NextAction: seeBefore + "put it back, or `gpuaas findings acknowledge ID --reason TEXT`", Action: stop,
	},
	commonv1.FindingKind_FINDING_KIND_ENDED_INSTANCE_WOKE: {
		Meaning: "an instance whose epoch is over was started again",
		Impact:  "it was refused and runs nothing; the present instance is not touched", Owner: ownerOperator,
		NextAction: "find out on its host who started it, and remove it there", Action: stop,
	},
}

// incidentRows are never written after the process starts.
var incidentRows = map[commonv1.IncidentKind]Explanation{
	commonv1.IncidentKind_INCIDENT_KIND_STEP_CLASS: {
		Meaning: "the same step fails with the same error at several tenants: the cause is ours, not theirs",
		Impact:  "workspaces on their way up fail at that step; those that are up go on", Owner: ownerControl,
		NextAction: "repair what the error names; the watchdog recreates what failed, within its budgets", Action: wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_FLEET_BRAKE: {
		Meaning: "too much of the fleet failed at once: automatic remedies are stopped, because the cause may be ours",
		Impact:  "nothing is recreated or put on hold by itself meanwhile; enrolment with a proven key goes on",
		Owner:   ownerControl,
		NextAction: "find the common cause with `gpuaas brake status`; then `gpuaas brake release --reason TEXT`, or wait " +
			"until the share falls", Action: wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_CHURN_BUDGET: {
		Meaning: "a workspace, or the instances of a placement, have used up their recreations for now",
		Impact:  "the workspace is not recreated until the budget has room", Owner: ownerOperator,
		NextAction: "find out why its instances do not last; the next attempt comes by itself", Action: wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_MACHINE_UNREACHABLE: {
		Meaning: "a shared machine with workspaces cannot be reached, and nothing proves that their work has ended",
		Impact:  "its workspaces are kept and cannot be managed; what runs on it may go on", Owner: ownerOperator,
		NextAction: "restart the machine or its agent; to move its workspaces, recreate each with a fenced proof",
		Action:     wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_SIGNING_KEYS: {
		Meaning: "a replica does not hold a key with which the mesh signs",
		Impact:  "what is signed by that key waits at that replica; nothing is refused for good", Owner: ownerControl,
		NextAction: "give the replica the key's file (docs/keys.md)", Action: wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_ISSUER_UNTRUSTED: {
		Meaning: "the ingress refuses the certificates that the authority signs: one of the two has changed",
		Impact:  "no certificate is issued or renewed; sessions and workloads go on", Owner: ownerControl,
		NextAction: "`gpuaas ca status` names the side that changed; repair it first, and enrol nothing meanwhile",
		Action:     wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT: {
		Meaning: "many nodes have the same reason at once, which one cause of ours explains better than each of them",
		Impact: "none by itself: the verdicts on the nodes stay, and workloads go on; verdicts cordon no more nodes than " +
			"may fail at once, and the fleet brake stops automatic remedies by a count of its own", Owner: ownerControl,
		NextAction: "look at what these nodes share (endpoint, issuer, network) before any one of them; it ends when fewer " +
			"have the reason, or by `gpuaas incidents close INCIDENT --reason TEXT`", Action: wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_IDENTITY_SUSPECTED: {
		Meaning: "a node's identity has a second holder: its directory was copied, or its token was used with two keys",
		Impact:  "the node is on hold, so neither holder has a session; what was on the machine may be known to others",
		Owner:   ownerSecurity,
		NextAction: "fence the nodes that the incident names (`gpuaas nodes fence NODE --reason TEXT`), find the second " +
			"holder, and give each machine a new identity; once it is judged and nodes stay on hold, `gpuaas incidents close " +
			"INCIDENT --reason TEXT`", Action: stop,
	},
	commonv1.IncidentKind_INCIDENT_KIND_STATE_OVERDUE: {
		Meaning: "nodes are pending, on hold, quarantined or fenced for longer than that state may last",
		Impact:  "none by itself: such a node takes no work, and nothing moves it on but its machine or a person",
		Owner:   ownerOperator,
		NextAction: "find out what each node that the incident names waits for with `gpuaas nodes get NODE`; then move it " +
			"on, or retire it; if it is to stay, `gpuaas incidents close INCIDENT --reason TEXT`", Action: wait,
	},
	commonv1.IncidentKind_INCIDENT_KIND_STORAGE: {
		Meaning: "the database is about to have no room",
		Impact:  "when it is full nothing is recorded any more, so nothing is decided", Owner: ownerControl,
		NextAction: "give it room; `gpuaas retention status` shows what grows", Action: wait,
	},
}
