package bounds

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Recovery returns what an agent reports of its automatic recovery, cut to what a working agent reports: no
// negative counts, no long text, no time that is none. Nil stays nil.
func Recovery(reported *commonv1.RecoveryCounters) *commonv1.RecoveryCounters {
	if reported == nil {
		return nil
	}
	const most = 64
	out := &commonv1.RecoveryCounters{
		Attempts: max(reported.GetAttempts(), 0), Successes: max(reported.GetSuccesses(), 0),
		Failures: max(reported.GetFailures(), 0), Suppressed: max(reported.GetSuppressed(), 0),
		LastOutcome: OneLine(reported.GetLastOutcome(), most),
	}
	if at := reported.GetLastAttemptAt(); at.IsValid() {
		out.LastAttemptAt = at
	}
	return out
}
