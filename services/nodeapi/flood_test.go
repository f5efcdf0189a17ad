package nodeapi_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"regexp"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi"
)

// mostGrowth is the growth of the heap in bytes that a flood may cost, including the test's own side.
const mostGrowth = 20 << 20

// counter reads one series of a replica's metrics, by the end of its name and its labels.
func (k *kit) counter(r *replica, name, labels string) float64 {
	k.t.Helper()
	req, err := http.NewRequestWithContext(k.t.Context(), http.MethodGet, "http://"+r.OpsAddr()+"/metrics", http.NoBody)
	if err != nil {
		k.t.Fatal(err)
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		k.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		k.t.Fatal(err)
	}
	m := regexp.MustCompile(name + `\{[^}]*` + regexp.QuoteMeta(labels) + `[^}]*\} ([0-9.e+]+)`).FindSubmatch(body)
	if m == nil {
		return 0
	}
	value, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		k.t.Fatal(err)
	}
	return value
}

// peak watches the live heap until stop is called, which returns its greatest growth in bytes.
func peak(t *testing.T) (stop func() int64) {
	t.Helper()
	read := func() int64 {
		// The sample is that of the last collection: garbage since then is not counted.
		sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
		metrics.Read(sample)
		return int64(sample[0].Value.Uint64()) // bytes of a heap
	}
	runtime.GC()
	before, most := read(), int64(0)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				runtime.GC() // live objects count, not those that wait to be collected
				most = max(most, read()-before)
			}
		}
	})
	return func() int64 {
		cancel()
		wg.Wait()
		return most
	}
}

// raw is an HTTP/2 connection of which the test writes every frame.
type raw struct {
	conn   *tls.Conn
	framer *http2.Framer
	goAway chan http2.ErrCode
	over   chan struct{} // closed when the server has ended a stream
	ended  chan struct{} // closed when the server has closed the connection
}

// raw connects as a node does and sends the preface. If read is true the server's frames are read.
func (k *kit) raw(a *agent, addr string, read bool) *raw {
	k.t.Helper()
	conf, err := k.clientTLS(a.cert)
	if err != nil {
		k.t.Fatal(err)
	}
	conn, err := (&tls.Dialer{Config: conf}).DialContext(k.t.Context(), "tcp", addr)
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() { _ = conn.Close() })
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		k.t.Fatal(err)
	}
	r := &raw{
		conn: conn.(*tls.Conn), framer: http2.NewFramer(conn, conn), goAway: make(chan http2.ErrCode, 16),
		over: make(chan struct{}), ended: make(chan struct{}),
	}
	if err := r.framer.WriteSettings(); err != nil {
		k.t.Fatal(err)
	}
	if read {
		over := sync.OnceFunc(func() { close(r.over) })
		go func() {
			defer close(r.ended)
			defer over()
			for {
				f, err := r.framer.ReadFrame()
				if err != nil {
					return
				}
				switch f := f.(type) {
				case *http2.GoAwayFrame:
					select {
					case r.goAway <- f.ErrCode:
					default:
					}
				case *http2.RSTStreamFrame:
					over()
				case *http2.HeadersFrame:
					if f.StreamEnded() {
						over()
					}
				}
			}
		}()
	}
	return r
}

// headers returns the encoded headers of an agent's stream, with more added.
func headers(more ...hpack.HeaderField) []byte {
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for _, f := range slices.Concat([]hpack.HeaderField{
		{Name: ":method", Value: "POST"},
		{Name: ":scheme", Value: "https"},
		{Name: ":path", Value: nodev1.NodeService_Connect_FullMethodName},
		{Name: ":authority", Value: "nodeapi"},
		{Name: "content-type", Value: "application/grpc"},
		{Name: "te", Value: "trailers"},
	}, more) {
		_ = e.WriteField(f) // a buffer takes everything
	}
	return block.Bytes()
}

