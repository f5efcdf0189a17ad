package admission

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/stack"
)

// Place is one opening among those of its source that are under way: from the begin of its handshake until its session
// is admitted or over. It is given up earlier if the client has been awaited for long: the opening goes on, and another
// may begin. Its methods may be called by several goroutines, and on a nil place.
type Place struct {
	admission *Admission

	// All below is guarded by the admission's mutex.
	of    *source       // nil: given up
	left  time.Duration // for which its client may still be awaited
	since time.Time     // the client is awaited; zero: it is not
	timer *time.Timer
}

// Await begins the time in which the client is awaited.
func (p *Place) Await() {
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

// Heard ends the time in which the client is awaited.
func (p *Place) Heard() {
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
func (p *Place) stalled() {
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
func (p *Place) leave() {
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

func (p *Place) giveUpLocked() {
	from := p.of
	if from == nil {
		return
	}
	p.of = nil
	from.openings--
	p.admission.opening--
	p.admission.readyLocked(from)
	p.admission.giveTurnsLocked()
}

// Conn is a connection of an agent. During its handshake it holds a turn whenever it is not waiting for its client.
type Conn struct {
	net.Conn

	admission *Admission
	source    string
	ctx       context.Context       //nolint:containedctx // of the handshake, which gives its own to no method
	opening   atomic.Pointer[Place] // nil: not begun, or over
	inTurn    bool                  // it has a turn, which it is to end
	over      bool                  // the handshake has ended
}

// Handshaking returns a connection from a source before its handshake, which ends with ctx.
func (a *Admission) Handshaking(ctx context.Context, conn net.Conn, source string) *Conn {
	return &Conn{Conn: conn, admission: a, source: source, ctx: ctx}
}

// Read reads without a turn, and waits for one.
func (t *Conn) Read(b []byte) (int, error) {
	if t.over {
		return t.Conn.Read(b)
	}
	t.endTurn()
	p := t.opening.Load()
	p.Await()
	n, err := t.Conn.Read(b)
	if err != nil {
		return n, err
	}
	if p == nil {
		if p, err = t.admission.begin(t.ctx, t.source); err == nil {
			t.opening.Store(p)
			t.inTurn = true
			stack.Grow()        // of the handshake's goroutine, and not of those that wait
			if hungUp(t.Conn) { // it gave up before its turn came, which it would only waste
				err = io.EOF
			}
		}
	} else {
		p.Heard()
		err = t.admission.goOn(t.ctx)
	}
	if err != nil {
		return 0, err
	}
	t.inTurn = true
	return n, nil
}

// End ends the handshake. The opening goes on until Leave is called.
func (t *Conn) End() {
	t.endTurn()
	t.over, t.ctx = true, nil
	t.opening.Load().Await() // its first stream
}

// Place returns the place of the connection's opening; nil if it is over.
func (t *Conn) Place() *Place { return t.opening.Load() }

// Close ends the opening and closes the connection.
func (t *Conn) Close() error {
	t.Leave()
	return t.Conn.Close()
}

// Leave ends the opening.
func (t *Conn) Leave() { t.opening.Swap(nil).leave() }

// hungUp reports whether the other side has closed a connection of the kernel, though what it sent before may be
// unread.
func hungUp(conn net.Conn) bool {
	of, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := of.SyscallConn()
	if err != nil {
		return false
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		list := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}} // a descriptor
		n, err := unix.Poll(list, 0)
		gone = err == nil && n > 0
	})
	return err == nil && gone
}

func (t *Conn) endTurn() {
	if t.inTurn {
		t.inTurn = false
		t.admission.endTurn()
	}
}
