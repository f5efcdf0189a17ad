package nodeapi_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// knocker opens streams with one certificate from several connections at once and reads each to its end. It never
// answers a challenge.
type knocker struct {
	ended atomic.Int64 // streams that were ended by the server
}

// knock runs 6 workers until the test ends or the returned function is called. Each opens at most 25 streams a second,
// which one connection may open.
func (k *kit) knock(addr string, cert tls.Certificate, hello func() *nodev1.ConnectRequest) (*knocker, func()) {
	k.t.Helper()
	conf, err := k.clientTLS(cert)
	if err != nil {
		k.t.Fatal(err)
	}
	n := &knocker{}
	ctx, cancel := context.WithCancel(context.WithoutCancel(k.t.Context()))
	var workers sync.WaitGroup
	for range 6 {
		workers.Go(func() {
			pace := time.NewTicker(40 * time.Millisecond)
			defer pace.Stop()
			for ctx.Err() == nil {
				n.connection(ctx, addr, conf, pace.C, hello)
			}
		})
	}
	stop := sync.OnceFunc(func() { cancel(); workers.Wait() })
	k.t.Cleanup(stop)
	return n, stop
}

// connection opens streams over one connection until it breaks.
func (n *knocker) connection(ctx context.Context, addr string, conf *tls.Config, pace <-chan time.Time,
	hello func() *nodev1.ConnectRequest,
) {
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)))
	if err != nil {
		return
	}
	defer cc.Close()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pace:
		}
		stream, err := nodev1.NewNodeServiceClient(cc).Connect(ctx)
		if err != nil {
			return
		}
		_ = stream.Send(hello()) // the refusal is read
		denied := false
		for err == nil {
			var f *nodev1.ConnectResponse
			f, err = stream.Recv()
			denied = denied || f.GetDenied() != nil
		}
		if ctx.Err() == nil {
			n.ended.Add(1)
		}
		if !denied {
			return // the connection was cut
		}
	}
}

// until waits until the server has ended so many more streams.
func (n *knocker) until(t *testing.T, more int64) {
	t.Helper()
	goal := n.ended.Load() + more
	testkit.Eventually(t, 2*patience, func() error {
		if got := n.ended.Load(); got < goal {
			return fmt.Errorf("%d of %d knocks", got, goal)
		}
		return nil
	})
}

// comesBack reconnects the node so many times while the knocker uses its name, and returns the number of refusals that
// the node gets.
func (k *kit) comesBack(a *agent, addr string, n *knocker, times int) int {
	k.t.Helper()
	refused := 0
	for range times {
		a.cancel()
		n.until(k.t, 40)
		a = a.again()
		k.connect(a, addr, true)
		a.send(a.hello())
		f := a.next("Welcome or Denied",
			func(f *nodev1.ConnectResponse) bool { return f.GetWelcome() != nil || f.GetDenied() != nil })
		if d := f.GetDenied(); d != nil {
			k.t.Logf("the node is refused: %s, retry after %s", d.GetReason(), d.GetRetryAfter().AsDuration())
			refused++
			continue
		}
		a.join = f.GetWelcome().GetJoinState()
		a.send(ready(f.GetWelcome().GetGeneration()))
		a.next("Admitted", func(f *nodev1.ConnectResponse) bool { return f.GetAdmitted() != nil })
	}
	return refused
}

