package admission

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/internal/testkit"
)

// fill begins as many openings of a source as may be under way, and returns their places.
func (a *admissionTest) fill(t *testing.T, name string) []*Place {
	t.Helper()
	var out []*Place
	for range a.limits.Window {
		expectTurn(t, "an opening of "+name, start(t.Context(), a.beginOf(name)), nil)
		out = append(out, a.present)
		a.endTurn()
	}
	return out
}

func newWindowTest(window int) *admissionTest {
	a := newAdmissionTest()
	a.limits.Window = window
	return a
}

// none fails the test if anything of a source is left.
func (a *admissionTest) none(t *testing.T) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waiting != 0 || len(a.sources) > 0 || len(a.ready) > 0 || a.running != 0 || a.opening != 0 {
		t.Errorf("at the end: sources %v, %d ready, %d turns, %d openings", a.sources, len(a.ready), a.running, a.opening)
	}
}

func TestOpeningsOfASourceAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newWindowTest(2)
		places := a.fill(t, oneSource)
		third := start(t.Context(), a.beginOf(oneSource))
		fourth := start(t.Context(), a.beginOf(oneSource))
		expectWaits(t, "the third", third)
		if !a.Crowded(1) || a.Crowded(2) {
			t.Errorf("%d handshakes wait to begin, not 2", a.waiting)
		}
		expectTurn(t, "one of another source", start(t.Context(), a.beginOf(anotherSource)), nil)
		other := a.present
		a.endTurn()
		if n := a.Openings(); n != 3 {
			t.Errorf("%d openings are under way, not 3", n)
		}
		expectWaits(t, "the third", third)
		places[0].leave()
		places[0].leave() // counts once
		expectTurn(t, "the third, after an opening is over", third, nil)
		last := a.present
		a.endTurn()
		expectWaits(t, "the fourth", fourth)
		time.Sleep(defaults.Patience)
		expectTurn(t, "the fourth, after its patience", fourth, ErrShed)
		for _, p := range []*Place{places[1], other, last} {
			p.leave()
		}
		a.none(t)
	})
}

func TestSourcesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newWindowTest(100)
		expectTurn(t, "the first", start(t.Context(), a.beginOf(oneSource)), nil)
		var many []<-chan error
		for range 5 {
			many = append(many, start(t.Context(), a.beginOf(oneSource)))
		}
		other := start(t.Context(), a.beginOf(anotherSource))
		a.endTurn()
		expectTurn(t, "the second of the one source", many[0], nil)
		a.endTurn()
		expectTurn(t, "the first of the other source", other, nil)
		expectWaits(t, "the third of the one source", many[1])
	})
}

func TestAStalledOpeningGivesItsPlaceUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newWindowTest(1)
		p := a.fill(t, oneSource)[0]
		p.Await()
		time.Sleep(defaults.Stall - time.Second)
		p.Heard()
		next := start(t.Context(), a.beginOf(oneSource))
		time.Sleep(time.Second) // of this side's own work, which does not count
		expectWaits(t, "the next", next)
		p.Await()
		p.Await() // is awaited already
		time.Sleep(time.Second - time.Millisecond)
		expectWaits(t, "the next, until the waits together are too long", next)
		time.Sleep(time.Millisecond)
		expectTurn(t, "the next", next, nil)
		if n := a.stalls.Load(); n != 1 {
			t.Errorf("%d openings counted as stalled", n)
		}
		a.endTurn()
		p.Heard()
		p.leave() // it has no place any more
		expectWaits(t, "one more", start(t.Context(), a.beginOf(oneSource)))
		time.Sleep(defaults.Patience)
		a.present.leave()
		synctest.Wait()
		a.none(t)
	})
}

// TestAConnectionLeavesItsPlace checks that an opening that ends with its connection has no place afterwards, whether
// its handshake failed, is over, or has not begun.
func TestAConnectionLeavesItsPlace(t *testing.T) {
	for _, sent := range []int{0, 1, 2} {
		synctest.Test(t, func(t *testing.T) {
			a := newWindowTest(1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			client, server := net.Pipe()
			conn := a.Handshaking(ctx, server, oneSource)
			read := make(chan error, 1)
			go func() {
				var err error
				for range 2 {
					if _, err = conn.Read(make([]byte, 1)); err != nil {
						break
					}
				}
				conn.End()
				read <- err
			}()
			for range sent {
				if _, err := client.Write([]byte{22}); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Wait()
			if sent > 0 && conn.Place() == nil {
				t.Error("an opening that has begun has no place")
			}
			_ = client.Close()
			<-read
			_ = conn.Close()
			synctest.Wait()
			a.none(t)
		})
	}
}

// Scenario: clients wait for a turn, and one gives its handshake up before the turn comes. It is not begun, and the
// turn goes to the next.
func TestAClientThatHungUpGetsNoTurn(t *testing.T) {
	testkit.IO(t)
	a := newWindowTest(1)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	connect := func() (net.Conn, *Conn) {
		t.Helper()
		client, err := net.Dial("tcp", lis.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		server, err := lis.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		return client, a.Handshaking(t.Context(), server, oneSource)
	}
	before, err := a.Admission.begin(t.Context(), oneSource)
	if err != nil {
		t.Fatal(err)
	}
	a.endTurn()
	type result struct {
		n   int
		err error
	}
	read := func(conn *Conn) <-chan result {
		waiting := a.waitingNow()
		out := make(chan result, 1)
		go func() {
			n, err := conn.Read(make([]byte, 16))
			conn.End()
			out <- result{n, err}
		}()
		testkit.Eventually(t, testkit.Patience, func() error {
			if a.waitingNow() == waiting {
				return errors.New("the handshake does not wait for its turn")
			}
			return nil
		})
		return out
	}
	gone, first := connect()
	left := read(first)
	stays, second := connect()
	defer stays.Close()
	waits := read(second)
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if !hungUp(first.Conn) {
			return errors.New("the kernel has not seen the end of the connection")
		}
		return nil
	})
	before.leave()
	if r := <-left; !errors.Is(r.err, io.EOF) {
		t.Errorf("the client that hung up: %d bytes, %v", r.n, r.err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if r := <-waits; r.err != nil || r.n != len("hello") {
		t.Errorf("the client that stays: %d bytes, %v", r.n, r.err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	a.none(t)
}

func (a *admissionTest) waitingNow() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.waiting
}
