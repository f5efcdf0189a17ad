package host_test

import (
	"net"
	"os"
	"testing"

	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestConnectionsOfThisProcess(t *testing.T) {
	testkit.IO(t)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	addr := listener.Addr().String()
	expect := func(when string, want int) {
		t.Helper()
		if got, err := host.Connections(os.Getpid(), addr); err != nil || got != want {
			t.Errorf("%s: %d connections, %v; want %d", when, got, err, want)
		}
	}
	expect("before", 0)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	expect("connected", 1)
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	expect("closed", 0)
	if _, err := host.Connections(os.Getpid(), "no address"); err == nil {
		t.Error("an address without a port is taken")
	}
}
