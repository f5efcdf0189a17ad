package process_test

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// meeting lets requests wait until all that it expects have come.
type meeting struct {
	mu      sync.Mutex
	expects int // 0: none waits
	all     chan struct{}
}

func (m *meeting) begin(expects int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expects, m.all = expects, make(chan struct{})
}

func (m *meeting) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	if m.expects == 0 {
		m.mu.Unlock()
		return
	}
	if m.expects--; m.expects == 0 {
		close(m.all)
	}
	all := m.all
	m.mu.Unlock()
	select {
	case <-all:
	case <-r.Context().Done():
	}
}

// Workloads are probed at once: one that lets its probe wait delays the observation of no other. Here no probe is
// answered before all have come.
func TestProbesDoNotWaitForEachOther(t *testing.T) {
	g := newRig(t, host(t), true)
	m := &meeting{}
	server := httptest.NewServer(m)
	t.Cleanup(server.Close)
	address, err := netip.ParseAddrPort(strings.TrimPrefix(server.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"one", "three", "two"}
	for _, name := range names {
		w := sh(name, "exec sleep 600")
		w.Ports = []*nodev1.Port{{Name: "http", Port: int32(address.Port())}}
		w.Readiness = &nodev1.Readiness{HttpPath: "/", Timeout: durationpb.New(10 * time.Second)}
		if st := g.deploy(w); !st.GetReady() {
			t.Fatalf("deployed: %v", st)
		}
	}
	m.begin(len(names))
	seen := g.Observe(g.ctx)[workspaceA]
	if len(seen) != len(names) {
		t.Fatalf("observed are %v", seen)
	}
	for i, st := range seen {
		if st.GetName() != names[i] || !st.GetReady() {
			t.Errorf("%s is %v", names[i], st)
		}
	}
}
