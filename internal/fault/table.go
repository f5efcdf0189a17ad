package fault

import (
	"maps"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Row is the table's entry of a reason: the code that it is sent with, what the refused peer does, and the texts for
// people.
type Row struct {
	Code       connect.Code
	Action     commonv1.Action
	RetryAfter time.Duration // the wait sent when the fault names none
	Public     string        // the sentence sent when the fault brings none; it is also what the reason means
	Remedy     string        // the next action, sent when the fault brings none
	Impact     string        // who or what is affected while it lasts
	Owner      string        // who repairs it
}

// RowOf returns the table's row of a reason. For a reason that this build does not know, and for the unspecified one,
// it returns a row whose action is wait.
func RowOf(reason commonv1.Reason) Row {
	row, _ := lookup(reason)
	return row
}

// Known reports whether this build's table has a row for the reason.
func Known(reason commonv1.Reason) bool {
	_, ok := lookup(reason)
	return ok
}

func lookup(reason commonv1.Reason) (Row, bool) {
	if row, ok := table[reason]; ok {
		return row, true
	}
	return Row{
		Code:   connect.CodeUnavailable,
		Action: commonv1.Action_ACTION_WAIT,
		Public: "the request was refused for a reason that this version does not know",
		Remedy: "wait and try again; if it stays, update this side",
		Impact: "unknown: the peer is newer than this side",
		Owner:  "operator",
	}, false
}

// table is never written after the process starts.
var table = join(requestRows, identityRows, sessionRows, taskRows, workspaceRows, peopleRows, policyRows,
	trustRows)

func join(parts ...map[commonv1.Reason]Row) map[commonv1.Reason]Row {
	out := map[commonv1.Reason]Row{}
	for _, part := range parts {
		maps.Copy(out, part)
	}
	return out
}

const (
	wait     = commonv1.Action_ACTION_WAIT
	renew    = commonv1.Action_ACTION_RENEW
	recov    = commonv1.Action_ACTION_RECOVER
	rebundle = commonv1.Action_ACTION_REBUNDLE
	stop     = commonv1.Action_ACTION_STOP
)

const (
	ownerCaller    = "caller"
	ownerOperator  = "operator"
	ownerSecurity  = "security"
	ownerAgent     = "agent"
	ownerNodeapi   = "nodeapi"
	ownerLifecycle = "lifecycle"
	ownerRecovery  = "recovery"
	ownerReadmodel = "readmodel"
	ownerControl   = "control plane"
	ownerProfile   = "profile"
	ownerHost      = "host"
)
