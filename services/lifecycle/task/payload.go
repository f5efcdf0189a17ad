package task

import (
	"slices"
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

// PayloadAt returns the SQL of a task's payload in a state: empty once the task has ended, in whichever state. A
// payload may contain credentials.
func PayloadAt(state string) string {
	return `CASE WHEN ` + state + ` IN ('succeeded', 'failed', 'cancelled', 'superseded', 'expired', 'outcome_unknown')
		THEN ''::bytea ELSE t.payload END`
}
