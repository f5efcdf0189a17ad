package watch

import (
	"context"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// session is the session of a watch's person. One goroutine uses it.
type session struct {
	req     Request
	every   time.Duration
	checked time.Time // when the last check began
	failed  bool      // the session could not be read at the last check
}

// check returns an error if the watch must end now: the session is over, or could not be read twice in a row.
func (s *session) check(ctx context.Context) error {
	s.checked = time.Now()
	if s.req.Alive == nil {
		return nil
	}
	ended, err := aliveNow(ctx, s.req.Alive, s.every)
	if err != nil && !ended && !s.failed {
		s.failed = true
		return nil // the next check decides
	}
	s.failed = false
	return err
}

// checking returns send with a check of the session before a frame, if one is due. The frames of a snapshot, and those
// that wait for a watcher that reads slowly, may take much longer than the time between two checks.
func (s *session) checking(ctx context.Context, send Send) Send {
	return func(frame *readmodelv1.WatchResponse) error {
		due := time.Since(s.checked) >= s.every
		select {
		case <-s.req.Recheck:
			due = true
		default:
		}
		if due {
			if err := s.check(ctx); err != nil {
				return err
			}
		}
		return send(frame)
	}
}

// aliveNow calls alive with a time limit. It reports true for a refusal, which ends the stream; if the session could
// not be read it reports false and an error.
func aliveNow(ctx context.Context, alive func(context.Context) error, limit time.Duration) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := alive(ctx)
	switch fault.ReasonOf(err) { //nolint:exhaustive // everything else is a failure to look
	case commonv1.Reason_REASON_UNAUTHENTICATED, commonv1.Reason_REASON_PERMISSION_DENIED:
		return true, err
	}
	if err != nil {
		err = fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the session could not be checked", fault.Cause(err))
	}
	return false, err
}
