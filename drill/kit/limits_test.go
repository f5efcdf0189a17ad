package kit_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
)

// TestAMeshThatIsGoneEndsTheStepsThatPutItRight has steps wait on a mesh that never answers, one within another.
func TestAMeshThatIsGoneEndsTheStepsThatPutItRight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // they run though the drill was cancelled
		steps := 0
		wait := func(ctx context.Context) {
			steps++
			_ = await.Until(ctx, "an answer", await.Limit, func(context.Context) error { return errors.New("none") })
		}
		r := &kit.Run{}
		r.Finally(ctx, func(ctx context.Context) {
			wait(ctx)
			r.Finally(ctx, wait)
		})
		r.Finally(ctx, wait)
		if took := time.Since(began); steps != 3 || took > 4*time.Minute {
			t.Errorf("%d steps have taken %s", steps, took)
		}
	})
}

// TestACheckThatNeverReturnsIsLimited waits for a server that accepts a call and never answers.
func TestACheckThatNeverReturnsIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		err := await.Until(t.Context(), "an answer", time.Minute, func(ctx context.Context) error {
			<-ctx.Done()
			return context.Cause(ctx)
		})
		if took := time.Since(began); err == nil || took > 2*time.Minute {
			t.Errorf("after %s: %v", took, err)
		}
	})
}
