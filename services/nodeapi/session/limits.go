package session

import (
	"hash/maphash"
	"sync"
	"time"
)

// openKey is the key under which the opening of a stream is charged: a digest of the node's id, the certificate's
// serial and the source. Its seed is of the process, so that no client can find another's key.
type openKey uint64

// keyOf returns the key of a certificate and a source. An empty source stands for all sources.
func keyOf(node, serial, source string) openKey {
	return openKey(maphash.Comparable(digests, [...]string{node, serial, source}))
}

// opens bounds how often one key may open a stream: a burst, then one per interval. The table holds only keys that
// opened a stream recently, and at most mostKeys. Above that the least recently used key is forgotten, which gives it
// its burst back.
type opens struct {
	burst    int
	interval time.Duration

	mu      sync.Mutex
	buckets *lru[openKey, bucket]
}

type bucket struct {
	tokens float64
	at     time.Time
}

// mostKeys bounds each table. Keys are made of serials that our authority signed.
const mostKeys = 1 << 16

func newOpens(burst int, interval time.Duration) *opens {
	return &opens{burst: burst, interval: interval, buckets: newLRU[openKey, bucket](mostKeys)}
}

// take returns zero if the key may open a stream now, and counts the opening; else it returns how long to wait.
func (o *opens) take(key openKey, now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	full := time.Duration(o.burst) * o.interval
	o.buckets.trim(func(b bucket) bool { return now.Sub(b.at) > full })
	b := o.at(key, now)
	wait := o.wait(b)
	if wait == 0 {
		b.tokens--
	}
	o.buckets.put(key, b)
	return wait
}

// peek returns what take would, without counting an opening.
func (o *opens) peek(key openKey, now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.wait(o.at(key, now))
}

func (o *opens) at(key openKey, now time.Time) bucket {
	b, known := o.buckets.get(key)
	if !known {
		return bucket{tokens: float64(o.burst), at: now}
	}
	return bucket{tokens: min(float64(o.burst), b.tokens+float64(now.Sub(b.at))/float64(o.interval)), at: now}
}

func (o *opens) wait(b bucket) time.Duration {
	if b.tokens >= 1 {
		return 0
	}
	return time.Duration((1 - b.tokens) * float64(o.interval))
}

// pace bounds the frames of one session, or the streams of one connection, within a second. A pace is used by one
// goroutine only, so it needs no lock.
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

// frame counts one frame or stream, and returns false if there are more than limit in this second.
func (p *pace) frame(now time.Time, limit int) bool {
	p.roll(now)
	p.frames++
	return p.frames <= limit
}

// heartbeat returns false when this heartbeat is to be coalesced with one of the same second.
func (p *pace) heartbeat(now time.Time, limit int) bool {
	p.roll(now)
	p.heartbeats++
	return p.heartbeats <= limit
}
