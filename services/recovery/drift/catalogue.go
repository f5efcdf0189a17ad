package drift

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Row is the catalogue's entry of a reason.
type Row struct {
	Reason        commonv1.DriftReason
	UserState     commonv1.UserState // the family in which people see it
	Severity      commonv1.Severity
	Owner         string // who acts next
	NextAction    string
	DetectWithin  time.Duration // after the first evidence
	RecoverWithin time.Duration // after the verdict
	Drill         string        // the row of the failure matrix that has these budgets

	rank     int     // the higher one wins
	by       sources // who may see it; none: it is no evidence of a reason, or concluded by Classify alone
	holds    condition
	explains bool // of a P2: it explains why an agent is not heard

	// AsksHost is set where what the control plane sees does not say why: the agent is asked for its host's record, once
	// for each verdict, when it is connected.
	AsksHost bool
}

// sources is a set of sources of evidence.
type sources uint

func of(all ...commonv1.EvidenceSource) sources {
	var s sources
	for _, source := range all {
		s |= 1 << source
	}
	return s
}

func (s sources) has(source commonv1.EvidenceSource) bool {
	return source > 0 && source < 32 && s&(1<<source) != 0
}

// The sources of evidence.
const (
	FromIdentity  = commonv1.EvidenceSource_EVIDENCE_SOURCE_IDENTITY
	FromSession   = commonv1.EvidenceSource_EVIDENCE_SOURCE_SESSION
	FromGate      = commonv1.EvidenceSource_EVIDENCE_SOURCE_GATE
	FromReplicas  = commonv1.EvidenceSource_EVIDENCE_SOURCE_REPLICAS
	FromRollback  = commonv1.EvidenceSource_EVIDENCE_SOURCE_ROLLBACK
	FromHost      = commonv1.EvidenceSource_EVIDENCE_SOURCE_HOST
	FromIngress   = commonv1.EvidenceSource_EVIDENCE_SOURCE_INGRESS
	FromEnrolment = commonv1.EvidenceSource_EVIDENCE_SOURCE_ENROLLMENT

	FromTasks = commonv1.EvidenceSource_EVIDENCE_SOURCE_TASKS
)

// condition is what has to be so, beside fresh evidence, for a reason to hold.
type condition int

const (
	always    condition = iota
	unheard             // the agent is not connected
	connected           // the agent is connected
)

// RowOf returns the row of a reason, and whether there is one.
func RowOf(reason commonv1.DriftReason) (Row, bool) {
	if reason <= 0 || int(reason) >= len(rows) {
		return Row{}, false
	}
	return rows[reason], true
}

// CompareRank returns a positive number if the verdict names a where a and b hold at once, a negative one if it names
// b, and zero if they are the same. Any reason wins over unspecified.
func CompareRank(a, b commonv1.DriftReason) int {
	one, _ := RowOf(a)
	other, _ := RowOf(b)
	return one.rank - other.rank
}

const (
	normal    = commonv1.UserState_USER_STATE_NORMAL
	temporary = commonv1.UserState_USER_STATE_TEMPORARY
	repairing = commonv1.UserState_USER_STATE_RECOVERING
	operator  = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	security  = commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
)
