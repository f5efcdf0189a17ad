//go:build !release

package agent

import (
	"os"
	"strings"

	"github.com/gpuaas/mesh/agent/task"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// withheld takes out the handlers of the task types in GPUAAS_TASK_TYPES_WITHHELD, separated by commas: a drill makes
// an agent one of an earlier build with it, which neither reports those types nor does their tasks.
func withheld(handlers map[commonv1.TaskType]task.Handler) map[commonv1.TaskType]task.Handler {
	for name := range strings.SplitSeq(os.Getenv("GPUAAS_TASK_TYPES_WITHHELD"), ",") {
		if kind, err := names.Parse[commonv1.TaskType](strings.TrimSpace(name)); err == nil {
			delete(handlers, kind)
		}
	}
	return handlers
}
