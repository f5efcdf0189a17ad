package recovery_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/calls"
)

// TestSlowPeersOfEnrolmentAreClosed: any client can reach this port, and a slow one does not keep its connection;
// machines enrol meanwhile. Scenario: D03.
func TestSlowPeersOfEnrolmentAreClosed(t *testing.T) {
	m := start(t)
	addr := m.service.EnrollAddr()
	dial := func() net.Conn {
		conn, err := (&net.Dialer{}).DialContext(m.ctx, "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	secure := func(protocol string) *tls.Conn {
		conf, err := pki.ClientTLS(pki.ClientConfig{
			Roots: m.authorities.ServiceRoots, Server: pki.ServiceID(m.cfg.TrustDomain, "recovery"),
			NextProtos: []string{protocol},
		})
		if err != nil {
			t.Fatal(err)
		}
		conn := tls.Client(dial(), conf)
		if err := conn.HandshakeContext(m.ctx); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	say := func(conn net.Conn, text string) net.Conn {
		if _, err := io.WriteString(conn, text); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	request := "POST " + recoveryv1connect.EnrollmentServiceEnrollProcedure +
		" HTTP/1.1\r\nHost: recovery\r\nContent-Type: application/proto\r\n"
	read := func(conn net.Conn) func() { return func() { _, _ = io.Copy(io.Discard, conn) } }
	drip := func(conn net.Conn) func() {
		return func() {
			done := make(chan struct{})
			go func() { defer close(done); read(conn)() }()
			for {
				if _, err := conn.Write([]byte{'x'}); err != nil {
					return
				}
				select {
				case <-done:
					return
				case <-time.After(100 * time.Millisecond):
				}
			}
		}
	}
	const within = time.Minute // a minute, for connections to which the server gives seconds
	kinds := []struct {
		name string
		wait func()
	}{
		{"TCP and no TLS", read(dial())},
		{"TLS and no request", read(secure("http/1.1"))},
		{"TLS and no preface", read(secure("h2"))},
		{"HTTP/2 and no stream", read(say(secure("h2"), http2.ClientPreface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00"))},
		{"headers, byte by byte", drip(say(secure("http/1.1"), request+"X: "))},
		{"a body, byte by byte", drip(say(secure("http/1.1"), request+"Content-Length: 60000\r\n\r\n"))},
	}
	for range 1000 {
		dial()
	}
	var wg sync.WaitGroup
	for _, kind := range kinds {
		began := time.Now()
		wg.Go(func() {
			done := make(chan struct{})
			go func() { defer close(done); kind.wait() }()
			select {
			case <-done:
				t.Logf("%s: closed after %.1f s", kind.name, time.Since(began).Seconds())
			case <-time.After(within):
				t.Errorf("%s: not closed after %s", kind.name, within)
			}
		})
	}
	began := time.Now()
	for i := range 10 {
		m.enrol(t, fmt.Sprintf("node-%d", i))
	}
	t.Logf("10 machines enrol beside 1000 that do not get on within %.1f s", time.Since(began).Seconds())
	wg.Wait()
}

// enrol issues a token for one machine and redeems it for a certificate.
func (m *mesh) enrol(t *testing.T, name string) {
	t.Helper()
	console, url := m.client("readmodel")
	people := recoveryv1connect.NewIdentityServiceClient(console, url,
		calls.Options(calls.Config{Asserter: m.asserter})...)
	bundle, err := people.IssueBootstrap(m.asPerson("operator"), &recoveryv1.IssueBootstrapRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.enrolment(t).Enroll(m.ctx, &recoveryv1.EnrollRequest{Token: bundle.GetToken(), Csr: csr}); err != nil {
		t.Fatal(err)
	}
}

func (m *mesh) enrolment(t *testing.T) recoveryv1connect.EnrollmentServiceClient {
	t.Helper()
	return recoveryv1connect.NewEnrollmentServiceClient(m.authorities.Client(t, "recovery", nil),
		"https://"+m.service.EnrollAddr(),
		calls.Options(calls.Config{MaxSendBytes: 64 << 20})...)
}

// TestOversizeEnrolmentIsRefused: a request that is too large is refused with a reason before it is read, and the port
// goes on serving. Scenario: D01, D05.
func TestOversizeEnrolmentIsRefused(t *testing.T) {
	m := start(t)
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		t.Fatal(err)
	}
	enrolment := m.enrolment(t)
	if _, err := enrolment.Enroll(m.ctx,
		&recoveryv1.EnrollRequest{
			Token: strings.Repeat("x", 10<<20),
			Csr:   csr,
		}); fault.ReasonOf(err) != commonv1.Reason_REASON_FRAME_TOO_LARGE {
		t.Errorf("ten megabytes of token: %v", err)
	}
	if _, err := enrolment.Enroll(m.ctx,
		&recoveryv1.EnrollRequest{
			Token: strings.Repeat("x", 32<<10),
			Csr:   csr,
		}); fault.ReasonOf(err) != commonv1.Reason_REASON_INVALID_ARGUMENT {
		t.Errorf("a token above its bound: %v", err)
	}
	// A megabyte of headers never becomes a request.
	machine := m.authorities.Client(t, "recovery", nil)
	req, err := http.NewRequestWithContext(m.ctx, http.MethodPost,
		"https://"+m.service.EnrollAddr()+recoveryv1connect.EnrollmentServiceEnrollProcedure, bytes.NewReader(nil))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/proto")
	req.Header.Set("X-Padding", strings.Repeat("x", 1<<20))
	ctx, cancel := context.WithTimeout(m.ctx, time.Minute)
	defer cancel()
	if resp, err := machine.Do(req.WithContext(ctx)); err == nil {
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("a megabyte of headers is answered %s", resp.Status)
		}
	}
	m.enrol(t, "node-1")
}
