package watchdog

import (
	"fmt"
	"slices"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/runbook"
)

// detect returns the trigger of a workspace without a record; unspecified if there is no failure on which the watchdog
// may act. The silence of a machine that several workspaces share is no trigger: see machines.
func detect(s *subject, cfg Config, now time.Time) commonv1.RecoveryTrigger {
	switch s.State { //nolint:exhaustive // undo states, stuck and what is over never trigger
	case commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING:
		if s.Run.over() {
			break // a workspace keeps its state while its operation is undone
		}
		if s.Run != nil && s.Run.Stalled {
			return triggerStalled
		}
		if s.RegisterFailures >= cfg.RegisterFailures && s.RegisterSince != nil &&
			now.Sub(*s.RegisterSince) >= cfg.RegisterFor {
			return triggerRegister
		}
	case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:
		switch {
		case s.Reach == reachLost && !s.static():
			return triggerSession
		case s.emptied():
			return triggerEmptied
		}
	}
	return commonv1.RecoveryTrigger_RECOVERY_TRIGGER_UNSPECIFIED
}

// open returns a new record for a detection.
func open(s *subject, trigger commonv1.RecoveryTrigger, now time.Time) *record {
	r := &record{
		ID: ids.New(), WorkspaceID: s.WorkspaceID, Workspace: s.path(), TenantID: s.TenantID, Trigger: trigger,
		Outcome: outcomeOpen, DetectedAt: now, CorrelationID: ids.New(), Unit: s.unit(), Placement: s.Placement,
		NodeID: s.NodeID, RunID: s.RunID,
	}
	switch trigger { // manual ones are made where they are found
	case triggerStalled:
		r.Step, r.ErrorCode, r.Cause = s.Run.Step, stalledStep, s.Run.StuckReason
		if row, ok := runbook.Of(s.Run.Step); ok {
			r.Cause = row.Cause
		}
		r.Impact = "the workspace was not to be used: it was still being provisioned"
	case triggerRegister:
		r.ErrorCode, r.Cause = s.LastErrorCode,
			fmt.Sprintf("its instance was refused %d times: %s", s.RegisterFailures, s.LastError)
		if s.Run != nil {
			r.Step = s.Run.Step
		}
		r.Impact = "the workspace was not to be used: its instance could not enrol"
	case triggerEmptied:
		r.ErrorCode = names.Of(commonv1.FindingKind_FINDING_KIND_CLAIM_WITHOUT_RESOURCE)
		r.Cause = "its machine is connected and has had nothing of it since " + s.EmptiedAt.UTC().Format(time.RFC3339) +
			", neither workloads nor directories"
		r.Impact = "what ran in the workspace has ended, and what it had stored on its machine is gone"
	default:
		r.ErrorCode = s.CloseReason
		r.Cause = "its instance has had no session since " + s.LostSince.UTC().Format(time.RFC3339)
		if s.CloseReason != "" {
			r.Cause += ", closed as " + s.CloseReason
		}
		r.Impact = "the workspace could not be managed; what ran in it may have gone on running until its instance was " +
			"replaced"
	}
	return r
}

// request is the action that the rules require for a record.
type request int

const (
	nothing  request = iota
	withdraw         // drop the stored request that is not answered
	replay           // send that request again for its answer alone: its operation has been seen
	repeat           // send that request again, if nothing withholds it
	recreate         // make a new request, if nothing withholds it
)

// follow updates an open record from the state of its workspace, and returns the action that the record requires. It
// changes the record alone. s is nil if nothing is known of the workspace. A request that is not answered is evaluated
// like one that was never made, since it may be wrong by now to make it.
func follow(r *record, s *subject, cfg Config, now time.Time) request {
	if !r.pending() {
		return followUnasked(r, s, cfg, now)
	}
	if r.NextAt != nil && r.NextAt.After(now) {
		return nothing // the events of what the request may have done may still come
	}
	if s != nil && s.RunID != r.RunID && s.RunID != r.OperationID && s.Run != nil && ours(s.Run.Requester) &&
		s.Run.CancelBy == "" {
		return replay
	}
	decided := *r
	decided.Asked--
	switch w := followUnasked(&decided, s, cfg, now); {
	case w == recreate:
		return repeat
	case decided.EndedAt != nil || decided.ByPerson:
		*r = decided
		return withdraw
	}
	return nothing
}

// followUnasked is follow for a record without an unanswered request.
func followUnasked(r *record, s *subject, cfg Config, now time.Time) request {
	switch {
	case s == nil:
		return nothing // the workspace's events have not come, or have been deleted: this is no evidence
	case s.State == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
		s.State == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING:
		r.Cause += "; the workspace was decommissioned meanwhile"
		r.end(outcomeFailed, "", now)
		return nothing
	}
	if r.Following {
		return followOperation(r, s, cfg, now)
	}
	switch s.State { //nolint:exhaustive // those above
	case commonv1.WorkspaceState_WORKSPACE_STATE_STUCK:
		stuck(r, s.Run)
	case commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING:
		takenOver(r, s.Run)
	case commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING:
		return underWay(r, s, now)
	case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:
		return whileActive(r, s, now)
	case commonv1.WorkspaceState_WORKSPACE_STATE_FAILED:
		takenOver(r, s.Run)
		if !r.ByPerson {
			return recreate
		}
		if now.Sub(s.StateAt) > cfg.PersonFor {
			leftFailed(r, s.Run)
			r.end(outcomeFailed, "", now)
		}
	}
	return nothing
}

