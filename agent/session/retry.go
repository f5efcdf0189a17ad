package session

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// failed decides what follows a failed open or a lost session: the next open after a wait, or the end of Run. The diagnostic is on disk before it
// returns, so before any retry.
func (r *runner) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the loop sees the end of the context
	}
	delay, terminal := r.decide(ctx, err)
	if terminal != nil && r.active != nil {
		// The replacement was refused, the session itself stands: nothing is lost yet, and its own end will tell.
		delay, terminal = r.slow(), nil
	}
	code := codeOf(err)
	if storage := new(storageError); errors.As(err, &storage) {
		code = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED
	}
	d := Diagnostic{Code: code, Detail: detailOf(err), NextRetry: delay}
	if record := r.c.deps.Record; record != nil {
		if recordErr := record(ctx, d); recordErr != nil {
			r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", recordErr))
		}
	}
	if terminal != nil {
		return terminal
	}
	r.c.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "session not open", slog.String("code", names.Of(code)), slog.String("detail", d.Detail),
		slog.Duration("next_retry", delay), slog.Int("attempt", r.c.retry.Attempts()))
	r.schedule(delay)
	return nil
}

// decide answers the wait before the next open, or the error that ends Run.
func (r *runner) decide(ctx context.Context, err error) (time.Duration, error) {
	var refused *certificateRefusedError
	var edge *edgeError
	switch {
	case errors.Is(err, errNoIdentity):
		return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
	case errors.Is(err, errExpired):
		if r.fallBack(ctx) {
			return r.soon(), nil
		}
		return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
	case errors.Is(err, errNotYet):
		return r.slow(), nil
	case errors.As(err, &refused):
		if r.fallBack(ctx) {
			return r.soon(), nil
		}
		return r.c.retry.Next(0), nil
	case errors.As(err, &edge):
		if edge.limited {
			return r.slow(), nil
		}
		return r.c.retry.Next(0), nil
	}
	f, ok := fault.As(err)
	if !ok {
		return r.c.retry.Next(0), nil
	}
	if f.Reason == commonv1.Reason_REASON_SESSION_SUPERSEDED {
		// Back within two seconds, so that a second holder of this identity is found.
		return 100*time.Millisecond + r.c.jitter(1400*time.Millisecond), nil
	}
	if lifted(f.Reason) && f.RetryAfter > 0 {
		// Somebody will lift this, and nothing tells us when: ask at the pace that the server can bear, which does not slow down with the tries.
		return f.RetryAfter + r.c.jitter(f.RetryAfter/2), nil
	}
	switch fault.ActionOf(err) { //nolint:exhaustive // everything unknown waits
	case commonv1.Action_ACTION_STOP:
		return 0, &StopError{Denial: f}
	case commonv1.Action_ACTION_RENEW:
		if r.fallBack(ctx) {
			return r.soon(), nil
		}
		return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
	case commonv1.Action_ACTION_RECOVER:
		return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
	case commonv1.Action_ACTION_REBUNDLE:
		return 0, &IdentityError{Action: commonv1.Action_ACTION_REBUNDLE, Cause: err}
	default:
		return r.c.retry.Next(f.RetryAfter), nil
	}
}

// lifted says whether a refusal stands only until somebody lets the node in again.
func lifted(reason commonv1.Reason) bool {
	switch reason { //nolint:exhaustive // every other refusal is none
	case commonv1.Reason_REASON_IDENTITY_HELD, commonv1.Reason_REASON_IDENTITY_QUARANTINED, commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED:
		return true
	default:
		return false
	}
}

// fallBack uses the other certificate held, once until a session is admitted, and says whether it does.
func (r *runner) fallBack(ctx context.Context) bool {
	id := r.c.deps.Identity
	if r.flips > 0 || !identity.Usable(id.Other(), r.c.deps.Clock.Now()) {
		return false
	}
	if err := id.Flip(); err != nil {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "other certificate not taken into use", slog.Any("error", err))
		return false
	}
	r.flips++
	return true
}

// soon is the wait before another certificate is tried.
func (r *runner) soon() time.Duration { return r.c.jitter(500 * time.Millisecond) }

// slow is the cadence at which nothing but an operator or an edge can help.
func (r *runner) slow() time.Duration {
	return r.c.cfg.SlowRetry/2 + r.c.jitter(r.c.cfg.SlowRetry/2)
}
