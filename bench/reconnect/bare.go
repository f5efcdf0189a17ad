package reconnect

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pki"
)

// The baseline is a mutual-TLS handshake with nodeapi's configuration and nothing else: the server sends one byte when
// it has verified the client, and both keep the connection. A client waits between its tries as an agent does.

// listen serves bare handshakes until ctx ends.
func listen(ctx context.Context, cfg serverConfig) error {
	store, err := pki.LoadStore(cfg.Identity, cfg.Identity)
	if err != nil {
		return fmt.Errorf("load certificate: %w", err)
	}
	nodes, err := pki.LoadBundle(cfg.NodeRoots)
	if err != nil {
		return fmt.Errorf("load roots: %w", err)
	}
	conf, err := pki.ServerTLS(pki.ServerConfig{
		Store: store, TrustDomain: cfg.TrustDomain, NextProtos: []string{"h2"},
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: nodes}},
	})
	if err != nil {
		return fmt.Errorf("build TLS: %w", err)
	}
	lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Addr)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = lis.Close() })
	go func() { // ends with the process, whose only work it is
		for {
			raw, err := lis.Accept()
			if err != nil {
				return
			}
			go serveBare(ctx, tls.Server(raw, conf))
		}
	}()
	return nil
}

// serverHandshake bounds a handshake as nodeapi does.
const serverHandshake = 9 * time.Second

func serveBare(ctx context.Context, conn *tls.Conn) {
	defer conn.Close()
	shake, cancel := context.WithTimeout(ctx, serverHandshake)
	err := conn.HandshakeContext(shake)
	cancel()
	if err != nil {
		return
	}
	if _, err := conn.Write([]byte{0}); err != nil {
		return
	}
	_, _ = conn.Read(make([]byte, 1)) // until the client is gone
}

// client is one bare client.
type client struct {
	place    *place
	conf     *tls.Config
	timeouts int // in a row
}

// startClient starts a client that keeps a connection.
func startClient(ctx context.Context, n node, p *place) error {
	cert, err := tls.X509KeyPair(n.Chain, n.Key)
	if err != nil {
		return fmt.Errorf("read certificate: %w", err)
	}
	roots, err := pki.LoadBundle(p.fleet.Roots)
	if err != nil {
		return fmt.Errorf("read roots: %w", err)
	}
	store, err := pki.NewStore(cert.PrivateKey, cert.Certificate)
	if err != nil {
		return err
	}
	conf, err := pki.ClientTLS(pki.ClientConfig{
		Store: store, Roots: roots, Server: pki.ServiceID(p.fleet.TrustDomain, "nodeapi"), NextProtos: []string{"h2"},
	})
	if err != nil {
		return err
	}
	c := &client{place: p, conf: conf}
	p.load.wg.Go(func() { c.run(ctx) })
	return nil
}

// run keeps a connection until ctx ends. Its waits are those of an agent's session.
func (c *client) run(ctx context.Context) {
	cfg := session.Config{}.WithDefaults()
	retry, losses := backoff.New(cfg.Backoff), backoff.New(cfg.Backoff)
	for {
		var wait time.Duration
		conn, err := c.open(ctx, cfg)
		if err != nil {
			c.place.failedWith(err.Error())
		}
		switch {
		case err == nil:
			c.timeouts = 0
			retry.Reset()
			c.place.isBack()
			began := time.Now()
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			_, _ = conn.Read(make([]byte, 1)) // until the server is gone
			stop()
			_ = conn.Close()
			if time.Since(began) >= cfg.StableAfter {
				losses.Reset()
			}
			wait = losses.Next(0)
		case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded):
			if c.timeouts++; c.timeouts <= quickRound {
				wait = retry.Jitter(500 * time.Millisecond)
			} else {
				wait = retry.Next(0)
			}
		default:
			wait = retry.Next(0)
		}
		if !app.Sleep(ctx, wait) {
			return
		}
	}
}

// quickRound is how many opens that timed out an agent repeats at once where a name has few addresses.
const quickRound = 3

// open makes a connection, and returns it when the server has verified the client. Its phases have the bounds of an
// agent's, which double with each round of timeouts.
func (c *client) open(ctx context.Context, cfg session.Config) (*tls.Conn, error) {
	bound := func(limit time.Duration) time.Duration {
		for range c.timeouts / quickRound {
			limit *= 2
		}
		return min(limit, cfg.OpenTimeout)
	}
	dial, cancel := context.WithTimeout(ctx, bound(cfg.ConnectTimeout))
	defer cancel()
	raw, err := c.place.reach(dial)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, c.conf)
	shake, done := context.WithTimeout(ctx, bound(cfg.HandshakeTimeout))
	defer done()
	err = conn.HandshakeContext(shake)
	if err == nil {
		_ = conn.SetReadDeadline(time.Now().Add(bound(cfg.WelcomeTimeout)))
		_, err = io.ReadFull(conn, make([]byte, 1))
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, conn.SetReadDeadline(time.Time{})
}
