package client_test

import (
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestWhatWasReachedInstead: the error names what answers at the address instead of the API, with what to do, and a
// wait ends at once.
func TestWhatWasReachedInstead(t *testing.T) {
	mine := rpctest.NewAuthorities(t)
	serve := func(a *rpctest.Authorities, service string, nodes bool) string {
		config := a.ServerTLS(t, service)
		config.Clients = nil
		if nodes {
			config.Clients = []pki.Trust{{Kind: pki.KindNode, Bundle: a.ServiceRoots}}
		}
		server, err := port.New(t.Context(), port.Deps{Logger: testkit.Logger(t)},
			port.Config{Name: service, Addr: "127.0.0.1:0", TLS: config})
		if err != nil {
			t.Fatal(err)
		}
		rpctest.Run(t, server)
		return server.Addr().String()
	}
	listen := func() net.Listener {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	web := &http.Server{Handler: http.NotFoundHandler()} // for one test
	plain := listen()
	go func() { _ = web.Serve(plain) }()
	t.Cleanup(func() { _ = web.Close() })
	other := listen() // accepts connections, and does not speak TLS
	go func() {
		for {
			conn, err := other.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("-ERR unknown command\r\n"))
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = other.Close() })

	path := filepath.Join(t.TempDir(), "contexts.yaml")
	isolate(t, path)
	if err := contexts.Put(path, contexts.Context{
		Name: "mine", Server: "127.0.0.1:1", TrustDomain: rpctest.TrustDomain, CAPEM: string(mine.ServiceRoots.PEM()),
		Token: token,
	}, true); err != nil {
		t.Fatal(err)
	}
	readmodel := serve(mine, "readmodel", false)
	for _, tt := range []struct {
		name, server string
		flags        string
		want, hint   string
	}{
		{
			"the node port", serve(mine, "nodeapi", true), "",
			"was reached, but another service of the mesh listens there: nodeapi", "name the address of the API with --server",
		},
		{
			"the enrolment port", serve(mine, "recovery", false), "",
			"was reached, but another service of the mesh listens there: recovery", "name the address of the API with --server",
		},
		{
			"another trust domain", readmodel, "--trust-domain elsewhere.test",
			`it belongs to the trust domain "mesh.test", and "elsewhere.test" was expected`, "--trust-domain",
		},
		{
			"another authority", serve(rpctest.NewAuthorities(t), "readmodel", false), "",
			"its certificate is not from the authority that is trusted here", "--ca-file",
		},
		{
			"plain HTTP", plain.Addr().String(), "", "it speaks plain HTTP, without TLS",
			"name the address of the API with --server",
		},
		{"no TLS at all", other.Addr().String(), "", "it does not speak TLS", "name the address of the API with --server"},
		{"nobody", "127.0.0.1:1", "", "127.0.0.1:1 cannot be reached", "start the mesh"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			line := append([]string{"status", "--server", tt.server}, strings.Fields(tt.flags)...)
			got := call(t, line...).wants(t, 1)
			hint := got.err[strings.Index(got.err, "\n")+1:]
			if !strings.Contains(got.err, tt.want) || !strings.HasPrefix(hint, "  hint: ") || !strings.Contains(hint, tt.hint) {
				t.Errorf("printed %s", got.err)
			}
			if tt.name == "nobody" {
				return
			}
			if strings.Contains(got.err, "cannot be reached") || strings.Contains(got.err, "retry after") {
				t.Errorf("printed %s", got.err)
			}
			line = append([]string{"workspaces", "wait", "demo2", "--timeout", "0s", "--server", tt.server},
				strings.Fields(tt.flags)...)
			call(t, line...).wants(t, 1)
		})
	}
}
