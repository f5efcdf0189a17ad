// Package limits bounds how often callers may attempt to enrol: by a bucket for each address, token or node, and by one
// for all. It decides nothing else, and knows no node. Each replica has its own buckets, which are full when it starts.
package limits

import (
	"container/list"
	"sync"
	"time"

	"golang.org/x/time/rate"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// ByKey bounds the rate of callers by a bucket for each key: an address, a token, a node. A bucket that is full again
// is dropped, and at most `most` are kept: the one that was idle longest is dropped first, and its caller has a full
// one when it comes back.
type ByKey struct {
	every time.Duration
	burst int
	most  int

	mu      sync.Mutex
	buckets map[string]*list.Element
	idle    *list.List // most recently used first
}

type bucket struct {
	key     string
	limiter *rate.Limiter
}

// New returns buckets of a number of tokens, which fill by perSecond.
func New(perSecond float64, burst int) *ByKey {
	return &ByKey{
		every: time.Duration(float64(time.Second) / perSecond), burst: burst, most: 1 << 14,
		buckets: map[string]*list.Element{}, idle: list.New(),
	}
}

// Allow takes one token from the key's bucket, or returns fault rate_limited with the time to wait.
func (l *ByKey) Allow(key string, now time.Time) error { return Take(l.bucket(key, now), now) }

// Take takes one token from a bucket, or returns fault rate_limited with the time to wait.
func Take(limiter *rate.Limiter, now time.Time) error {
	r := limiter.ReserveN(now, 1)
	wait := r.DelayFrom(now)
	if wait <= 0 {
		return nil
	}
	r.CancelAt(now)
	return fault.New(commonv1.Reason_REASON_RATE_LIMITED, "", fault.RetryAfter(wait))
}

func (l *ByKey) bucket(key string, now time.Time) *rate.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forgetLocked(now)
	if e, ok := l.buckets[key]; ok {
		l.idle.MoveToFront(e)
		if b, ok := e.Value.(*bucket); ok {
			return b.limiter
		}
	}
	if l.idle.Len() >= l.most {
		l.removeLocked(l.idle.Back())
	}
	b := &bucket{key: key, limiter: rate.NewLimiter(rate.Every(l.every), l.burst)}
	l.buckets[key] = l.idle.PushFront(b)
	return b.limiter
}

// forgetLocked drops up to two full buckets, those idle longest first. A call adds at most one.
func (l *ByKey) forgetLocked(now time.Time) {
	for range 2 {
		oldest := l.idle.Back()
		if oldest == nil {
			return
		}
		if b, ok := oldest.Value.(*bucket); ok && b.limiter.TokensAt(now) < float64(l.burst) {
			return
		}
		l.removeLocked(oldest)
	}
}

func (l *ByKey) removeLocked(e *list.Element) {
	if b, ok := e.Value.(*bucket); ok {
		delete(l.buckets, b.key)
	}
	l.idle.Remove(e)
}
