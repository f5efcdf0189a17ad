package enrol

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/diag/cause"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// StopError means that the control plane told this host to stop, such as an instance whose workspace has a later epoch.
type StopError struct{ Denial *fault.Error }

// Error returns the text of the refusal.
func (e *StopError) Error() string { return "told to stop: " + e.Denial.Error() }

// Unwrap returns the refusal.
func (e *StopError) Unwrap() error { return e.Denial }

// understand returns errors of layers below Connect as they are, and others as faults.
func understand(err error) error {
	if cause.Below(err) {
		return err
	}
	return fault.FromConnect(err)
}

// decide returns the wait before the next request, or the error that ends Run.
func (e *Enroller) decide(err error) (time.Duration, error) {
	if limited, ok := errors.AsType[*EdgeError](err); ok {
		return max(limited.RetryAfter, e.slow()), nil
	}
	if errors.Is(err, ErrNoToken) {
		return e.slow(), nil
	}
	f, ok := fault.As(err)
	if !ok {
		return e.retry.Next(0), nil
	}
	if f.Reason == commonv1.Reason_REASON_KEY_REUSE {
		return e.retry.Next(f.RetryAfter), nil // with another key, which this host makes itself
	}
	switch fault.ActionOf(err) { // everything unknown waits
	case commonv1.Action_ACTION_STOP:
		if f.Reason == commonv1.Reason_REASON_CSR_REFUSED || f.Reason == commonv1.Reason_REASON_INVALID_ARGUMENT {
			return e.slow(), nil // a defect of this build or of its file, no decision about this host
		}
		return 0, &StopError{Denial: f}
	case commonv1.Action_ACTION_RECOVER, commonv1.Action_ACTION_REBUNDLE, commonv1.Action_ACTION_RENEW:
		return max(f.RetryAfter, 0) + e.slow(), nil
	default:
		return e.retry.Next(f.RetryAfter), nil
	}
}

func (e *Enroller) slow() time.Duration {
	return e.cfg.SlowRetry/2 + time.Duration(e.cfg.Draw(int64(e.cfg.SlowRetry/2)))
}

// record puts a diagnostic on disk and returns what is kept.
func (e *Enroller) record(ctx context.Context, code commonv1.DiagnosticCode, detail string,
	next time.Duration,
) diag.Entry {
	if e.deps.Record == nil {
		return diag.Entry{}
	}
	kept, err := e.deps.Record(ctx, code, detail, next)
	if err != nil {
		e.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", err))
	}
	return kept
}

func detailOf(err error) string {
	detail := err.Error()
	if f, ok := fault.As(err); ok {
		detail = names.Of(f.Reason) + ": " + f.Public
	}
	const most = 512
	return detail[:min(len(detail), most)]
}

// codeOf returns the diagnostic code of an error.
func (e *Enroller) codeOf(err error) commonv1.DiagnosticCode {
	clock := cause.Clock{Wall: e.deps.Clock.Wall()}
	if server, ok := e.deps.Clock.Server(); ok {
		clock.Server = server
	}
	return cause.Of(err, cause.Enrolment, clock)
}
