package session_test

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestRenewsAtHalfLifeAndHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.interval = 5 * time.Minute
		s := p.disk(dirsOf(t))
		begin := time.Now()
		first := s.Certificate().Leaf.SerialNumber
		h := start(t, p, s, nil)
		h.until("admitted", time.Second, h.admitted)
		stop := make(chan struct{})
		var gap bool
		var watcher sync.WaitGroup
		watcher.Go(func() { // there is a session at every moment
			for {
				select {
				case <-stop:
					return
				case <-time.After(7 * time.Second):
					gap = gap || !h.admitted()
				}
			}
		})
		h.until("a session on the next certificate", 6*time.Hour,
			func() bool { return p.opened() == 2 && h.client.Generation() == 2 })
		if took := time.Since(begin); took < 3*time.Hour || took > 5*time.Hour {
			t.Errorf("renewed after %v of 8 h", took)
		}
		if s.Certificate().Leaf.SerialNumber.Cmp(first) == 0 || s.Other().Leaf.SerialNumber.Cmp(first) != 0 {
			t.Error("the slots are not what they should be")
		}
		if p.opens[1].hello.GetReplacesNonce() != p.session(0).nonce || p.saw("stored") != 1 || p.saw("renew") != 1 {
			t.Errorf("frames %q", p.frames)
		}
		time.Sleep(26 * time.Hour)
		close(stop)
		watcher.Wait()
		if gap {
			t.Error("a moment without a session")
		}
		if n := p.opened(); n < 7 || n > 9 {
			t.Errorf("%d sessions in thirty hours of certificates for eight", n)
		}
		h.stop()
		if len(h.diagnostics) != 0 {
			t.Errorf("diagnostics %v", h.diagnostics)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestLostCertificateIsAskedForWithTheSameKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.interval = time.Minute
		p.dropIssued = 3
		h := start(t, p, p.memory(), nil)
		h.until("a session on the next certificate", 6*time.Hour, func() bool { return p.opened() == 2 && h.admitted() })
		if p.saw("renew") != 4 || len(p.byKey) != 1 {
			t.Errorf("%d requests with %d keys", p.saw("renew"), len(p.byKey))
		}
		h.stop()
	})
}

func TestRenewalRefusedKeepsTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.interval = time.Minute
		p.denyRenewal = fault.ToDenial(fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, ""), "")
		h := start(t, p, p.memory(), nil)
		time.Sleep(5 * time.Hour)
		synctest.Wait()
		if !h.admitted() || p.opened() != 1 || p.saw("renew") < 2 || p.saw("renew") > 60 {
			t.Errorf("admitted %v, %d opens, %d requests", h.admitted(), p.opened(), p.saw("renew"))
		}
		p.mu.Lock()
		p.denyRenewal = nil
		p.mu.Unlock()
		h.until("a session on the next certificate", 10*time.Minute,
			func() bool { return p.opened() == 2 && h.client.Generation() == 2 })
		h.stop()
	})
}

// TestAForeignKeyIsReplaced asks for a certificate with a key that certifies another node: the next request has another
// key, and the session stays.
func TestAForeignKeyIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.interval = time.Minute
		p.firstKeyIsForeign = true
		h := start(t, p, p.memory(), nil)
		h.until("a session on the next certificate", 6*time.Hour, func() bool { return p.opened() == 2 && h.admitted() })
		if p.saw("renew") != 2 || len(p.byKey) != 1 {
			t.Errorf("%d requests, %d keys certified", p.saw("renew"), len(p.byKey))
		}
		h.stop()
	})
}

