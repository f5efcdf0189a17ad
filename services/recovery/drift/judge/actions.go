package judge

import (
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// byItself are the reasons after which a node enrols again with its recovery token.
var byItself = []commonv1.DriftReason{
	commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED, commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED,
	commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST,
}

// backByToken are the reasons of one failure with those: a node that is out and has no way back by itself.
var backByToken = append([]commonv1.DriftReason{
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING,
	commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED,
}, byItself...)

// staleTasks is the reason for which lifecycle's sweep makes tasks history.
const staleTasks = commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE

// act begins the recovery action that follows from a verdict, and ends those that have come to their end. The verdict
// gets the correlation id of the action that it belongs to.
func (t *takenNodes) act(n *collect.Node, was *recoveryv1.NodeVerdict, v *drift.Verdict, h health,
	list []drift.Evidence,
) {
	if v.Reason != was.GetReason() {
		t.begin(n, *v, list)
	}
	correlated := false
	for _, a := range t.actions.OfNode(n.NodeID) {
		if a.Kind() == actions.ReEnrolment {
			a.Rejected(firstRefusal(list))
		}
		if !correlated && belongs(a, v.Reason) {
			v.CorrelationID, correlated = a.Correlation(), true
		}
		switch {
		case t.over(a, h, list):
			a.Succeed(t.seen.Now, outcomeOf(a))
		case a.Kind() == actions.Bundle && !a.Effective() && h.proven && was.GetHealthySince() == nil:
			a.Supersede(t.seen.Now, "the node is healthy again without it")
		case v.Reason == 0 && a.Used():
			n.Wanted = true // of a node of which no reason was concluded nothing else would prove it healthy
		}
	}
}

func (t *takenNodes) begin(n *collect.Node, v drift.Verdict, list []drift.Evidence) {
	from := actions.Beginning{
		NodeID: n.NodeID, Reason: v.Reason, CorrelationID: v.CorrelationID, Within: v.RecoverWithin,
	}
	switch {
	case slices.Contains(byItself, v.Reason):
		from.Kind, from.Requester, from.RejectedAt = actions.ReEnrolment, actions.Automatic, firstRefusal(list)
	case v.Reason == staleTasks:
		from.Kind, from.Requester = actions.StaleTaskSweep, "lifecycle"
	default:
		return
	}
	t.actions.Begin(from)
}

// belongs reports whether a verdict is one on what an action is done for, or on its end.
func belongs(a *actions.Action, reason commonv1.DriftReason) bool {
	switch {
	case reason == a.Reason():
		return true
	case a.Kind() == actions.StaleTaskSweep:
		return false
	case reason == 0:
		return true
	}
	return a.Kind() != actions.Fencing && slices.Contains(backByToken, reason)
}

// over reports whether an action has come to its end: a node is proven healthy, after a session on the certificate that
// the action brought, if it brought one. Stale tasks are swept once lifecycle has none.
func (t *takenNodes) over(a *actions.Action, h health, list []drift.Evidence) bool {
	switch a.Kind() {
	case actions.StaleTaskSweep:
		return !slices.ContainsFunc(list, func(e drift.Evidence) bool {
			return e.Reason == staleTasks && !e.Stale(t.seen.Now)
		})
	case actions.ReEnrolment:
		return h.proven && (a.Used() || !a.Effective())
	case actions.Bundle, actions.Rebootstrap:
		return h.proven && a.Used()
	case actions.Fencing:
		return h.proven
	default:
		return false
	}
}

func outcomeOf(a *actions.Action) string {
	switch {
	case a.Kind() == actions.StaleTaskSweep:
		return "no task past its time is left among the open ones"
	case a.Kind() == actions.ReEnrolment && !a.Effective():
		return "the node is healthy with the certificate that it had"
	}
	return "the node is healthy"
}

// firstRefusal returns when the ingress, or enrolment, refused the node for the first time, by evidence that is not
// over; zero if there is none.
func firstRefusal(list []drift.Evidence) time.Time {
	var out time.Time
	for i := range list {
		e := &list[i]
		if e.Reason != 0 && (e.Source == drift.FromIngress || e.Source == drift.FromEnrolment) &&
			(out.IsZero() || e.ObservedAt.Before(out)) {
			out = e.ObservedAt
		}
	}
	return out
}