// TestFloodsEndTheirOwnConnection: a client that floods the port with a node's certificate loses its connection, or is
// slowed down; other agents are not affected. Scenario: D01, D02.
func TestFloodsEndTheirOwnConnection(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	bystander := k.session(r)
	const frames = 100_000
	many := make([]hpack.HeaderField, 0, frames)
	for i := range frames {
		many = append(many, hpack.HeaderField{Name: "k" + strconv.Itoa(i), Value: "v"})
	}
	continued := func(c *raw, block []byte, end bool) error {
		const part = 16 << 10
		first := block[:min(part, len(block))]
		if err := c.framer.WriteHeaders(http2.HeadersFrameParam{
			StreamID: 1, BlockFragment: first,
			EndHeaders: false,
		}); err != nil {
			return err
		}
		for rest := block[len(first):]; len(rest) > 0; {
			n := min(part, len(rest))
			if err := c.framer.WriteContinuation(1, end && n == len(rest), rest[:n]); err != nil {
				return err
			}
			rest = rest[n:]
		}
		return nil
	}
	for _, flood := range []struct {
		name  string
		flood func(c *raw) error // writes the flood until the server ends the connection
		stays bool               // the flood costs the server nothing, so the connection may stay
	}{
		{name: "rapid reset", flood: func(c *raw) error {
			block := headers()
			for i := range uint32(frames) {
				if err := c.framer.WriteHeaders(http2.HeadersFrameParam{
					StreamID: 2*i + 1, BlockFragment: block,
					EndHeaders: true,
				}); err != nil {
					return err
				}
				if err := c.framer.WriteRSTStream(2*i+1, http2.ErrCodeCancel); err != nil {
					return err
				}
			}
			return nil
		}},
		{name: "pings", flood: func(c *raw) error {
			for range frames {
				if err := c.framer.WritePing(false, [8]byte{1}); err != nil {
					return err
				}
			}
			return nil
		}},
		{name: "settings", stays: true, flood: func(c *raw) error {
			for range frames {
				if err := c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 16}); err != nil {
					return err
				}
			}
			return nil
		}},
		{name: "100,000 keys of metadata", flood: func(c *raw) error { return continued(c, headers(many...), true) }},
		{name: "one header of a megabyte", flood: func(c *raw) error {
			return continued(c, headers(hpack.HeaderField{Name: "k", Value: strings.Repeat("v", 1<<20)}), true)
		}},
		{name: "headers that never end", flood: func(c *raw) error {
			block := headers(many[:1000]...)
			for {
				if err := continued(c, block, false); err != nil {
					return err
				}
				for range frames {
					if err := c.framer.WriteContinuation(1, false, block[len(block)-64:]); err != nil {
						return err
					}
				}
			}
		}},
		{name: "a frame above the size of frames", flood: func(c *raw) error {
			if err := c.framer.WriteHeaders(http2.HeadersFrameParam{
				StreamID: 1, BlockFragment: headers(),
				EndHeaders: true,
			}); err != nil {
				return err
			}
			for {
				if err := c.framer.WriteData(1, false, make([]byte, 1<<20)); err != nil {
					return err
				}
			}
		}},
	} {
		t.Run(flood.name, func(t *testing.T) {
			k.t, bystander.t = t, t
			goroutines := runtime.NumGoroutine()
			grown := peak(t)
			c := k.raw(k.node(), r.AgentAddr(), true)
			flooded := make(chan error, 1)
			go func() { flooded <- flood.flood(c) }()
			var took []time.Duration
			most := 0
			deadline := time.Now().Add(patience)
			for i, over := int64(1), false; !over; i++ {
				select {
				case <-time.After(250 * time.Millisecond): // heartbeats that come faster are answered together
				case <-t.Context().Done():
				}
				began := time.Now()
				bystander.send(beat(i))
				bystander.next("an answer to the bystander",
					func(f *nodev1.ConnectResponse) bool { return f.GetHeartbeatAck().GetSequence() == i })
				took, most = append(took, time.Since(began)), max(most, runtime.NumGoroutine()-goroutines)
				select {
				case err := <-flooded:
					if flooded <- err; flood.stays {
						over = true
					}
				case <-c.ended:
					over = true
				default:
				}
				if time.Now().After(deadline) {
					t.Fatal("the connection stands")
				}
			}
			select {
			case code := <-c.goAway:
				t.Logf("sent away with %s", code) // unless the frame was lost with the connection
			default:
			}
			_ = c.conn.Close()
			<-flooded
			bytes := grown()
			slices.Sort(took)
			middle, slowest := took[len(took)/2], took[len(took)-1]
			t.Logf("the heap grew by %.1f MiB and %d goroutines at most; the bystander's answers took %.0f ms (p50), %.0f ms "+
				"at most", float64(bytes)/(1<<20), most,
				middle.Seconds()*1000, slowest.Seconds()*1000)
			if bytes > mostGrowth {
				t.Errorf("the heap grew by %d MiB", bytes>>20)
			}
			// the peer's half of the flood takes the processors of this test, too
			if middle > 2*time.Second || slowest > patience/2 {
				t.Errorf("the bystander waited %s (p50), %s at most", middle, slowest)
			}
			if most > 64 {
				t.Errorf("%d goroutines more", most)
			}
		})
	}
	k.t, bystander.t = t, t
	if got := k.counter(r, "agent_refusals_total", `reason="rate_limited"`); got < 1 {
		t.Errorf("%.0f refusals of floods are counted", got)
	}
	k.session(r) // the port serves
}

