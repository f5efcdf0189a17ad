package journald_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/diag/journald"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func listen(t *testing.T) (*net.UnixConn, string) {
	t.Helper()
	testkit.IO(t)
	dir, err := os.MkdirTemp("", "j") //nolint:usetesting // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, path
}

func TestAnEntryIsOneDatagram(t *testing.T) {
	conn, path := listen(t)
	err := journald.Write(path, journald.Warning, "edge_rate_limited: 429",
		journald.Field{Name: "GPUAAS_COUNT", Value: "3"}, journald.Field{Name: "GPUAAS_NONE"},
		journald.Field{Name: "GPUAAS_DETAIL", Value: "a\nb"})
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1<<16)
	n, err := conn.Read(got)
	if err != nil {
		t.Fatal(err)
	}
	want := "MESSAGE=edge_rate_limited: 429\nPRIORITY=4\nSYSLOG_IDENTIFIER=gpuaas-node-agent\nGPUAAS_COUNT=3\n" +
		"GPUAAS_DETAIL\n" +
		string(binary.LittleEndian.AppendUint64(nil, 3)) + "a\nb\n"
	if !bytes.Equal(got[:n], []byte(want)) {
		t.Errorf("%q", got[:n])
	}
}

// A host without a journal, and a journal that reads nothing, cost nothing.
func TestNoJournalIsNoError(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", filepath.Join(dir, "none"), filepath.Join(file, "below"), file} {
		if err := journald.Write(path, journald.Info, "x"); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	_, path := listen(t)
	done := make(chan error, 1)
	go func() {
		for range 10000 { // more than a socket queues
			if err := journald.Write(path, journald.Info, strings.Repeat("x", 1000)); err != nil {
				done <- err
				return
			}
		}
		done <- journald.Write(path, journald.Info, strings.Repeat("x", 1<<20))
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("a full journal blocks")
	}
}
