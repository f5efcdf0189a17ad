package ports_test

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/ports"
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
