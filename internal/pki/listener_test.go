package pki_test

import (
	"crypto/tls"
	"fmt"
	"net"
	"sync/atomic"
	"testing"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestASilentClientBlocksNoOther: silent connections far above the limit push out each other. Scenario: D03.
func TestASilentClientBlocksNoOther(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	inner, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	config, err := pki.ServerTLS(pki.ServerConfig{Store: newAuthority(t, "services").issue(t,
		pki.ServiceID(td, "recovery"), nil), TrustDomain: td})
	if err != nil {
		t.Fatal(err)
	}
	var overload, other, finished atomic.Int64
	l, err := pki.NewListener(ctx, inner, pki.ListenerConfig{
		TLS: config, MaxHandshakes: 8, OnHandshake: func() { finished.Add(1) },
		OnReject: func(r pki.Reject) {
			if r.Reason == pki.RejectOverload {
				overload.Add(1)
			} else {
				other.Add(1)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	const crowd, good = 100, 20
	silent := make([]net.Conn, 0, crowd)
	spoken := finished.Load()
	for i := range crowd {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		silent = append(silent, conn)
		if i%(crowd/good) != 0 {
			continue
		}
		// whom it trusts is not the question here
		speaks, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}).DialContext(ctx, "tcp", l.Addr().String())
		if err != nil {
			t.Fatalf("beside %d silent ones: %v", len(silent), err)
		}
		_ = speaks.Close()
		// The client finishes its handshake before the server, which on a busy machine may still be at it when nine more have
		// come.
		spoken++
		testkit.Eventually(t, testkit.Patience, func() error {
			if finished.Load() != spoken {
				return fmt.Errorf("%d of %d handshakes finished", finished.Load(), spoken)
			}
			return nil
		})
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if got := overload.Load(); got < crowd-8 || got > crowd || other.Load() != 0 {
			return fmt.Errorf("%d are counted as overload and %d otherwise", got, other.Load())
		}
		return nil
	})
	for _, conn := range silent {
		_ = conn.Close()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	<-served
}
