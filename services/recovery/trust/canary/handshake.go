package canary

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
	"github.com/gpuaas/mesh/internal/pki"
)

// The alerts by which a server refuses a client's certificate for its chain (RFC 8446, 6.2).
const (
	alertBadCertificate     = 42
	alertCertificateUnknown = 46
	alertUnknownCA          = 48
)

// quiet is the share of a handshake's time for which the server may speak first. A client that writes at once could
// lose the alert: a server that has refused it answers what it writes with a reset.
const quiet = 3

// Handshake connects to an address as a node with the certificate of cfg.Store would, and returns what that proves,
// with a description. Trusted means that the node API itself was reached with that certificate: the server asked for
// it, accepted it, and refused the stream of the canary as the node API does. An edge that ends TLS before the node
// API, and asks for no certificate or accepts any, proves nothing. In TLS 1.3 the client's side of the handshake is
// done before the server has verified the client's certificate, so a refusal is read after it.
func Handshake(ctx context.Context, address string, cfg pki.ClientConfig, within time.Duration) (
	recoveryv1.HandshakeOutcome, string,
) {
	client, err := pki.ClientTLS(cfg)
	if err != nil {
		return Unproven, err.Error()
	}
	asked := false
	if show := client.GetClientCertificate; show != nil {
		client.GetClientCertificate = func(info *tls.CertificateRequestInfo) (*tls.Certificate, error) {
			asked = true
			return show(info)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	deadline, _ := ctx.Deadline()
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return Unproven, "not reached: " + err.Error()
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	defer raw.Close()
	conn := tls.Client(raw, client)
	if err := conn.HandshakeContext(ctx); err != nil {
		return concluded(err)
	}
	if !asked {
		return Unproven, "it asked for no client certificate: an edge ends TLS there, before the node API"
	}
	begun := &connection{Conn: conn}
	if err := begun.listen(time.Now().Add(time.Until(deadline) / quiet)); err != nil {
		return concluded(err)
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return Unproven, err.Error()
	}
	return connect(ctx, begun)
}

// concluded returns what a failed handshake proves.
func concluded(err error) (recoveryv1.HandshakeOutcome, string) {
	if code, ok := alertOf(err); ok {
		switch code {
		case alertBadCertificate, alertCertificateUnknown, alertUnknownCA:
			return Refused, "it refused the canary certificate: " + tls.AlertError(code).Error()
		}
		return Unproven, "it ended the handshake for another cause: " + tls.AlertError(code).Error()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return Unproven, "it closed the connection and said nothing"
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, net.ErrClosed) {
		return Unproven, "it did not answer in time"
	}
	return Unproven, fmt.Sprintf("the handshake failed: %v", err)
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
