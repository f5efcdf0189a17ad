package trust

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
)

// The outcomes of a handshake.
const (
	trusted  = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_TRUSTED
	refused  = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_REFUSED
	unproven = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_UNPROVEN
)

// The alerts by which a server refuses a client's certificate for its chain (RFC 8446, 6.2).
const (
	alertBadCertificate     = 42
	alertCertificateUnknown = 46
	alertUnknownCA          = 48
)

// preface begins an HTTP/2 connection of a client: the magic, and an empty SETTINGS frame.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// quiet is the share of a handshake's time for which the server may speak first. A client that writes at once could
// lose the alert: a server that has refused it answers what it writes with a reset.
const quiet = 3

// told returns the host:port of the node API that agents are told, which read it in the same way.
func (p *Preflight) told() string {
	told := p.deps.Address()
	if address, err := config.HostPort(told); err == nil {
		return address
	}
	return told // of no form that agents take: the check says that it is not reached
}

// toldRoots returns the roots by which agents verify the address that they are told.
func (p *Preflight) toldRoots() *pki.Bundle {
	if p.deps.Told != nil {
		if roots := p.deps.Told(); roots != nil {
			return roots
		}
	}
	return p.deps.Services
}

// handshake connects to an address as a node with the certificate of cfg.Store would, and returns what that proves,
// with a description. In TLS 1.3 the client's side of the handshake is done before the server has verified the client's
// certificate, so only the first bytes that the server sends prove that it was accepted.
func handshake(ctx context.Context, address string, cfg pki.ClientConfig, within time.Duration) (
	recoveryv1.HandshakeOutcome, string,
) {
	client, err := pki.ClientTLS(cfg)
	if err != nil {
		return unproven, err.Error()
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	deadline, _ := ctx.Deadline()
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return unproven, "not reached: " + err.Error()
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	defer raw.Close()
	conn := tls.Client(raw, client)
	if err := conn.HandshakeContext(ctx); err != nil {
		return concluded(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(time.Until(deadline) / quiet)); err != nil {
		return unproven, err.Error()
	}
	one := make([]byte, 1)
	_, err = conn.Read(one)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// An ingress that waits for the client to speak first.
		if err := conn.SetDeadline(deadline); err != nil {
			return unproven, err.Error()
		}
		if _, err := io.WriteString(conn, preface); err != nil {
			return concluded(err)
		}
		_, err = conn.Read(one)
	}
	if err != nil {
		return concluded(err)
	}
	return trusted, "it accepted the canary certificate"
}

// concluded returns what a failed handshake proves.
func concluded(err error) (recoveryv1.HandshakeOutcome, string) {
	if code, ok := alertOf(err); ok {
		switch code {
		case alertBadCertificate, alertCertificateUnknown, alertUnknownCA:
			return refused, "it refused the canary certificate: " + tls.AlertError(code).Error()
		}
		return unproven, "it ended the handshake for another cause: " + tls.AlertError(code).Error()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return unproven, "it closed the connection and said nothing"
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, net.ErrClosed) {
		return unproven, "it did not answer in time"
	}
	return unproven, fmt.Sprintf("the handshake failed: %v", err)
}

// alertOf returns the code of the alert that a peer has sent. crypto/tls reports it as a network error of the operation
// `remote error`, of an unexported type of uint8.
func alertOf(err error) (uint8, bool) {
	operation, ok := errors.AsType[*net.OpError](err)
	if !ok || operation.Op != "remote error" || operation.Err == nil {
		return 0, false
	}
	alert := reflect.ValueOf(operation.Err)
	if alert.Kind() != reflect.Uint8 {
		return 0, false
	}
	return uint8(alert.Uint()), true
}
