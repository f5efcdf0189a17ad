package edge_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/edge"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAWireKeepsBackWhatItIsTo: bytes are kept back in one direction, passed on in part and then whole, lost at a cut.
func TestAWireKeepsBackWhatItIsTo(t *testing.T) {
	testkit.IO(t)
	behind, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = behind.Close() })
	wire, err := edge.StartWire(t.Context(), behind.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := wire.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	client, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", wire.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	server, err := behind.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	write := func(to net.Conn, text string) {
		t.Helper()
		if _, err := to.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	arrives := func(at net.Conn, want string) {
		t.Helper()
		if err := at.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(at, got); err != nil || string(got) != want {
			t.Fatalf("got %q, %v, want %q", got, err, want)
		}
	}
	kept := func(count func() int64, want int64) {
		t.Helper()
		err := await.Until(t.Context(), "bytes to be kept back", time.Minute, func(context.Context) error {
			if got := count(); got != want {
				return fmt.Errorf("%d are", got)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	write(client, "hello")
	arrives(server, "hello")
	wire.KeepUp(true)
	write(client, "first")
	kept(wire.KeptUp, 5)
	write(client, "second")
	kept(wire.KeptUp, 11)
	write(server, "down")
	arrives(client, "down")
	wire.PassUp(5)
	arrives(server, "first")
	wire.KeepDown(true)
	write(server, "lost")
	kept(wire.KeptDown, 4)
	wire.KeepUp(false)
	arrives(server, "second")
	if n := wire.Connections(); n != 1 {
		t.Errorf("%d connections are open", n)
	}
	wire.Cut()
	if rest, err := io.ReadAll(client); len(rest) > 0 {
		t.Errorf("the client got %q, %v after the cut", rest, err)
	}
}

// TestAWireCutsClientsAlone: the client's end is closed, and the upstream's stands until the wire is closed.
func TestAWireCutsClientsAlone(t *testing.T) {
	testkit.IO(t)
	behind, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer behind.Close()
	wire, err := edge.StartWire(t.Context(), behind.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	client, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", wire.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := behind.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	one := make([]byte, 1)
	if _, err := io.ReadFull(server, one); err != nil { // the connection stands at both ends
		t.Fatal(err)
	}
	wire.CutClients()
	if _, err := client.Read(one); err == nil {
		t.Error("the client reads on")
	}
	read := make(chan error, 1)
	go func() {
		_, err := server.Read(one)
		read <- err
	}()
	if _, err := server.Write([]byte("y")); err != nil { // the wire reads it, and has no client for it
		t.Fatal(err)
	}
	select {
	case err := <-read:
		t.Fatalf("the upstream sees the end of its connection: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if err := wire.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := <-read; err == nil {
		t.Error("the upstream reads on after the end of the wire")
	}
}
