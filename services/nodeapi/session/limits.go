package session

import (
	"sync"
	"time"
)

// opens bounds how often one identity may open a stream: a burst, then one per interval. The table holds only identities that opened lately.
type opens struct {
	burst    int
	interval time.Duration

	mu    sync.Mutex
	nodes map[string]*bucket
	swept time.Time
}

type bucket struct {
	tokens float64
	at     time.Time
}

func newOpens(burst int, interval time.Duration) *opens {
	return &opens{burst: burst, interval: interval, nodes: map[string]*bucket{}}
}

// take answers zero if the identity may open now, else how long it should wait.
func (o *opens) take(node string, now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sweep(now)
	b := o.nodes[node]
	if b == nil {
		b = &bucket{tokens: float64(o.burst), at: now}
		o.nodes[node] = b
	}
	b.tokens = min(float64(o.burst), b.tokens+float64(now.Sub(b.at))/float64(o.interval))
	b.at = now
	if b.tokens >= 1 {
		b.tokens--
		return 0
	}
	return time.Duration((1 - b.tokens) * float64(o.interval))
}

// sweep forgets identities whose bucket is full again.
func (o *opens) sweep(now time.Time) {
	full := time.Duration(o.burst) * o.interval
	if now.Sub(o.swept) < full {
		return
	}
	o.swept = now
	for node, b := range o.nodes {
		if now.Sub(b.at) > full {
			delete(o.nodes, node)
		}
	}
}

// pace bounds the frames of one session, or the streams of one connection, within a second. Only one goroutine counts with it, so it needs no lock.
type pace struct {
	second     int64
	frames     int
	heartbeats int
}

func (p *pace) roll(now time.Time) {
	if s := now.Unix(); s != p.second {
		p.second, p.frames, p.heartbeats = s, 0, 0
	}
}

// frame answers false when there are more than there may be.
func (p *pace) frame(now time.Time, limit int) bool {
	p.roll(now)
	p.frames++
	return p.frames <= limit
}

// heartbeat answers false when this heartbeat is to be coalesced with one of the same second.
func (p *pace) heartbeat(now time.Time, limit int) bool {
	p.roll(now)
	p.heartbeats++
	return p.heartbeats <= limit
}
