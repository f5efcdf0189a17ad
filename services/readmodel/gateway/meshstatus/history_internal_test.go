package meshstatus

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/retention"
)

// For a walk that has never finished, the status gives the time at which it began, not one at which it ended.
func TestALateWalkThatNeverEnded(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		done *time.Time
		want string
	}{
		{&now, "the slowest walk, lifecycle/tasks, ended 2h0m0s ago"},
		{nil, "the walk lifecycle/tasks, which began 2h0m0s ago, has never come to its end"},
	} {
		got := retentionComponent(retention.Account{Service: "lifecycle", Cut: "tasks", Lag: 2 * time.Hour, DoneAt: c.done},
			now)
		if got.GetOk() || got.GetDetail() != c.want {
			t.Errorf("it says %q, ok %t", got.GetDetail(), got.GetOk())
		}
	}
}
