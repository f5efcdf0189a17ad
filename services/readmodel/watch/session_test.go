package watch_test

import (
	"context"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Scenario: a session ends while its snapshot is being sent to a watcher that reads slowly. The stream ends before the
// next frame, whether this replica ended the session or another one.
func TestASnapshotEndsWithItsSession(t *testing.T) {
	for name, check := range map[string]time.Duration{"notified": time.Hour, "not notified": time.Nanosecond} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t, watch.Config{Check: check}, true)
			recheck := make(chan struct{}, 1)
			frames, ended := 0, false
			err := k.hub.Serve(testkit.Context(t), watch.Request{
				Filter: watch.Filter{Scope: list.All(), Topics: allTopics}, Recheck: recheck,
				Alive: func(context.Context) error {
					if ended {
						return fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, "")
					}
					return nil
				},
			}, func(*readmodelv1.WatchResponse) error {
				if frames++; frames == 2 {
					ended = true
					if check == time.Hour {
						recheck <- struct{}{}
					}
				}
				return nil
			})
			if !fault.Has(err, commonv1.Reason_REASON_UNAUTHENTICATED) || frames != 2 {
				t.Errorf("ended with %v after %d frames", err, frames)
			}
		})
	}
}