// underWay is moveOn for a workspace that is starting by an operation which the record does not follow yet.
func underWay(r *record, s *subject, now time.Time) request {
	if s.RunID != r.RunID && s.RunID != r.OperationID {
		join(r, s) // an operation that the record does not know yet is joined, never competed with
		return nothing
	}
	if s.Run != nil && (s.Run.Phase == "undo" || s.Run.CancelBy != "") {
		takenOver(r, s.Run)
		return nothing
	}
	if s.Run != nil && s.Run.FinishedAt != nil {
		return nothing // the workspace's own event comes next
	}
	stalled := s.Run != nil && s.Run.Stalled
	if stalled || (r.Trigger == triggerRegister && s.RegisterFailures > 0) {
		return recreate
	}
	if s.RunID == r.RunID && passed(r, s.Run) {
		r.end(outcomeRecovered, byItself, now)
	}
	return nothing
}

func whileActive(r *record, s *subject, now time.Time) request {
	worked := byItself
	if s.RunID != r.RunID && s.Run != nil {
		worked = s.Run.Kind
	}
	if r.Trigger == triggerEmptied && s.RunID == r.RunID && s.EmptiedAt != nil {
		if s.Reach == reachServing {
			return recreate
		}
		return nothing // that it has nothing is no news of a machine that is not heard now
	}
	if r.Trigger != triggerSession && !(r.Trigger == triggerManual && s.RunID == r.RunID) {
		r.end(outcomeRecovered, worked, now)
		return nothing
	}
	switch s.Reach {
	case reachServing:
		r.end(outcomeRecovered, worked, now)
	case reachLost:
		return recreate
	case reachUnknown:
	}
	return nothing
}

// join makes the record follow the workspace's present operation.
func join(r *record, s *subject) {
	r.OperationID, r.Following = s.RunID, true
	r.proceed()
	if s.Run != nil && !ours(s.Run.Requester) {
		r.ByPerson, r.Trigger = true, triggerManual
	}
}

// followOperation is moveOn for a record that waits for an operation.
func followOperation(r *record, s *subject, cfg Config, now time.Time) request {
	op := s.Op
	if op != nil && op.ID != r.RunID && !ours(op.Requester) {
		r.ByPerson, r.Trigger = true, triggerManual
	}
	switch {
	case op == nil:
		// The operation's first event has not come, or it is one whose success has no events here.
		if s.RunID == r.OperationID && s.State == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE {
			r.end(outcomeRecovered, workedBy(r, nil), now)
		}
		return nothing
	case op.State == "succeeded":
		r.end(outcomeRecovered, workedBy(r, op), now)
		return nothing
	case op.State == "stuck":
		stuck(r, op)
		return nothing
	case op.State == "failed":
		return operationFailed(r, op, cfg, now)
	case op.Phase == "undo" || op.CancelBy != "":
		takenOver(r, op)
		return nothing
	}
	switch {
	case op.ID == s.RunID && absent(op, s):
		return replaceInstance(r, op, cfg)
	case r.OperationID == r.RunID && passed(r, op):
		r.end(outcomeRecovered, byItself, now)
	}
	return nothing
}

// workedBy returns what ended the record: the kind of the operation, or byItself.
func workedBy(r *record, op *run) string {
	if r.OperationID == r.RunID {
		return byItself // the stalled operation was joined, and then went on by itself
	}
	if op != nil {
		return op.Kind
	}
	return names.Of(commonv1.OperationKind_OPERATION_KIND_RECREATE)
}

// operationFailed decides whether another attempt may help.
func operationFailed(r *record, op *run, cfg Config, now time.Time) request {
	r.Following = false
	takenOver(r, op)
	if r.ByPerson {
		return nothing
	}
	if op.ErrorCode == names.Of(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE) {
		next := now.Add(cfg.RefusedMost)
		r.withhold(withheldByOwner, op.ErrorCode+": "+op.Error, &next)
		return nothing
	}
	failure := op.Step + "/" + op.ErrorCode
	if r.OperationID != r.RunID { // an attempt of the watchdog, not the operation that had stalled
		if r.Attempts >= cfg.Attempts || failure == r.LastFailure || r.WithheldBy == withheldByAttempts {
			r.Step, r.ErrorCode, r.Cause = op.Step, op.ErrorCode, op.Error
			r.end(outcomeFailed, "", now)
			return nothing
		}
		r.LastFailure = failure
	}
	return recreate
}

// takenOver records that a person cancelled the operation. From then on that person decides about the workspace.
func takenOver(r *record, op *run) {
	if op == nil || op.CancelBy == "" || r.ByPerson || ours(op.CancelBy) {
		return
	}
	r.ByPerson, r.Trigger = true, triggerManual
	r.withhold(withheldByPerson, "a person has cancelled the operation and goes on with the workspace", nil)
}

func stuck(r *record, op *run) {
	if r.WithheldBy == withheldByPerson && r.ByPerson {
		r.Following = false
		return
	}
	why := "an undo is exhausted"
	if op != nil && op.StuckReason != "" {
		why = op.StuckReason
	}
	r.Following, r.ByPerson = false, true
	r.withhold(withheldByPerson, "the workspace is stuck, and the way out is a person's: "+why, nil)
}

// ours reports whether a requester, as lifecycle stores it, is a watchdog.
func ours(requester string) bool {
	return slices.ContainsFunc(requesterPrefixes, func(prefix string) bool { return strings.HasPrefix(requester, prefix) })
}
