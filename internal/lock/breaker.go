package lock

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// breaker lets no call through to Redis for a pause after a failure. When the pause is over it lets one call through,
// and refuses all others until that call has ended.
type breaker struct {
	logger *slog.Logger
	least  time.Duration
	most   time.Duration

	mu     sync.Mutex
	open   bool
	until  time.Time
	pause  time.Duration
	trying bool
}

func (b *breaker) allow(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.open {
		return true
	}
	if b.trying || now.Before(b.until) {
		return false
	}
	b.trying = true
	return true
}

func (b *breaker) succeeded(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open {
		b.logger.InfoContext(ctx, "lock store answers again")
	}
	b.open, b.trying, b.pause = false, false, 0
}

func (b *breaker) undecided() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trying = false
}

func (b *breaker) failed(ctx context.Context, now time.Time, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open && !b.trying {
		return // the call began before the breaker opened
	}
	if !b.open {
		b.logger.WarnContext(ctx, "lock store does not answer, asking postgres alone", slog.String("error", err.Error()))
	}
	b.pause = min(max(2*b.pause, b.least), b.most)
	b.open, b.trying, b.until = true, false, now.Add(b.pause)
}
