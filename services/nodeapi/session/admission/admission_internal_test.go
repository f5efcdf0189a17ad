package admission

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// admissionTest is an admission of one turn, with the delay of openings.
type admissionTest struct {
	*Admission

	wait    atomic.Int64
	stalls  atomic.Int64
	present *Place // of the opening that began last
}

const (
	oneSource     = "192.0.2.1"
	anotherSource = "192.0.2.2"
)

func newAdmissionTest() *admissionTest {
	a := &admissionTest{}
	with := defaults
	with.Turns, with.Window = 1, 100
	a.Admission = limited(with, func() time.Duration { return time.Duration(a.wait.Load()) })
	a.onStall = func() { a.stalls.Add(1) }
	return a
}

// begin begins a handshake of a source.
func (a *admissionTest) begin(ctx context.Context) error { return a.beginOf(oneSource)(ctx) }

func (a *admissionTest) beginOf(name string) func(context.Context) error {
	return func(ctx context.Context) error {
		p, err := a.Admission.begin(ctx, name)
		if err == nil {
			a.present = p
		}
		return err
	}
}

// start runs wait in a goroutine and returns its result when it has one.
func start(ctx context.Context, wait func(context.Context) error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- wait(ctx) }()
	synctest.Wait()
	return done
}

func expectTurn(t *testing.T, name string, done <-chan error, want error) {
	t.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		if !errors.Is(err, want) {
			t.Fatalf("%s: %v, want %v", name, err, want)
		}
	default:
		t.Fatalf("%s: it waits", name)
	}
}

func expectWaits(t *testing.T, name string, done <-chan error) {
	t.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		t.Fatalf("%s: it waits no longer: %v", name, err)
	default:
	}
}

func TestHandshakesThatHaveBegunGoFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdmissionTest()
		expectTurn(t, "the first", start(t.Context(), a.begin), nil)
		second := start(t.Context(), a.begin)
		third := start(t.Context(), a.begin)
		goesOn := start(t.Context(), a.goOn)
		expectWaits(t, "the second", second)
		a.endTurn()
		expectTurn(t, "the one that has begun", goesOn, nil)
		expectWaits(t, "the second", second)
		a.endTurn()
		expectTurn(t, "the second", second, nil)
		expectWaits(t, "the third", third)
		a.endTurn()
		expectTurn(t, "the third", third, nil)
	})
}

func TestNoHandshakeBeginsWhileOpeningsWaitLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdmissionTest()
		a.wait.Store(int64(defaults.Delay + 1))
		early := start(t.Context(), a.begin)
		time.Sleep(defaults.Patience - time.Second)
		late := start(t.Context(), a.begin)
		expectWaits(t, "the first", early)
		expectTurn(t, "one that has begun", start(t.Context(), a.goOn), nil)
		a.endTurn()
		time.Sleep(time.Second)
		expectTurn(t, "the first, after its patience", early, ErrShed)
		expectWaits(t, "the second", late)
		a.wait.Store(int64(defaults.Delay))
		time.Sleep(defaults.DelayEvery)
		expectTurn(t, "the second, when openings wait less", late, nil)
	})
}

func TestAHandshakeThatLeavesGivesItsTurnOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdmissionTest()
		expectTurn(t, "the first", start(t.Context(), a.begin), nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		leaves := start(ctx, a.begin)
		next := start(t.Context(), a.begin)
		time.Sleep(time.Second)
		expectTurn(t, "the second", leaves, context.DeadlineExceeded)
		a.endTurn()
		expectTurn(t, "the third", next, nil)
		// Its turn has come, and it leaves nevertheless.
		turn := make(chan struct{})
		a.mu.Lock()
		from := a.sources[oneSource]
		a.mu.Unlock()
		if err := a.leaveFresh(from, turn, ErrShed); !errors.Is(err, ErrShed) {
			t.Fatal(err)
		}
		expectTurn(t, "the one after it", start(t.Context(), a.begin), nil)
	})
}

// TestAClientThatSendsNothingHoldsNoTurn checks that handshakes go on beside clients that stop in the middle of theirs.
func TestAClientThatSendsNothingHoldsNoTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdmissionTest()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for i := range 5 {
			client, server := net.Pipe()
			defer client.Close()
			conn := a.Handshaking(ctx, server, oneSource)
			defer conn.Leave()
			read := make(chan error, 1)
			go func() {
				_, err := conn.Read(make([]byte, 1))
				if err == nil {
					_, err = conn.Read(make([]byte, 1)) // the client does not send it
				}
				conn.End()
				read <- err
			}()
			if i > 0 { // the first one does not even begin
				if _, err := client.Write([]byte{22}); err != nil {
					t.Fatal(err)
				}
			}
			expectWaits(t, "the silent client", read)
			expectTurn(t, "another", start(t.Context(), a.begin), nil)
			a.endTurn()
			_ = client.Close()
			synctest.Wait()
			if err := <-read; err == nil {
				t.Error("no error at the end of the connection")
			}
		}
		if a.running != 0 {
			t.Errorf("%d turns are held at the end", a.running)
		}
	})
}
