package session_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/agent/session/outbox"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
)

func TestOpensBeatsAndSaysGoodbye(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		h := start(t, p, p.memory(), nil)
		h.until("admitted", time.Second, h.admitted)
		time.Sleep(10 * time.Minute)
		p.mu.Lock()
		if p.beats < 55 || p.beats > 66 {
			t.Errorf("%d heartbeats in ten minutes of a ten second interval", p.beats)
		}
		if len(p.opens) != 1 {
			t.Errorf("%d opens", len(p.opens))
		}
		p.mu.Unlock()
		h.stop()
		if len(p.frames) != 1 || p.frames[0] != "goodbye" {
			t.Errorf("frames %q", p.frames)
		}
		if h.admitted() {
			t.Error("admitted after the end")
		}
	})
}

// TestLostReplies loses each frame of the opening once. The same identity comes back, and no alarm is raised.
func TestLostReplies(t *testing.T) {
	gone := errors.New("connection lost")
	tests := map[string]func(v *visit) error{
		"hello":    func(*visit) error { return gone },
		"welcome":  func(v *visit) error { _, _ = v.issue(); return gone },
		"ready":    func(v *visit) error { g, _ := v.issue(); _ = v.welcome(g); return gone },
		"admitted": func(v *visit) error { g, _ := v.issue(); _ = v.welcome(g); _ = v.ready(g); return gone },
		"after it": func(v *visit) error {
			g, _ := v.issue()
			_ = v.welcome(g)
			_ = v.ready(g)
			_ = v.admit(g)
			return gone
		},
		"welcome, silently": func(v *visit) error {
			_, _ = v.issue()
			<-v.stream.Context().Done()
			return gone
		},
	}
	for name, lose := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.script = func(v *visit) error {
					if v.n < 3 {
						return lose(v)
					}
					return v.normal()
				}
				s := p.disk(dirsOf(t))
				h := start(t, p, s, nil)
				h.until("admitted", 3*time.Minute, func() bool { return h.admitted() && p.opened() == 4 })
				h.stop()
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				if len(h.diagnostics) != 3 {
					t.Errorf("%d diagnostics for 3 losses: %v", len(h.diagnostics), h.diagnostics)
				}
			})
		})
	}
}

func TestSupersededComesBackWithinTwoSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		var closed time.Time
		p.script = func(v *visit) error {
			if v.n > 0 {
				return v.normal()
			}
			g, _ := v.issue()
			_ = v.welcome(g)
			_ = v.ready(g)
			_ = v.admit(g)
			closed = time.Now()
			return v.deny(fault.New(commonv1.Reason_REASON_SESSION_SUPERSEDED, ""))
		}
		h := start(t, p, p.memory(), nil)
		h.until("back", 3*time.Second, func() bool { return p.opened() == 2 && h.admitted() })
		if wait := p.opens[1].at.Sub(closed); wait > 2*time.Second || wait < 50*time.Millisecond {
			t.Errorf("came back after %v", wait)
		}
		h.stop()
	})
}

func TestChallengeIsAnsweredWithTheCertificatesKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.script = func(v *visit) error {
			if err := v.challenge(); err != nil {
				return err
			}
			return v.normal()
		}
		h := start(t, p, p.memory(), nil)
		h.until("admitted", time.Second, h.admitted)
		h.stop()
		if p.frames[0] != "challenge answered" {
			t.Errorf("frames %q", p.frames)
		}
	})
}

func TestReconnectHandsOverWithoutAGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		h := start(t, p, p.memory(), nil)
		h.until("admitted", time.Second, h.admitted)
		first := p.session(0)
		asked := time.Now()
		spread := 20 * time.Second
		if err := first.send(
			&nodev1.ConnectResponse{
				Frame: &nodev1.ConnectResponse_Reconnect{Reconnect: &nodev1.Reconnect{Spread: durationpb.New(spread)}},
			},
		); err != nil {
			t.Fatal(err)
		}
		for p.opened() < 2 {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			if !h.admitted() {
				t.Fatal("a gap without a session")
			}
		}
		if wait := p.opens[1].at.Sub(asked); wait > spread {
			t.Errorf("replaced after %v, more than the spread", wait)
		}
		if got := p.opens[1].hello.GetReplacesNonce(); got != first.nonce {
			t.Errorf("replaces %q, not %q", got, first.nonce)
		}
		h.until("the old one is closed", 30*time.Second,
			func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.closed == 1 })
		if h.client.Generation() != 2 {
			t.Errorf("generation %d", h.client.Generation())
		}
		// Queued frames are sent by the new session alone.
		if err := h.client.Result(&nodev1.TaskResult{Task: &nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}}); err != nil {
			t.Fatal(err)
		}
		h.until("acknowledged", time.Second, func() bool { h.hmu.Lock(); defer h.hmu.Unlock(); return h.acked == 1 })
		h.stop()
		if len(h.diagnostics) != 0 {
			t.Errorf("diagnostics of an orderly hand-over: %v", h.diagnostics)
		}
	})
}

func TestWhatDenialsMean(t *testing.T) {
	tests := []struct {
		reason commonv1.Reason
		stop   bool
		action commonv1.Action
	}{
		{reason: commonv1.Reason_REASON_EPOCH_SUPERSEDED, stop: true},
		{reason: commonv1.Reason_REASON_IDENTITY_RETIRED, stop: true},
		{reason: commonv1.Reason_REASON_JOIN_STATE_LOST, action: commonv1.Action_ACTION_RECOVER},
		{reason: commonv1.Reason_REASON_IDENTITY_UNKNOWN, action: commonv1.Action_ACTION_REBUNDLE},
		// no other certificate is held
		{reason: commonv1.Reason_REASON_SERIAL_SUPERSEDED, action: commonv1.Action_ACTION_RECOVER},
	}
	for _, tt := range tests {
		t.Run(tt.reason.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.script = func(v *visit) error { return v.deny(fault.New(tt.reason, "")) }
				h := start(t, p, p.memory(), nil)
				err := <-h.done
				h.cancel()
				p.end()
				if stop, ok := errors.AsType[*session.StopError](err); ok != tt.stop || (ok && stop.Denial.Reason != tt.reason) {
					t.Errorf("Run = %v", err)
				}
				if id, ok := errors.AsType[*session.IdentityError](err); ok == tt.stop || (ok && id.Action != tt.action) {
					t.Errorf("Run = %v", err)
				}
				if len(h.diagnostics) != 1 {
					t.Errorf("diagnostics %v", h.diagnostics)
				}
			})
		})
	}
}

// TestWaits measures the times between opens.
func TestWaits(t *testing.T) {
	tests := []struct {
		name   string
		denial error
		least  time.Duration
		most   time.Duration
		code   commonv1.DiagnosticCode
	}{
		{
			"held", fault.New(commonv1.Reason_REASON_IDENTITY_HELD, "", fault.RetryAfter(45*time.Second)), 45 * time.Second,
			68 * time.Second, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED,
		},
		{
			"held, and told to ask soon", fault.New(commonv1.Reason_REASON_IDENTITY_HELD, ""), 3 * time.Second,
			4500 * time.Millisecond, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED,
		},
		{
			"fenced", fault.New(commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED, ""), 5 * time.Second, 7500 * time.Millisecond,
			commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED,
		},
		{
			"unknown reason", &fault.Error{Reason: 9999, Action: commonv1.Action_ACTION_STOP}, 0, 30 * time.Second,
			commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED,
		},
		{
			"stale authority", fault.New(commonv1.Reason_REASON_AUTHORITY_STALE, ""), 0, 31 * time.Second,
			commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.script = func(v *visit) error { return v.deny(tt.denial) }
				h := start(t, p, p.memory(), nil)
				time.Sleep(20 * time.Minute)
				h.stop()
				if len(p.opens) < 10 {
					t.Fatalf("%d opens in twenty minutes", len(p.opens))
				}
				for i := 1; i < len(p.opens); i++ {
					if wait := p.opens[i].at.Sub(p.opens[i-1].at); wait < tt.least || wait > tt.most {
						t.Errorf("wait %d = %v", i, wait)
					}
				}
				if h.diagnostics[0].Code != tt.code {
					t.Errorf("code %v", h.diagnostics[0].Code)
				}
			})
		})
	}
}

func TestRecordsBeforeEveryRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		_ = p.pipe.Close()
		h := start(t, p, p.memory(), nil)
		time.Sleep(time.Hour)
		h.stop()
		if n := len(h.dials); n < 150 || n > 600 {
			t.Errorf("%d dials in an hour", n)
		}
		for i := 1; i < len(h.dials); i++ {
			if h.diagAt[i-1].After(h.dials[i]) || h.diagAt[i-1].Before(h.dials[i-1]) {
				t.Fatalf("dial %d at %v, its record at %v", i, h.dials[i], h.diagAt[i-1])
			}
			if h.dials[i].Sub(h.diagAt[i-1]) != h.diagnostics[i-1].NextRetry {
				t.Errorf("record %d says %v, the retry came after %v", i, h.diagnostics[i-1].NextRetry,
					h.dials[i].Sub(h.diagAt[i-1]))
			}
		}
	})
}

func TestSilentServerIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.script = func(v *visit) error {
			if v.n > 0 {
				return v.normal()
			}
			g, _ := v.issue()
			_ = v.welcome(g)
			_ = v.ready(g)
			_ = v.admit(g)
			for { // it reads and never sends
				if _, err := v.stream.Recv(); err != nil {
					return err
				}
			}
		}
		h := start(t, p, p.memory(), nil)
		h.until("another session", 40*time.Second, func() bool { return p.opened() == 2 && h.admitted() })
		h.stop()
	})
}

func TestOversizeFrameEndsTheConnectionOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.script = func(v *visit) error {
			if v.n > 0 {
				return v.normal()
			}
			g, _ := v.issue()
			_ = v.welcome(g)
			_ = v.ready(g)
			_ = v.admit(g)
			_ = v.send(
				&nodev1.ConnectResponse{
					Frame: &nodev1.ConnectResponse_TaskOffer{TaskOffer: &nodev1.TaskOffer{Envelope: make([]byte, 2<<20)}},
				},
			)
			return v.run()
		}
		h := start(t, p, p.memory(), nil)
		h.until("back", 10*time.Second, func() bool { return p.opened() == 2 && h.admitted() })
		h.stop()
		if h.offers != 0 {
			t.Error("the frame was taken")
		}
	})
}

func TestProtocolViolations(t *testing.T) {
	tests := map[string]func(v *visit) error{
		"a generation that is not larger": func(v *visit) error { return v.welcome(0) },
		"admitted to another generation": func(v *visit) error {
			g, _ := v.issue()
			_ = v.welcome(g)
			_ = v.ready(g)
			return v.admit(g + 1)
		},
		"admitted before welcome": func(v *visit) error { return v.admit(1) },
		"a short challenge": func(v *visit) error {
			return v.send(
				&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Challenge{Challenge: &nodev1.Challenge{Nonce: []byte("x")}}},
			)
		},
	}
	for name, violate := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.script = func(v *visit) error {
					if v.n > 0 {
						return v.normal()
					}
					if err := violate(v); err != nil {
						return err
					}
					<-v.stream.Context().Done()
					return nil
				}
				h := start(t, p, p.memory(), nil)
				h.until("admitted by an honest one", 10*time.Second, func() bool { return p.opened() == 2 && h.admitted() })
				h.stop()
			})
		})
	}
}

func TestNothingIsTakenWithoutASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		_ = p.pipe.Close()
		h := start(t, p, p.memory(), nil)
		synctest.Wait()
		if err := h.client.Result(&nodev1.TaskResult{}); !errors.Is(err, outbox.ErrNotConnected) {
			t.Errorf("Result = %v", err)
		}
		h.stop()
	})
}

func TestNewReportsAllProblems(t *testing.T) {
	_, err := session.New(session.Deps{}, session.Config{})
	if err == nil {
		t.Fatal("accepted")
	}
	if context.Cause(t.Context()) != nil {
		t.Fatal("ended")
	}
}
