package transport

import (
	"bytes"
	"crypto/sha256"
	"net"

	"golang.org/x/net/http2"
)

// What TLS and grpc write while a connection is opened is followed at once by something else, which waits for nothing
// from the server. Each write costs a system call and a packet here, and a read and often a wake-up at the server. So
// such a write is held back, and goes with the next one. After an outage a replica opens thousands of connections.

// gathered is the connection below TLS. It holds back the client's last flight of the handshake, which grpc's preface
// follows.
type gathered struct {
	net.Conn

	held []byte
	over bool // the flight was written
}

// Write is called by one goroutine at a time: crypto/tls writes under a lock.
func (c *gathered) Write(p []byte) (int, error) {
	if !c.over && isLastFlight(p) {
		c.over = true
		c.held = append(make([]byte, 0, len(p)+roomForPreface), p...)
		return len(p), nil
	}
	if c.held == nil {
		return c.Conn.Write(p)
	}
	held := c.held
	c.held = nil
	return joined(c.Conn, held, p)
}

// roomForPreface is what grpc's preface and settings take as a record.
const roomForPreface = 128

// isLastFlight reports whether a write of crypto/tls is the client's last flight of TLS 1.3: a change of ciphers, which
// means nothing, and encrypted records with a Finished. A second ClientHello, for which the server waits, follows such
// a change too, but is not encrypted. So does the alert of a client that refuses the server, after which nothing is
// written; its record is shorter than one with a Finished.
func isLastFlight(p []byte) bool {
	const (
		changeCipherSpec, encrypted = 20, 23
		change                      = 6
		leastFinished               = 5 + 4 + sha256.Size + 1 + 16 // record header, message header, type, tag
	)
	return len(p) >= change+leastFinished && p[0] == changeCipherSpec && p[change] == encrypted
}

// settingsAck is the frame with which a client acknowledges the server's settings.
var settingsAck = []byte{0, 0, 0, byte(http2.FrameSettings), byte(http2.FlagSettingsAck), 0, 0, 0, 0}

// beginning holds back, of what grpc writes when a connection begins, the preface, which its settings follow, and the
// acknowledgement of the server's settings, which the first stream follows.
type beginning struct {
	held   []byte
	writes int // that were not held back
}

// write writes p to conn, or holds it back. It is called by one goroutine at a time.
func (b *beginning) write(conn net.Conn, p []byte) (int, error) {
	const settingsAndStream = 2
	switch {
	case b.writes >= settingsAndStream:
		return conn.Write(p)
	case string(p) == http2.ClientPreface, bytes.Equal(p, settingsAck):
		b.held = append(b.held, p...)
		return len(p), nil
	}
	b.writes++
	held := b.held
	b.held = nil
	if len(held) == 0 {
		return conn.Write(p)
	}
	return joined(conn, held, p)
}

// joined writes what was held back and p, and returns how much of p was written.
func joined(conn net.Conn, held, p []byte) (int, error) {
	n, err := conn.Write(append(held, p...))
	return max(n-len(held), 0), err
}
