package main

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
)

// TestHelpTouchesNothing asks every command for its help, in an environment where any action other than printing fails
// or is noticed: the contexts cannot be read, the home is a file, and the server that they would name counts
// connections. It starts no goroutine that outlives it.
func TestHelpTouchesNothing(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	connected := make(chan net.Addr, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			select {
			case connected <- conn.RemoteAddr():
			default:
			}
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = listener.Close(); <-done })
	dir := t.TempDir()
	home, contexts := filepath.Join(dir, "home"), filepath.Join(dir, "contexts.yaml")
	if err := os.WriteFile(home, []byte("a file, where a directory would be looked into\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Not even root can read a directory as a file.
	if err := os.Mkdir(contexts, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"HOME": home, "XDG_CONFIG_HOME": home, "XDG_STATE_HOME": home, "GPUAAS_CONTEXTS": contexts,
		"GPUAAS_SERVER": "https://" + listener.Addr().String(), "GPUAAS_TOKEN": "no token",
		"HTTPS_PROXY":                 "http://" + listener.Addr().String(),
		"OTEL_EXPORTER_OTLP_ENDPOINT": "http://" + listener.Addr().String(), "GPUAAS_CONFIG": contexts, "PGHOST": home,
		"TERM": "dumb",
	} {
		t.Setenv(name, value)
	}
	before := tree(t, dir)
	// No other test of this package runs in parallel with a test that sets the environment.
	goroutines := runtime.NumGoroutine()
	lines := [][]string{{}, {"help"}, {"--help"}, {"-h"}}
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			words := strings.Fields(sub.CommandPath())[1:]
			lines = append(lines, append(append([]string{}, words...), "--help"), append([]string{"help"}, words...))
			walk(sub)
		}
	}
	walk(newRoot(kit.New()))
	if len(lines) < 100 {
		t.Fatalf("%d command lines", len(lines))
	}
	for _, line := range lines {
		var out, errs bytes.Buffer
		if code := execute(t.Context(), line, nil, &out, &errs); code != 0 || out.Len() == 0 || errs.Len() > 0 {
			t.Errorf("gpuaas %s: exit %d, %d bytes, %s", strings.Join(line, " "), code, out.Len(), errs.String())
		}
		if n := runtime.NumGoroutine(); n > goroutines {
			t.Fatalf("gpuaas %s: %d goroutines, %d before", strings.Join(line, " "), n, goroutines)
		}
	}
	select {
	case from := <-connected:
		t.Errorf("a connection was opened from %s", from)
	default:
	}
	if after := tree(t, dir); after != before {
		t.Errorf("files were written: %s, before %s", after, before)
	}
}

// tree returns the paths in a directory.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		out.WriteString(path + "\n")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}
