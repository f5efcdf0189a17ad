package session_test

import (
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// seeded makes every jitter of a client come from one seed.
func seeded(seed uint64) func(*session.Deps, *session.Config) {
	return func(_ *session.Deps, cfg *session.Config) {
		var mu sync.Mutex
		source := rand.New(rand.NewPCG(seed, seed))
		cfg.Draw = func(n int64) int64 {
			mu.Lock()
			defer mu.Unlock()
			return source.Int64N(n)
		}
	}
}

// untilExpiry serves v like normal and closes the session when its certificate ends, as the node API does.
func (v *visit) untilExpiry() error {
	end := time.AfterFunc(time.Until(v.leaf.NotAfter), func() {
		_ = v.deny(fault.New(commonv1.Reason_REASON_CERTIFICATE_EXPIRED, ""))
	})
	defer end.Stop()
	return v.normal()
}

// opensOf returns the opens with one certificate.
func (p *fakeServer) opensOf(serial string) []open {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []open
	for _, o := range p.opens {
		if o.serial == serial {
			out = append(out, o)
		}
	}
	return out
}

func rateLimited(retryAfter time.Duration) error {
	return fault.New(commonv1.Reason_REASON_RATE_LIMITED, "", fault.RetryAfter(retryAfter))
}

// TestHandOverIsRetriedBeforeTheCertificateEnds issues the next certificate 26 s before the end of the one in use,
// and refuses the first open on it with a wait of 28 s.
func TestHandOverIsRetriedBeforeTheCertificateEnds(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			p := newFakeServer(t)
			p.ttl = 52 * time.Second
			first := p.memory()
			ends, serial := first.Certificate().Leaf.NotAfter, p.current
			p.script = func(v *visit) error {
				if v.serial != serial && len(p.opensOf(v.serial)) == 1 {
					return v.deny(rateLimited(28 * time.Second))
				}
				return v.untilExpiry()
			}
			h := start(t, p, first, seeded(seed))
			h.until("admitted", time.Second, h.admitted)
			h.until("an open on the next certificate", 40*time.Second, func() bool { return p.opened() == 2 })
			p.mu.Lock()
			issued := p.next
			p.mu.Unlock()
			next := p.opensOf(issued)
			if len(next) != 1 {
				t.Fatalf("seed %d: %d opens on the next certificate", seed, len(next))
			}
			if left := ends.Sub(next[0].at); left < 22*time.Second || left > 29*time.Second {
				t.Fatalf("seed %d: the next certificate was first tried %v before the end", seed, left)
			}
			h.until("handed over before the end", time.Until(ends), func() bool { return h.client.Generation() == 2 })
			h.stop()
		})
	}
}

// TestAtExpiryTheNextCertificateIsTried refuses every open on the next certificate for as long as the one in use lives.
func TestAtExpiryTheNextCertificateIsTried(t *testing.T) {
	tests := map[string]error{
		"rate limited":        rateLimited(28 * time.Second),
		"superseded":          fault.New(commonv1.Reason_REASON_SERIAL_SUPERSEDED, ""),
		"unknown to recovery": fault.New(commonv1.Reason_REASON_SERIAL_UNKNOWN, ""),
	}
	for name, refusal := range tests {
		t.Run(name, func(t *testing.T) {
			for seed := range testkit.Repeat[uint64](2, 10) {
				synctest.Test(t, func(t *testing.T) {
					p := newFakeServer(t)
					p.ttl = 52 * time.Second
					id := p.memory()
					ends, serial := id.Certificate().Leaf.NotAfter, p.current
					p.script = func(v *visit) error {
						if v.serial != serial && time.Now().Before(ends) {
							return v.deny(refusal)
						}
						return v.untilExpiry()
					}
					h := start(t, p, id, seeded(seed))
					h.until("admitted", time.Second, h.admitted)
					generation := h.client.Generation()
					time.Sleep(time.Until(ends) - time.Millisecond)
					if !h.admitted() {
						t.Fatalf("seed %d: the session ended before its certificate", seed)
					}
					h.until("admitted with the next certificate", 10*time.Second, func() bool {
						select {
						case err := <-h.done:
							t.Fatalf("seed %d: Run gave up with a good certificate in hand: %v", seed, err)
						default:
						}
						return h.client.Generation() > generation && id.Certificate().Leaf.NotAfter.After(ends) && h.admitted()
					})
					h.stop()
				})
			}
		})
	}
}

// TestClosedSessionGoesOnWithTheNextCertificate: the old certificate stops counting while the session on the next one
// waits to be opened again.
func TestClosedSessionGoesOnWithTheNextCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		id := p.memory()
		serial := p.current
		p.script = func(v *visit) error {
			if v.serial != serial && len(p.opensOf(v.serial)) == 1 {
				return v.deny(rateLimited(time.Minute))
			}
			return v.normal()
		}
		h := start(t, p, id, seeded(1))
		h.until("an open on the next certificate", 6*time.Hour, func() bool { return p.opened() == 2 })
		p.mu.Lock()
		p.current, p.next = p.next, ""
		p.mu.Unlock()
		if err := p.session(0).deny(fault.New(commonv1.Reason_REASON_SERIAL_SUPERSEDED, "")); err != nil {
			t.Fatal(err)
		}
		h.until("admitted with the next certificate", 10*time.Second, func() bool { return h.client.Generation() == 2 })
		h.stop()
		if n := len(p.opensOf(serial)); n != 1 {
			t.Errorf("%d opens with the certificate that does not count any more", n)
		}
	})
}

