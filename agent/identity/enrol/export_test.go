package enrol

import (
	"context"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// KeepWhatWorks is keepWhatWorks for tests.
func (e *Enroller) KeepWhatWorks(ctx context.Context, answer *recoveryv1.EnrollResponse) {
	e.keepWhatWorks(ctx, answer)
}
