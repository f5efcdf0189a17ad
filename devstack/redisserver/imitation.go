package redisserver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// expiryTick is the resolution of expiry in the imitation, whose clock advances only when expire advances it.
const expiryTick = 20 * time.Millisecond

// imitation is an in-process Redis with a ticker for a clock.
type imitation struct {
	server *miniredis.Miniredis
	quit   chan struct{}
	ended  chan struct{}
	once   sync.Once
}

func startImitation(addr, password string) (backend, error) {
	m := miniredis.NewMiniRedis()
	m.RequireAuth(password)
	if err := m.StartAddr(addr); err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("%w: %w", errPortTaken, err)
		}
		return nil, fmt.Errorf("start redis imitation: %w", err)
	}
	i := &imitation{server: m, quit: make(chan struct{}), ended: make(chan struct{})}
	go i.expire()
	return i, nil
}

// expire advances the imitation's clock by the time that has passed.
func (i *imitation) expire() {
	defer close(i.ended)
	ticker := time.NewTicker(expiryTick)
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-i.quit:
			i.server.Close()
			return
		case <-ticker.C:
			now := time.Now()
			i.server.FastForward(now.Sub(last))
			last = now
		}
	}
}

func (i *imitation) done() <-chan struct{} { return i.ended }

func (i *imitation) stop(context.Context) error { return i.kill() }

func (i *imitation) kill() error {
	i.once.Do(func() { close(i.quit) })
	<-i.ended
	return nil
}
