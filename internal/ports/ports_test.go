package ports_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestCheckNamesFlagAndHolder(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = ports.Check(ctx, "--console-addr", l.Addr().String())
	var inUse *ports.InUseError
	if !errors.As(err, &inUse) {
		t.Fatalf("Check = %v", err)
	}
	if inUse.PID != os.Getpid() {
		t.Errorf("held by %d, want %d", inUse.PID, os.Getpid())
	}
	if !strings.Contains(err.Error(), "--console-addr") || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("text %q", err)
	}
}

func TestCheckRefusesWhatIsNoAddress(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	for _, addr := range []string{"", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x"} {
		if err := ports.Check(ctx, "--node-addr", addr); err == nil || !strings.Contains(err.Error(), "--node-addr") {
			t.Errorf("Check(%q) = %v", addr, err)
		}
	}
	if err := ports.Check(ctx, "--node-addr", "127.0.0.1:0"); err != nil {
		t.Error(err)
	}
}

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
		if err := ports.Check(ctx, "", addr); err != nil {
			t.Error(err)
		}
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
