package nodeapi

import (
	"net"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
)

// TestThePortIsClosedUntilItIsServed checks that a port which is configured refuses connections until listen is called,
// and that one which the system chooses is known at once.
func TestThePortIsClosedUntilItIsServed(t *testing.T) {
	testkit.IO(t)
	chosen, err := openPort(t.Context(), "127.0.0.1:0")
	if err != nil || chosen.lis == nil || chosen.addr.Port == 0 {
		t.Fatalf("%+v, %v", chosen, err)
	}
	chosen.close() // its port is free now
	p, err := openPort(t.Context(), chosen.addr.String())
	if err != nil || p.addr.String() != chosen.addr.String() {
		t.Fatalf("%+v, %v", p, err)
	}
	defer p.close()
	dial := func() error {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", p.addr.String())
		if err == nil {
			_ = conn.Close()
		}
		return err
	}
	if err := dial(); err == nil {
		t.Error("the port accepts before it is served")
	}
	if err := p.listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := dial(); err != nil {
		t.Error(err)
	}
	for _, wrong := range []string{"127.0.0.1", "127.0.0.1:none", "127.0.0.1:70000"} {
		if _, err := openPort(t.Context(), wrong); err == nil {
			t.Errorf("the address %q is accepted", wrong)
		}
	}
}