// TestAdmissionEndsTheBackoff: failures before an admission do not slow the retries after it.
func TestAdmissionEndsTheBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		refuse := map[int]bool{0: true, 1: true, 2: true, 3: true, 4: true, 5: true, 7: true, 9: true}
		p.script = func(v *visit) error {
			if refuse[v.n] {
				return v.deny(fault.New(commonv1.Reason_REASON_UNAVAILABLE, ""))
			}
			return v.normal()
		}
		h := start(t, p, p.memory(), func(_ *session.Deps, cfg *session.Config) {
			cfg.Draw = func(n int64) int64 { return n - 1 } // the longest wait of each range
		})
		h.until("admitted", 5*time.Minute, h.admitted)
		for generation := int64(2); generation <= 3; generation++ {
			asked := p.session(int(generation) - 2)
			if err := asked.send(
				&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Reconnect{Reconnect: &nodev1.Reconnect{}}},
			); err != nil {
				t.Fatal(err)
			}
			h.until("replaced", time.Minute, func() bool { return h.client.Generation() == generation })
		}
		h.stop()
		for _, n := range []int{7, 9} {
			if wait := p.opens[n+1].at.Sub(p.opens[n].at); wait > 2*time.Second {
				t.Errorf("the first retry of hand-over %d came after %v", n, wait)
			}
		}
	})
}

// TestSessionsThatEndAtOnceAreNotOpenedWithoutPause: an admission ends the backoff of opens, and a session that ends
// as soon as it is admitted has one of its own.
func TestSessionsThatEndAtOnceAreNotOpenedWithoutPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.script = func(v *visit) error {
			generation, err := v.issue()
			if err != nil {
				return err
			}
			if err := v.welcome(generation); err != nil {
				return err
			}
			if err := v.ready(generation); err != nil {
				return err
			}
			return v.admit(generation)
		}
		h := start(t, p, p.memory(), seeded(1))
		time.Sleep(10 * time.Minute)
		h.stop()
		if n := p.opened(); n < 20 || n > 120 {
			t.Errorf("%d opens in ten minutes of sessions that end at once", n)
		}
	})
}

// TestTheShortestLives runs a hundred lives of the shortest certificates that the policy allows, with opens that
// are refused at random.
func TestTheShortestLives(t *testing.T) {
	const life = 20 * time.Second // the least of node.certificate_ttl_seconds
	lives := testkit.Repeat(100, 300)
	for seed := range testkit.Repeat[uint64](1, 2) {
		synctest.Test(t, func(t *testing.T) {
			p := newFakeServer(t)
			p.ttl, p.backdate, p.interval = life, time.Minute, 5*time.Second
			s := p.memory()
			p.script = func(v *visit) error {
				if v.n > 0 && chance(seed, v.n) < 40 {
					return v.deny(rateLimited(time.Duration(chance(seed+100, v.n)) * 100 * time.Millisecond)) // up to 10 s
				}
				return v.untilExpiry()
			}
			begin := time.Now()
			h := start(t, p, s, seeded(seed))
			h.until("admitted", time.Second, h.admitted)
			away, longest := time.Duration(0), time.Duration(0)
			const step = 250 * time.Millisecond
			for time.Since(begin) < time.Duration(lives)*life/2 {
				time.Sleep(step)
				select {
				case err := <-h.done:
					t.Fatalf("seed %d: the session was lost for good after %v: %v", seed, time.Since(begin), err)
				default:
				}
				if h.admitted() {
					away = 0
					continue
				}
				away += step
				longest = max(longest, away)
			}
			h.until("admitted at the end", life, h.admitted)
			h.stop()
			renewals := p.saw("renew")
			t.Logf("seed %d: %d certificates, %d opens, longest time without a session %v", seed, renewals, p.opened(), longest)
			// One renewal in about half a life, and no open beyond those and the refused ones.
			if renewals > lives*5/4 || renewals < lives*3/4 {
				t.Errorf("seed %d: %d certificates in %d half lives", seed, renewals, lives)
			}
			if n := len(h.admissions); n > lives*3/2 {
				t.Errorf("seed %d: %d admissions", seed, n)
			}
			if longest > life/2 {
				t.Errorf("seed %d: %v without a session", seed, longest)
			}
		})
	}
}

// chance returns a number below 100 that depends on its arguments alone.
func chance(seed uint64, n int) int {
	sum := fnv.New64a()
	_, _ = sum.Write([]byte{byte(seed), byte(n), byte(n >> 8), byte(n >> 16)})
	return rand.New(rand.NewPCG(seed, sum.Sum64())).IntN(100)
}
