package agents_test

import (
	"maps"
	"slices"
	"testing"

	agenttask "github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/tasktypes"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// TestAgentsAndLifecycleRepeatTheSameTypesOfTask: lifecycle queues a task again that an agent has forgotten if its type
// is idempotent, and an agent runs it again after a restart. Neither may take a type for idempotent that the other
// does not, and lifecycle queues no type again after its end that it would not queue before.
func TestAgentsAndLifecycleRepeatTheSameTypesOfTask(t *testing.T) {
	handlers := agenttask.Handlers(agenttask.HandlerDeps{})
	for number := range commonv1.TaskType_name {
		kind := commonv1.TaskType(number)
		name := names.Of(kind)
		repeats, ok := handlers[kind].(agenttask.Idempotent) // a type that no agent does yet has no handler
		if agent, here := ok && repeats.Idempotent(), task.Idempotent(name); agent != here {
			t.Errorf("%s is idempotent to the agent: %t, to lifecycle: %t", name, agent, here)
		}
		if task.Requeueable(name) && !task.Idempotent(name) {
			t.Errorf("%s is queued again after its end and is not idempotent", name)
		}
	}
}

// TestAgentsKnowEveryTypeThatIsQueued: an agent of this build lacks no type of task, so that it is no drift of its own.
func TestAgentsKnowEveryTypeThatIsQueued(t *testing.T) {
	handlers := agenttask.Handlers(agenttask.HandlerDeps{})
	if lacking := tasktypes.Lacking(slices.Collect(maps.Keys(handlers))); len(lacking) > 0 {
		t.Errorf("agents do not know %v", lacking)
	}
	if got, want := len(tasktypes.Queued()), len(handlers); got != want {
		t.Errorf("%d types are queued, and agents do %d", got, want)
	}
}
