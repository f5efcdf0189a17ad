package session

import (
	"context"
	"net"
	"sync/atomic"
	"time"
)

// place is one opening among those of its source that are under way: from the begin of its handshake until its session
// is admitted or over. It is given up earlier if the client has been awaited for long: the opening goes on, and another
// may begin. Its methods may be called by several goroutines, and on a nil place.
type place struct {
	admission *admission

	// All below is guarded by the admission's mutex.
	of    *source       // nil: given up
	left  time.Duration // for which its client may still be awaited
	since time.Time     // the client is awaited; zero: it is not
	timer *time.Timer
}

// await begins the time in which the client is awaited.
func (p *place) await() {
	if p == nil {
		return
	}
	p.admission.mu.Lock()
	defer p.admission.mu.Unlock()
	if p.of == nil || !p.since.IsZero() {
		return
	}
	p.since = time.Now()
	if p.timer == nil {
		p.timer = time.AfterFunc(p.left, p.stalled)
	} else {
		p.timer.Reset(p.left)
	}
}

// heard ends it.
func (p *place) heard() {
	if p == nil {
		return
	}
	p.admission.mu.Lock()
	defer p.admission.mu.Unlock()
	if p.since.IsZero() {
		return
	}
	p.timer.Stop()
	p.left -= time.Since(p.since)
	p.since = time.Time{}
}

// stalled gives the place up, unless the client was heard just before.
func (p *place) stalled() {
	p.admission.mu.Lock()
	defer p.admission.mu.Unlock()
	if p.of == nil || p.since.IsZero() || time.Since(p.since) < p.left {
		return
	}
	p.giveUpLocked()
	if p.admission.onStall != nil {
		p.admission.onStall()
	}
}

// leave gives the place up.
func (p *place) leave() {
	if p == nil {
		return
	}
	p.admission.mu.Lock()
	defer p.admission.mu.Unlock()
	if p.timer != nil {
		p.timer.Stop()
	}
	p.giveUpLocked()
}

func (p *place) giveUpLocked() {
	from := p.of
	if from == nil {
		return
	}
	p.of = nil
	from.openings--
	p.admission.readyLocked(from)
	p.admission.nextLocked()
}

// turns is a connection of an agent. During its handshake it holds a turn whenever it is not waiting for its client.
type turns struct {
	net.Conn

	admission *admission
	ctx       context.Context       //nolint:containedctx // of the handshake, which gives its own to no method
	opening   atomic.Pointer[place] // nil: not begun, or over
	holds     bool
	over      bool // the handshake has ended
}

// Read reads without a turn, and waits for one.
func (t *turns) Read(b []byte) (int, error) {
	if t.over {
		return t.Conn.Read(b)
	}
	t.rest()
	p := t.opening.Load()
	p.await()
	n, err := t.Conn.Read(b)
	if err != nil {
		return n, err
	}
	if p == nil {
		if p, err = t.admission.begin(t.ctx, sourceOf(t.RemoteAddr().String())); err == nil {
			t.opening.Store(p)
		}
	} else {
		p.heard()
		err = t.admission.goOn(t.ctx)
	}
	if err != nil {
		return 0, err
	}
	t.holds = true
	return n, nil
}

// end ends the handshake. The opening goes on until leave is called.
func (t *turns) end() {
	t.rest()
	t.over, t.ctx = true, nil
	t.opening.Load().await() // its first stream
}

// place returns the place of the connection's opening; nil if it is over.
func (t *turns) place() *place { return t.opening.Load() }

// Close ends the opening and closes the connection.
func (t *turns) Close() error {
	t.leave()
	return t.Conn.Close()
}

// leave ends the opening.
func (t *turns) leave() { t.opening.Swap(nil).leave() }

func (t *turns) rest() {
	if t.holds {
		t.holds = false
		t.admission.rest()
	}
}
