package list

import (
	"regexp"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// TheMachine stands in texts for tenants where the name or the id of a node stood.
const TheMachine = "its machine"

// Shown returns a message as the scope may see it: itself for people of the operator, and for a person of a tenant a
// copy without nodes, replicas, reasons of nodes and texts that are written for operators.
func Shown[M proto.Message](s Scope, m M) M {
	if s.all {
		return m
	}
	m = proto.CloneOf(m)
	hide(m.ProtoReflect())
	return m
}

// ShownAll returns each of the messages as the scope may see it.
func ShownAll[M proto.Message](s Scope, messages []M) []M {
	if s.all {
		return messages
	}
	out := make([]M, len(messages))
	for i, m := range messages {
		out[i] = Shown(s, m)
	}
	return out
}

// operators are the fields of any message that are for people of the operator alone.
var operators = map[protoreflect.Name]bool{
	"node_id": true, "node_name": true, "node_ids": true, "node_names": true, "node_instance_id": true,
	"replica_id": true, "owner": true, "provider_id": true, "external_ref": true, "gpu_device_ids": true,
	"cause": true, "detail": true, "findings": true, "agent_detail": true, "cancel_reason": true, "end_reason": true,
	"orphan_reason": true, "stuck_reason": true, "orphaned_by": true, "updated_by": true, "session_epoch": true,
	"verdict_stale_since": true,
}

// hide removes from a message, and from the messages in it, what a person of a tenant does not see.
func hide(m protoreflect.Message) {
	if w, ok := m.Interface().(*readmodelv1.Workspace); ok {
		hideWorkspace(w)
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch {
		case !m.Has(f):
		case operators[f.Name()]:
			m.Clear(f)
		case f.Message() == nil || f.IsMap():
		case f.IsList():
			for n := range m.Get(f).List().Len() {
				hide(m.Get(f).List().Get(n).Message())
			}
		default:
			hide(m.Get(f).Message())
		}
	}
	hideTexts(m.Interface())
}

// hideTexts removes from the texts of a message what a person of a tenant does not see.
func hideTexts(m proto.Message) {
	switch m := m.(type) {
	case *lifecyclev1.Run:
		m.ErrorCode, m.Error = Failure(m.GetErrorCode(), m.GetError(), m.GetErrorLayer())
		m.WhyWaiting = WithoutIDs(m.GetWhyWaiting())
	case *lifecyclev1.StepAttempt:
		m.ErrorCode, m.Error = Failure(m.GetErrorCode(), m.GetError(), m.GetErrorLayer())
		m.WhyWaiting, m.Progress = WithoutIDs(m.GetWhyWaiting()), WithoutIDs(m.GetProgress())
	case *readmodelv1.TimelineItem:
		m.ErrorCode, m.Error = Failure(m.GetErrorCode(), m.GetError(), m.GetErrorLayer())
		m.WhyWaiting, m.Progress = WithoutIDs(m.GetWhyWaiting()), WithoutIDs(m.GetProgress())
		if m.GetErrorLayer() != commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD {
			m.LikelyCause, m.Advice = "", ""
		}
	case *readmodelv1.RunBrief:
		m.ErrorCode, m.Error = Failure(m.GetErrorCode(), m.GetError(), m.GetErrorLayer())
	case *readmodelv1.Task:
		_, m.Error = Failure(names.Of(m.GetReason()), m.GetError(), commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED)
		if !fault.ForTenants(m.GetReason()) {
			m.Reason = commonv1.Reason_REASON_UNSPECIFIED
		}
	case *lifecyclev1.Allocation:
		if m.GetLastError() != "" {
			m.LastError = notDone
		}
	case *recoveryv1.RecoveryRecord:
		hideRecovery(m)
	case *readmodelv1.AuditRow:
		hideEntry(m)
	case *recoveryv1.PolicyKey:
		m.Reason = ""
	case *readmodelv1.Notification:
		m.OperatorReason, m.IncidentId, m.Evidence, m.CorrelationId = "", "", nil, ""
	}
}

// hideWorkspace removes why an agent cannot act: its user sees that in the layers, in plain words.
func hideWorkspace(w *readmodelv1.Workspace) {
	w.Reason = ""
	w.LastErrorCode, w.LastError = Failure(w.GetLastErrorCode(), w.GetLastError(),
		commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED)
	w.LastError = WithoutIDs(w.GetLastError(), w.GetNodeName())
	w.WhyWaiting = WithoutIDs(w.GetWhyWaiting(), w.GetNodeName())
}

func hideRecovery(r *recoveryv1.RecoveryRecord) {
	if r.GetWithheldBecause() != "" { // which counts other tenants' workspaces, where the brake is engaged
		r.WithheldBecause = "automatic repairs wait"
	}
	r.ErrorCode, _ = Failure(r.GetErrorCode(), "", commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED)
	r.UserImpact = WithoutIDs(r.GetUserImpact())
}

// hideEntry leaves the reason, which the list of entries has only of people of the tenant. The numbers of two entries
// tell how many entries others have between them, and a hash proves a guess at what is hidden of its entry.
func hideEntry(row *readmodelv1.AuditRow) {
	row.Number, row.PreviousHash, row.Hash = 0, "", ""
	if e := row.GetEntry(); e != nil {
		e.Details, e.Reason = nil, WithoutIDs(e.GetReason())
	}
}

const notDone = "it could not be completed; your operator can see why"

// Failure returns the code and the text of a failure as a person of a tenant sees them. The text was written for
// people, and what is under it is its cause; so it is kept, without ids, names of machines and the
// state of their disks, unless it is about a node.
func Failure(code, text string, layer commonv1.OwnerLayer) (string, string) {
	reason, err := names.Parse[commonv1.Reason](code)
	public := err == nil && fault.ForTenants(reason)
	if !public {
		code = ""
	}
	switch {
	case text == "":
	case public || layer == commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD:
		text = WithoutIDs(text)
	default:
		text = notDone
	}
	return code, text
}

// ids are ids, and instances the names that launched instances have as nodes. An ofNode is what lifecycle adds to a
// text about work that waits for a node, or has failed on it, while the disk of the agent has no room or the node's
// host is not as it was accepted.
var (
	ids       = regexp.MustCompile(`(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
	instances = regexp.MustCompile(`\bbox-[0-9a-z][0-9a-z-]*\b`)
	ofNode    = regexp.MustCompile(`(?s)[;:] the node(?:'s state directory has no room| is cordoned by)\b.*`)
)

// WithoutIDs returns a text without ids, without what it says of a node's disk and cordon, and without the names of
// machines as WithoutMachines does.
func WithoutIDs(text string, machines ...string) string {
	text = ofNode.ReplaceAllLiteralString(text, "")
	return ids.ReplaceAllLiteralString(WithoutMachines(text, machines...), "(an id)")
}

// WithoutMachines returns a text in which no names of instances' nodes stand, and none of the names or ids of machines.
func WithoutMachines(text string, machines ...string) string {
	for _, name := range machines {
		if name != "" {
			text = strings.ReplaceAll(text, name, TheMachine)
		}
	}
	return instances.ReplaceAllLiteralString(text, TheMachine)
}
