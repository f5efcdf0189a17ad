package inuse_test

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/devstack/inuse"
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
	err = inuse.Check(ctx, "--console-addr", l.Addr().String())
	var taken *inuse.Error
	if !errors.As(err, &taken) {
		t.Fatalf("Check = %v", err)
	}
	if taken.PID != os.Getpid() {
		t.Errorf("held by %d, want %d", taken.PID, os.Getpid())
	}
	if !strings.Contains(err.Error(), "--console-addr") || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("text %q", err)
	}
}

func TestCheckRefusesWhatIsNoAddress(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	for _, addr := range []string{"", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x"} {
		if err := inuse.Check(ctx, "--node-addr", addr); err == nil || !strings.Contains(err.Error(), "--node-addr") {
			t.Errorf("Check(%q) = %v", addr, err)
		}
	}
	if err := inuse.Check(ctx, "--node-addr", "127.0.0.1:0"); err != nil {
		t.Error(err)
	}
}
