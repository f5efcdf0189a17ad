package task

import (
	"slices"
	"strings"
)

// idempotent are the types whose tasks may be done twice, so that one that an agent has forgotten is offered again.
var idempotent = []string{
	"probe.noop", "workload.status", "workload.deploy", "workload.start", "workload.stop", "workload.remove",
	"storage.allocate", "storage.release", "diagnostics.collect",
}

// Idempotent reports whether a task of that type may be done twice with the effect of once.
func Idempotent(taskType string) bool { return slices.Contains(idempotent, taskType) }

// bare are the types of idempotent tasks that an empty payload describes. Only they can be queued again after their
// end: the payloads of others are cleared by then.
var bare = []string{"probe.noop", "diagnostics.collect"}

// Requeueable reports whether a task of that type may be queued again after it has expired, or ended with an unknown
// outcome.
func Requeueable(taskType string) bool { return slices.Contains(bare, taskType) }

// startNothing are the types whose tasks diagnose, end or release: they start nothing on the node and make nothing
// there.
var startNothing = []string{
	"probe.noop", "diagnostics.collect", "workload.status", "workload.stop", "workload.remove", "storage.release",
}

// StartsNothing reports whether a task of that type may be done on a node whose host is not as it was accepted (see
// gate.DiagnosisOnlySQL).
func StartsNothing(taskType string) bool { return slices.Contains(startNothing, taskType) }

// StartsNothingSQL returns the condition that a task of the table t is of such a type.
func StartsNothingSQL(t string) string {
	return t + `.type IN ('` + strings.Join(startNothing, `', '`) + `')`
}

// PayloadAt returns the SQL of a task's payload in a state: empty once the task has ended, in whichever state. A
// payload may contain credentials.
func PayloadAt(state string) string {
	return `CASE WHEN ` + state + ` IN ('succeeded', 'failed', 'cancelled', 'superseded', 'expired', 'outcome_unknown')
		THEN ''::bytea ELSE t.payload END`
}