// TestFallsBackToTheCertificateThatWorks: the next certificate was issued and superseded before it was used.
func TestFallsBackToTheCertificateThatWorks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.interval = time.Minute
		p.supersedeNextCerts = true
		s := p.disk(dirsOf(t))
		first := s.Certificate().Leaf.SerialNumber
		h := start(t, p, s, nil)
		h.until("an open on the next certificate", 6*time.Hour, func() bool { return p.opened() >= 2 })
		// Only a session on the first one is admitted; late in the range of its time the next request follows at once, so it
		// may be more than one.
		h.until("a session on the first one again", time.Minute, func() bool {
			return p.opened() >= 3 && h.client.Generation() >= 2 && s.Certificate().Leaf.SerialNumber.Cmp(first) == 0
		})
		p.mu.Lock()
		p.supersedeNextCerts = false
		p.mu.Unlock()
		before := h.client.Generation()
		// The time of the request is drawn anew, anywhere in a tenth of the certificate's life.
		h.until("renewed after all", time.Hour, func() bool {
			return h.admitted() && s.Certificate().Leaf.SerialNumber.Cmp(first) != 0 && h.client.Generation() > before
		})
		h.stop()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestResultsMoveWithTheHandOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.ttl = 10 * time.Minute
		h := start(t, p, p.memory(), nil)
		h.until("admitted", time.Second, h.admitted)
		sent := 0
		for end := time.Now().Add(7 * time.Minute); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
			ref := &nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}
			if err := h.client.Delivered([]*nodev1.TaskRef{ref}); err != nil {
				t.Fatal(err)
			}
			if err := h.client.Started(&nodev1.TaskStarted{Task: ref}); err != nil {
				t.Fatal(err)
			}
			if err := h.client.Result(&nodev1.TaskResult{Task: ref}); err != nil {
				t.Fatal(err)
			}
			sent++
			if sent%5000 == 0 {
				synctest.Wait()
			}
		}
		h.until("all acknowledged", time.Minute, func() bool { h.hmu.Lock(); defer h.hmu.Unlock(); return h.acked == sent })
		if p.opened() < 2 {
			t.Error("no hand-over happened")
		}
		h.stop()
		if len(p.results) != sent {
			t.Errorf("%d of %d results arrived", len(p.results), sent)
		}
	})
}

// TestKilledBetweenAnyTwoEffects kills the agent at every point of a life that opens, renews and hands over, starts it
// again, and checks that it ends as the same node on a renewed certificate without an alarm.
func TestKilledBetweenAnyTwoEffects(t *testing.T) {
	testkit.IO(t) // it syncs thousands of files
	const most = 200
	points := 0
	for nth := 1; nth < most; nth++ {
		hit := ""
		synctest.Test(t, func(t *testing.T) {
			p := newFakeServer(t)
			p.ttl, p.interval = 10*time.Minute, time.Minute
			dirs := dirsOf(t)
			s := p.disk(dirs)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			dead := errors.New("killed")
			killed := make(chan struct{})
			var mu sync.Mutex
			left := nth
			s = p.disk(dirs, identity.WithStep(func(point string) error {
				mu.Lock()
				defer mu.Unlock()
				if left--; left > 0 {
					return nil
				}
				if left == 0 {
					hit = point
					close(killed)
				}
				return dead // nothing happens on a disk after the end of its process
			}))
			h := start(t, p, s, nil)
			select {
			case <-killed:
			case <-time.After(8 * time.Minute):
			}
			h.cancel()
			if err := <-h.done; err != nil {
				t.Errorf("Run: %v", err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = p.disk(dirs)
			if problems := s.Problems(); len(problems) > 0 {
				t.Errorf("killed at %s: %q", hit, problems)
			}
			begin := s.Certificate().Leaf.NotBefore
			h = start(t, p, s, nil)
			h.until("admitted after a kill at "+hit, 2*time.Minute, h.admitted)
			h.until("renewed after a kill at "+hit, 10*time.Minute,
				func() bool { return h.admitted() && s.Certificate().Leaf.NotBefore.After(begin) })
			h.stop()
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		if hit == "" {
			points = nth - 1
			break
		}
	}
	if points < 20 {
		t.Errorf("%d points passed", points)
	}
	t.Logf("%d points", points)
}
