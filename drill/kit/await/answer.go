package await

import (
	"context"
	"errors"
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Answer repeats a request with an idempotency key until it is answered: a refusal is an answer.
func Answer[T any](ctx context.Context, what string, ask func(ctx context.Context) (T, error)) (T, error) {
	var out T
	var refused error
	err := Until(ctx, "an answer to "+what, Patience, func(ctx context.Context) error {
		var err error
		out, err = ask(ctx)
		if err != nil && !Passing(err) {
			refused = fmt.Errorf("%s: %w", what, err)
			return nil
		}
		return err
	})
	return out, errors.Join(err, refused)
}

// Passing reports whether a request may simply be made again.
func Passing(err error) bool {
	_, typed := fault.As(err)
	return !typed || slices.ContainsFunc([]commonv1.Reason{
		commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_CONFLICT,
	}, func(r commonv1.Reason) bool { return fault.Has(err, r) })
}
