package nodeapi_test

import (
	"fmt"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// TestManyUnknownTasks: an agent that has as many tasks as a Hello may name, none of which lifecycle knows, is told to
// stop each of them and keeps its session, however slowly it reads. So is an agent of an earlier build, which reads one
// task from each frame.
func TestManyUnknownTasks(t *testing.T) {
	for _, test := range []struct {
		protocol, frames int
	}{{2, 4096}, {3, 8}} {
		t.Run(fmt.Sprintf("protocol %d", test.protocol), func(t *testing.T) {
			k := newKit(t, func(p *nodeapitest.Backend) {
				p.Stop = func(s *lifecyclev1.SessionReady) []*nodev1.TaskRef {
					var out []*nodev1.TaskRef
					for _, task := range s.GetTasksInFlight() {
						out = append(out, &nodev1.TaskRef{TaskId: task.GetTaskId(), Attempt: task.GetAttempt()})
					}
					return out
				}
			})
			r := k.replica()
			a := k.node()
			k.connect(a, r.AgentAddr(), false)
			unknown := map[string]bool{}
			a.send(a.hello(func(h *nodev1.Hello) {
				h.ProtocolVersion = int32(test.protocol) // a small number
				for range 4096 {
					id := ids.New()
					unknown[id] = true
					h.TasksInFlight = append(h.TasksInFlight, &commonv1.TaskInFlight{
						TaskId: id, Attempt: 1, State: commonv1.TaskState_TASK_STATE_RUNNING,
					})
				}
			}))
			receive := func() *nodev1.ConnectResponse {
				t.Helper()
				f, err := a.stream.Recv()
				if err != nil {
					t.Fatalf("the session ended with %d tasks not named: %v", len(unknown), err)
				}
				return f
			}
			for {
				if w := receive().GetWelcome(); w != nil {
					a.session, a.generation = w.GetSessionId(), w.GetGeneration()
					break
				}
			}
			a.send(ready(a.generation))
			k.raised(a) // it reads nothing until its gate is raised
			frames := 0
			for len(unknown) > 0 {
				f := receive()
				if denied := f.GetDenied(); denied != nil {
					t.Fatalf("denied with %d tasks not named: %v", len(unknown), denied)
				}
				cancel := f.GetTaskCancel()
				if cancel == nil {
					continue
				}
				frames++
				for _, ref := range append([]*nodev1.TaskRef{cancel.GetTask()}, cancel.GetMore()...) {
					if !unknown[ref.GetTaskId()] {
						t.Fatalf("told to stop %v, which is not one of its tasks or was named before", ref)
					}
					delete(unknown, ref.GetTaskId())
				}
			}
			if frames != test.frames {
				t.Errorf("%d frames, want %d", frames, test.frames)
			}
		})
	}
}