// TestARevokedCertificateCostsItsNodeNothing: a holder of a certificate that recovery refuses opens 150 streams a
// second; the node, on its next certificate, is admitted at once each time.
func TestARevokedCertificateCostsItsNodeNothing(t *testing.T) {
	for _, reason := range []commonv1.Reason{
		commonv1.Reason_REASON_SERIAL_UNKNOWN,
		commonv1.Reason_REASON_SERIAL_SUPERSEDED,
	} {
		t.Run(reason.String(), func(t *testing.T) {
			var good atomic.Value // serial of the certificate that counts
			good.Store("")
			k := newKit(t, func(p *nodeapitest.Backend) {
				p.Deny = func(s *recoveryv1.OpenSession) *commonv1.Denial {
					if serial := good.Load(); serial == "" || serial == s.GetSerial() {
						return nil
					}
					return fault.ToDenial(fault.New(reason, ""), "")
				}
			})
			r := k.replica(func(c *nodeapi.Config) { c.OpenBurst = 3 })
			a := k.node()
			revoked, err := k.nodes.Node(a.id)
			if err != nil {
				t.Fatal(err)
			}
			k.connect(a, r.AgentAddr(), true)
			a.open()
			good.Store(k.backend.Opened()[0].GetSerial())
			thief := &agent{t: t, id: a.id, instance: a.instance}
			n, stop := k.knock(r.AgentAddr(), revoked, func() *nodev1.ConnectRequest { return thief.hello() })
			if refused := k.comesBack(a, r.AgentAddr(), n, 3); refused != 0 {
				t.Errorf("the node was refused %d times", refused)
			}
			stop()
			// Streams with a serial that recovery has refused reach recovery only at their own low rate.
			asked := 0
			for _, o := range k.backend.Opened() {
				if o.GetSerial() != good.Load() {
					asked++
				}
			}
			t.Logf("%d knocks were ended, of which %d reached recovery", n.ended.Load(), asked)
			if asked < 1 || int64(asked) > n.ended.Load()/4 {
				t.Errorf("recovery was asked %d times for %d knocks", asked, n.ended.Load())
			}
		})
	}
}

// TestACopyOfTheKeyAloneCostsItsNodeNothing: a holder of the key and certificate that the node uses, from the node's
// own address, is challenged and does not answer. It has no join state, or an old one. The node has the newest, and is
// admitted at once each time.
func TestACopyOfTheKeyAloneCostsItsNodeNothing(t *testing.T) {
	for _, old := range []bool{false, true} {
		t.Run(fmt.Sprintf("old_join_state_%v", old), func(t *testing.T) {
			var confirmed atomic.Int64
			k := newKit(t, func(p *nodeapitest.Backend) {
				p.Challenge = func(s *recoveryv1.OpenSession) bool {
					state, err := p.Keys.Verify(s.GetJoinState())
					return confirmed.Load() > 0 && (err != nil || state.Generation < confirmed.Load())
				}
			})
			r := k.replica(func(c *nodeapi.Config) { c.OpenBurst, c.ChallengeWithin = 4, 500*time.Millisecond })
			a := k.session(r)
			thief := &agent{t: t, id: a.id, instance: a.instance}
			if old {
				thief.join = a.join
			}
			a = a.again()
			k.connect(a, r.AgentAddr(), true)
			a.open()
			testkit.Eventually(t, patience, func() error { return k.wantFacts(a.session, "SESSION_STATE_ADMITTED ") })
			confirmed.Store(a.generation)
			n, stop := k.knock(r.AgentAddr(), a.cert, func() *nodev1.ConnectRequest { return thief.hello() })
			if refused := k.comesBack(a, r.AgentAddr(), n, 3); refused != 0 {
				t.Errorf("the node was refused %d times", refused)
			}
			stop()
			if len(k.backend.Challenges()) == 0 {
				t.Error("no agent was challenged")
			}
			for _, c := range k.backend.Challenges() {
				if c.GetAnswered() {
					t.Errorf("a challenge counts as answered: %v", c)
				}
			}
			t.Logf("%d knocks were ended, of which %d were challenged", n.ended.Load(), len(k.backend.Challenges()))
		})
	}
}

// TestStreamsWithoutHelloAreBounded: of the streams of one certificate that send no Hello the oldest are closed, and
// the node is admitted beside them.
func TestStreamsWithoutHelloAreBounded(t *testing.T) {
	const silent, bound = 80, 64
	k := newKit(t)
	// streams end by the bound and not by this timeout
	r := k.replica(func(c *nodeapi.Config) { c.FirstFrame = 10 * time.Minute })
	a := k.session(r)
	streams := make([]*agent, silent)
	for i := range streams {
		streams[i] = a.again()
		k.connect(streams[i], r.AgentAddr(), true)
	}
	closed := func() int {
		n := 0
		for _, s := range streams {
			select {
			case err := <-s.ended:
				s.ended <- err
				n++
			default:
			}
		}
		return n
	}
	testkit.Eventually(t, patience, func() error {
		if n := closed(); n < silent-bound {
			return fmt.Errorf("%d of %d are closed", n, silent-bound)
		}
		return nil
	})
	a = a.again()
	k.connect(a, r.AgentAddr(), true)
	a.open()
	if n := closed(); n > silent-bound+1 {
		t.Errorf("%d of %d are closed", n, silent)
	}
}
