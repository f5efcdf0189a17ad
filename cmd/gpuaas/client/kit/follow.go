package kit

import (
	"context"
	"errors"
	"time"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

const (
	// silence is how long a watch may receive nothing before it counts as dead. The server sends a heartbeat every 15 s.
	silence = 40 * time.Second
	// pollEvery is the first interval of polls while there is no watch. The interval doubles up to pollAtMost.
	pollEvery  = 200 * time.Millisecond
	pollAtMost = 3 * time.Second
)

// errDone is the error of watchOnce once each has ended the follow.
var errDone = errors.New("done")

// Follow calls each with every change until each returns true or an error. It resumes a broken watch where it stopped,
// and calls poll (if it is not nil) while there is no watch, so that a wait survives the restart of any part of the
// mesh. It returns the context's error, a refusal that a later attempt would get as well, or nil.
func (s *Session) Follow(
	ctx context.Context, req *readmodelv1.WatchRequest, poll func(context.Context) ([]*readmodelv1.WatchItem, error),
	each func(*readmodelv1.WatchItem) (bool, error),
) error {
	pause, warned := pollEvery, false
	for {
		progress, err := s.watchOnce(ctx, req, poll, each)
		if errors.Is(err, errDone) {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !Mends(err) {
			return err
		}
		if progress {
			pause = pollEvery
		}
		if !warned && !progress {
			human.Note(s.Err, "the watch broke (%s); asking again until it is back", names.Of(fault.ReasonOf(err)))
			warned = true
		}
		if fault.Has(err, commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED) {
			req.ResumeToken = ""
		}
		if poll != nil {
			done, err := s.pollOnce(ctx, poll, each)
			if done || (err != nil && !Mends(err)) {
				return err
			}
		}
		if !app.Sleep(ctx, pause) {
			return context.Cause(ctx)
		}
		pause = min(2*pause, pollAtMost)
	}
}

// pollOnce calls each with the items that poll returns.
func (s *Session) pollOnce(
	ctx context.Context, poll func(context.Context) ([]*readmodelv1.WatchItem, error),
	each func(*readmodelv1.WatchItem) (bool, error),
) (bool, error) {
	items, err := poll(ctx)
	if err != nil {
		return false, err
	}
	for _, item := range items {
		if done, err := each(item); done || err != nil {
			return true, err
		}
	}
	return false, nil
}

// watchOnce reads one stream to its end. It reports whether anything came; an error of each is final and comes wrapped
// in finalError. When the snapshot is complete it polls once, because an object that ended before the watch began may
// be in no snapshot and then never changes.
func (s *Session) watchOnce(
	ctx context.Context, req *readmodelv1.WatchRequest, poll func(context.Context) ([]*readmodelv1.WatchItem, error),
	each func(*readmodelv1.WatchItem) (bool, error),
) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watchdog := time.AfterFunc(silence, cancel)
	defer watchdog.Stop()
	stream, err := s.Query.Watch(ctx, req)
	if err != nil {
		return false, err
	}
	defer stream.Close() // the stream is over
	progress := false
	for stream.Receive() {
		watchdog.Reset(silence)
		progress = true
		frame := stream.Msg()
		if item := frame.GetItem(); item != nil {
			done, err := each(item)
			if err != nil {
				return true, &finalError{err}
			}
			if done {
				return true, errDone
			}
		}
		if frame.GetBootstrapped() != nil && poll != nil {
			if done, err := s.pollOnce(ctx, poll, each); done || err != nil {
				return true, doneOr(done, err)
			}
		}
		if token := frame.GetResumeToken(); token != "" {
			req.ResumeToken = token
		}
	}
	if err := stream.Err(); err != nil {
		return progress, err
	}
	return progress, fault.New(commonv1.Reason_REASON_SERVER_DRAINING, "")
}

// doneOr wraps the error of a follower in finalError and returns errDone for its end. Any other error is that of a
// poll, which may be retried.
func doneOr(done bool, err error) error {
	switch {
	case done && err != nil:
		return &finalError{err}
	case done:
		return errDone
	}
	return err
}

// finalError is an error of the follower, not of the stream.
type finalError struct{ cause error }

func (e *finalError) Error() string { return e.cause.Error() }
func (e *finalError) Unwrap() error { return e.cause }

// Mends reports whether the same watch may succeed later.
func Mends(err error) bool {
	if _, ok := errors.AsType[*finalError](err); ok || misdirected(err) {
		return false
	}
	switch fault.ReasonOf(err) { //nolint:exhaustive // what is not here is a refusal of the request itself
	case commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED,
		commonv1.Reason_REASON_SERVER_DRAINING, commonv1.Reason_REASON_POSITION_NOT_REACHED,
		commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED, commonv1.Reason_REASON_SLOW_CONSUMER, commonv1.Reason_REASON_OVERLOADED,
		commonv1.Reason_REASON_RATE_LIMITED,
		commonv1.Reason_REASON_STREAM_MAX_AGE,
		commonv1.Reason_REASON_UNIMPLEMENTED, commonv1.Reason_REASON_INTERNAL:
		return exit.CodeOf(err) != exit.CodeNotAllowed
	}
	return false
}

// ErrWaited is the cause of a context that ended because a wait was too long.
var ErrWaited = errors.New("waited too long")

// Within returns a context that ends after limit with the cause errWaited; zero means no limit.
func Within(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if limit <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, limit, ErrWaited)
}
