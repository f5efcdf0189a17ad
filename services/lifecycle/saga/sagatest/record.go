package sagatest

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// Record is a list that steps of several goroutines append to.
type Record struct {
	mu   sync.Mutex
	list []string
}

// Add appends a line.
func (r *Record) Add(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, fmt.Sprintf(format, args...))
}

// All returns the lines.
func (r *Record) All() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// Recorded wraps pure steps so that each Do and Undo is recorded.
func Recorded(r *Record, names ...string) []saga.Step {
	steps := PureSteps(names...)
	for i := range steps {
		steps[i].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
			r.Add("do %s", env.StepName)
			return saga.Done(nil), nil
		}
		steps[i].Undo = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
			r.Add("undo %s", env.StepName)
			return saga.Done(nil), nil
		}
	}
	return steps
}
