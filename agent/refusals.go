package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// refusalEvery bounds the records of one reason: a peer that floods an agent with bad offers must neither wear out its
// disk nor push the other entries out of the bounded record. Every refusal is counted and logged.
const refusalEvery = 10 * time.Minute

// refusals remembers when a refusal of each reason was last recorded.
type refusals struct {
	mu   sync.Mutex
	last map[commonv1.Reason]time.Time
	more map[commonv1.Reason]int // since the last record
}

// due reports whether a refusal of this reason is to be recorded now, and returns how many were not recorded since the
// last one that was.
func (r *refusals) due(reason commonv1.Reason, now time.Time) (int, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == nil {
		r.last, r.more = map[commonv1.Reason]time.Time{}, map[commonv1.Reason]int{}
	}
	if last, ok := r.last[reason]; ok && now.Sub(last) < refusalEvery {
		r.more[reason]++
		return 0, false
	}
	more := r.more[reason]
	r.last[reason], r.more[reason] = now, 0
	return more, true
}

// refusedTask counts a task that was refused, and records it on the disk at most once per refusalEvery and reason.
func (a *Agent) refusedTask(ctx context.Context, r task.Refusal) {
	a.meters.RefusedTask(r.Reason)
	more, due := a.refusals.due(r.Reason, r.At)
	if !due {
		return
	}
	detail := fmt.Sprintf("%s: task %q attempt %d key %q envelope %s", names.Of(r.Reason), r.TaskID, r.Attempt, r.KeyID,
		r.EnvelopeSHA256)
	if more > 0 {
		detail += fmt.Sprintf(" and %d more since the last record", more)
	}
	a.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_REFUSED, detail+" ("+r.Detail+")", 0)
}
