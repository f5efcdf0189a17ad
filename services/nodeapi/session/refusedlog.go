package session

import (
	"log/slog"
	"sync"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// refusedLogEvery is how often a reason of refused handshakes is logged at level Info.
const refusedLogEvery = time.Minute

// refusedHandshakes logs refused handshakes. Strangers may connect as fast as they like, and a wrong trust bundle
// refuses a whole fleet at once, so that in each minute the first of a reason is logged at level Info, with the number
// of those since the one before, and the others at level Debug.
type refusedHandshakes struct {
	logger *slog.Logger

	mu      sync.Mutex
	reasons map[pki.RejectReason]*refusedReason
}

type refusedReason struct {
	logged time.Time
	since  int // refused after logged
}

func (l *refusedHandshakes) log(r pki.Reject, now time.Time) {
	level, since := l.count(r.Reason, now)
	write := l.logger.Debug
	if level == slog.LevelInfo {
		write = l.logger.Info
	}
	write("handshake refused", slog.String("reason", string(r.Reason)),
		slog.String("claimed_unverified", r.Claimed.SAN), slog.String("remote", r.Remote), slog.Int("not_logged", since),
		slog.Any("error", r.Err))
}

// count returns the level at which a handshake is logged, and how many of its reason were not logged at level Info
// since the last that was.
func (l *refusedHandshakes) count(reason pki.RejectReason, now time.Time) (slog.Level, int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.reasons == nil {
		l.reasons = map[pki.RejectReason]*refusedReason{}
	}
	c := l.reasons[reason]
	if c == nil {
		c = &refusedReason{}
		l.reasons[reason] = c
	}
	if !c.logged.IsZero() && now.Sub(c.logged) < refusedLogEvery {
		c.since++
		return slog.LevelDebug, c.since
	}
	since := c.since
	c.logged, c.since = now, 0
	return slog.LevelInfo, since
}
