package drill

import (
	"context"
	"errors"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// command repeats a request with an idempotency key until it is answered: a refusal is an answer.
func command[T any](ctx context.Context, what string, ask func(ctx context.Context) (T, error)) (T, error) {
	var out T
	var refused error
	err := await(ctx, "an answer to "+what, patience, func(ctx context.Context) error {
		var err error
		out, err = ask(ctx)
		if err != nil && !passing(err) {
			refused = fmt.Errorf("%s: %w", what, err)
			return nil
		}
		return err
	})
	return out, errors.Join(err, refused)
}

// passing reports whether a request may simply be made again.
func passing(err error) bool {
	for _, r := range []commonv1.Reason{
		commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_CONFLICT,
	} {
		if fault.Has(err, r) {
			return true
		}
	}
	_, typed := fault.As(err)
	return !typed
}