// TestSlowPeersAreClosed: a connection that makes no progress is closed within seconds, and two thousand of them keep
// no agent out. Scenario: D03.
func TestSlowPeersAreClosed(t *testing.T) {
	k := newKit(t)
	r := k.replica(func(c *nodeapi.Config) { c.OpenBurst = 3 })
	addr := r.AgentAddr()
	dial := func() net.Conn {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	ended := func(conn net.Conn) func() {
		return func() { _, _ = io.Copy(io.Discard, conn) }
	}
	// Each kind opens a connection in its own way; the function that it returns waits until the server has closed the
	// connection.
	kinds := []struct {
		name string
		wait func() func()
	}{
		{"TCP and no TLS", func() func() { return ended(dial()) }},
		{"half a ClientHello, byte by byte", func() func() {
			conn := dial()
			return func() {
				for _, b := range append([]byte{22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3}, make([]byte, 500)...) {
					if _, err := conn.Write([]byte{b}); err != nil {
						return
					}
					select { // slowness is what is tested
					case <-t.Context().Done():
						return
					case <-time.After(150 * time.Millisecond): // longer in all than this test waits
					}
				}
			}
		}},
		{"TLS and no preface", func() func() {
			conf, err := k.clientTLS(k.node().cert)
			if err != nil {
				t.Fatal(err)
			}
			conn := tls.Client(dial(), conf)
			if err := conn.HandshakeContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			return ended(conn)
		}},
		// An idle connection is sent GOAWAY, and has five seconds to close.
		{"HTTP/2 and no stream", func() func() {
			c := k.raw(k.node(), addr, true)
			return func() { <-c.ended }
		}},
		{"a stream and no frame", func() func() {
			a := k.node()
			k.connect(a, addr, true)
			return func() { <-a.ended }
		}},
		{"a first frame, byte by byte", func() func() {
			c := k.raw(k.node(), addr, true)
			if err := c.framer.WriteHeaders(http2.HeadersFrameParam{
				StreamID: 1, BlockFragment: headers(),
				EndHeaders: true,
			}); err != nil {
				t.Fatal(err)
			}
			return func() {
				for _, b := range append([]byte{0, 0, 0, 16, 0}, make([]byte, 4096)...) {
					if c.framer.WriteData(1, false, []byte{b}) != nil {
						return
					}
					select {
					case <-c.over:
						return
					case <-time.After(50 * time.Millisecond):
					}
				}
			}
		}},
	}
	grown := peak(t)
	const crowd = 2000
	for range crowd {
		dial()
	}
	var wg sync.WaitGroup
	for _, kind := range kinds {
		wait := kind.wait()
		began := time.Now()
		wg.Go(func() {
			done := make(chan struct{})
			go func() { defer close(done); wait() }()
			select {
			case <-done:
				t.Logf("%s: closed after %.1f s", kind.name, time.Since(began).Seconds())
			case <-time.After(patience):
				t.Errorf("%s: not closed after %s", kind.name, patience)
			}
		})
	}
	began := time.Now()
	for range 100 {
		k.session(r)
	}
	t.Logf("100 agents are admitted beside %d that do not get on within %.1f s", crowd, time.Since(began).Seconds())
	if took := time.Since(began); took > 2*patience {
		t.Errorf("100 agents need %s", took)
	}
	wg.Wait()
	t.Logf("the heap grew by %.1f MiB at most", float64(grown())/(1<<20))
	testkit.Eventually(t, patience, func() error {
		if refused := k.counter(r, "agent_handshakes_refused_total", ""); refused < 1 {
			return fmt.Errorf("%.0f refused handshakes are counted", refused)
		}
		return nil
	})
}

// TestAnOversizeResultChangesNothing: ten megabytes of result end the session with a type, are counted, never held in
// memory and never reported; the next session serves the node as before. Scenario: C12, D01.
func TestAnOversizeResultChangesNothing(t *testing.T) {
	k := newKit(t)
	r := k.replica()
	a := k.session(r)
	task := result(&nodev1.TaskRef{TaskId: ids.New(), Attempt: 1}, nil)
	huge := make([]byte, 10<<20)
	for i := range huge {
		huge[i] = byte(rand.Uint32()) // not to be compressed
	}
	task.GetTaskResult().Output = huge
	frame, reports := task, len(k.backend.Reports())
	grown := peak(t)
	_ = a.stream.Send(frame) // the refusal is read
	// grpc itself refuses the frame before it reads it, so there is only the status code, which agents treat as
	// frame_too_large.
	if err := a.wantEnd(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the stream ended with %v", err)
	}
	// The test's own encoding of the frame counts here, twice at most.
	if bytes := grown(); bytes > 2*10<<20+mostGrowth {
		t.Errorf("the heap grew by %d MiB", bytes>>20)
	}
	testkit.Eventually(t, patience, func() error {
		if got := k.counter(r, "agent_refusals_total", `reason="frame_too_large"`); got != 1 {
			return fmt.Errorf("%.0f refusals are counted", got)
		}
		return nil
	})
	if got := len(k.backend.Reports()); got != reports {
		t.Errorf("%d reports were %d", got, reports)
	}
	again := a.again()
	k.connect(again, r.AgentAddr(), true)
	again.open()
	k.raised(again)
}
