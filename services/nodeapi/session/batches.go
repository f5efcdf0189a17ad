package session

import (
	"context"
	"fmt"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// gatherFor is how long a call for sessions waits for the end of the one before it, so that the sessions that come
// meanwhile share one transaction.
const gatherFor = 250 * time.Millisecond

// While more than yieldTo openings wait for recovery, or more than crowd handshakes to begin, and for calmFor after
// that, the gates of admitted sessions are raised yieldFor after their admission: after an outage nodes are to be back
// first, and to have work then. Between two waves of handshakes, of which those that could not begin come again later,
// none waits for a moment.
const (
	yieldTo  = 16
	yieldFor = 10 * time.Second
	calmFor  = 2 * time.Second
)

// storms reports whether gates are to be raised later. It is called by the loop of readies alone.
func (s *Server) storms(now time.Time) bool {
	if s.opening.Load() > yieldTo || s.admission.Crowded(crowd) {
		s.stormed = now
	}
	return now.Sub(s.stormed) < calmFor
}

// While more than crowd handshakes wait to begin, a call to recovery waits until it has one of fillShare openings that
// are under way, is full, or its oldest request has waited for fillFor. What a commit costs, its readers included,
// hardly grows with its sessions, so larger ones bring more agents back in the same time. But no more sessions can come
// than openings are under way, and while all of these wait the processors have nothing to do.
const (
	crowd     = 16
	fillShare = 4
	fillFor   = time.Second
)

// fills reports whether a call to recovery for some sessions waits for more of them.
func (s *Server) fills(sessions int) bool {
	return s.admission.Crowded(crowd) && sessions < s.admission.Openings()/fillShare
}

func (s *Server) openBatch(ctx context.Context, reqs []*recoveryv1.OpenSession) ([]*recoveryv1.OpenResult, error) {
	sent := wallclock.Now()
	res, err := s.deps.Authority.OpenSessions(ctx, &recoveryv1.OpenSessionsRequest{Sessions: reqs})
	if err != nil {
		return nil, fmt.Errorf("open sessions: %w", err)
	}
	s.cfg.Clock.Set(sent, wallclock.Now(), res.GetServerTime().AsTime())
	s.profiles.setDefault(res.GetProfileFingerprint())
	return res.GetResults(), nil
}

func (s *Server) confirmBatch(ctx context.Context, reqs []*recoveryv1.ConfirmSession) ([]*recoveryv1.ConfirmResult,
	error,
) {
	sent := wallclock.Now()
	res, err := s.deps.Authority.ConfirmSessions(ctx, &recoveryv1.ConfirmSessionsRequest{Sessions: reqs})
	if err != nil {
		return nil, fmt.Errorf("confirm sessions: %w", err)
	}
	s.cfg.Clock.Set(sent, wallclock.Now(), res.GetServerTime().AsTime())
	return res.GetResults(), nil
}
