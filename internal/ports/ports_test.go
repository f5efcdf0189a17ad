package ports_test

import (
	"fmt"
	"net"
	"os"
	"testing"

	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestFreeAnswersEachOnce(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	got, err := ports.Free(ctx, 20)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, addr := range got {
		if seen[addr] {
			t.Errorf("%s twice", addr)
		}
		seen[addr] = true
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		if err != nil {
			t.Error(err)
			continue
		}
		_ = l.Close()
	}
}

func TestFreeStaysClearOfOutgoingConnections(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Fatal(err)
	}
	var from, to int
	if _, err := fmt.Sscan(string(text), &from, &to); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		port, err := ports.Pick(ctx, "")
		if err != nil {
			t.Fatal(err)
		}
		if port >= from && port <= to {
			t.Errorf("port %d is one that the kernel gives to outgoing connections, %d-%d", port, from, to)
		}
		// The reservation is machine-wide: its socket is taken, and free again after the release.
		name := fmt.Sprintf("@gpuaas-port-%d", port)
		if l, err := (&net.ListenConfig{}).Listen(ctx, "unix", name); err == nil {
			t.Errorf("port %d is not reserved", port)
			_ = l.Close()
		}
		ports.Release(port)
		l, err := (&net.ListenConfig{}).Listen(ctx, "unix", name)
		if err != nil {
			t.Errorf("port %d stays reserved: %v", port, err)
			continue
		}
		_ = l.Close()
	}
}
