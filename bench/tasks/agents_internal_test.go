package tasks

import (
	"testing"

	"github.com/gpuaas/mesh/agent/task"
)

// The load reports a probe in as many frames as the product's agent does: one that may not run again would have three.
func TestTheLoadRunsProbesAsAnAgentDoes(t *testing.T) {
	for kind, h := range handlers("boot") {
		if again, ok := h.(task.Idempotent); !ok || !again.Idempotent() {
			t.Errorf("the load's handler of %s may not run again; the agent's may", kind)
		}
	}
}
