package transport

import (
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"slices"
	"sync"
	"testing"

	"golang.org/x/net/http2"
)

// recorder is a connection that keeps what is written to it, write by write.
type recorder struct {
	net.Conn

	mu     sync.Mutex
	writes []string
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writes = append(r.writes, string(p))
	if r.Conn == nil {
		return len(p), nil
	}
	return r.Conn.Write(p)
}

func (r *recorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.writes)
}

func TestTheBeginningOfAConnectionTakesTwoWrites(t *testing.T) {
	const settings, stream, frame = "settings", "stream", "frame"
	ack := string(settingsAck)
	for name, test := range map[string]struct{ writes, want []string }{
		"each by itself": {
			[]string{http2.ClientPreface, settings, ack, stream, frame},
			[]string{http2.ClientPreface + settings, ack + stream, frame},
		},
		"the acknowledgement with the stream": {
			[]string{http2.ClientPreface, settings, ack + stream, ack, frame},
			[]string{http2.ClientPreface + settings, ack + stream, ack, frame},
		},
		"another client": {[]string{settings, stream, ack}, []string{settings, stream, ack}},
	} {
		r, b := &recorder{}, &beginning{}
		for _, w := range test.writes {
			if n, err := b.write(r, []byte(w)); n != len(w) || err != nil {
				t.Errorf("%s: wrote %d of %d bytes: %v", name, n, len(w), err)
			}
		}
		if !slices.Equal(r.writes, test.want) {
			t.Errorf("%s: wrote %q, want %q", name, r.writes, test.want)
		}
	}
}

// failing is a connection that takes a few bytes and then fails.
type failing struct {
	net.Conn
	takes int
}

var errFailing = errors.New("cut")

func (f failing) Write([]byte) (int, error) { return f.takes, errFailing }

func TestAFailedWriteCountsWhatItHasWrittenOfItsOwn(t *testing.T) {
	for takes, want := range map[int]int{3: 0, len(http2.ClientPreface) + 2: 2} {
		b := &beginning{}
		if _, err := b.write(failing{takes: takes}, []byte(http2.ClientPreface)); err != nil {
			t.Fatal(err)
		}
		if n, err := b.write(failing{takes: takes}, []byte("settings")); n != want || !errors.Is(err, errFailing) {
			t.Errorf("of %d bytes: %d, %v", takes, n, err)
		}
	}
}

// shake does a handshake over a connection that gathers writes and writes once after it. It returns the number of
// writes that reached the wire.
func shake(t *testing.T, server *tls.Config) int {
	t.Helper()
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	served := make(chan error, 1)
	go func() {
		far, err := lis.Accept()
		if err == nil {
			_, err = tls.Server(far, server).Read(make([]byte, 1)) // does the handshake
			_ = far.Close()
		}
		served <- err
	}()
	near, err := new(net.Dialer).DialContext(t.Context(), "tcp", lis.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	wire := &recorder{Conn: near}
	conn := tls.Client(&gathered{Conn: wire}, &tls.Config{
		MinVersion: tls.VersionTLS13, InsecureSkipVerify: true,
	})
	if err := conn.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	return wire.count()
}

// selfSigned returns the configuration of a server with a certificate of its own.
func selfSigned(t *testing.T) *tls.Config {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	cert, err := x509.CreateCertificate(nil, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}, SessionTicketsDisabled: true,
	}
}

// TestTheLastFlightWaitsForTheFirstWrite checks that it goes with what follows, and that nothing is held back for which
// the server waits.
func TestTheLastFlightWaitsForTheFirstWrite(t *testing.T) {
	server := selfSigned(t)
	if n := shake(t, server); n != 2 {
		t.Errorf("a handshake and the first write are %d writes, want 2", n)
	}
	other := server.Clone()
	other.CurvePreferences = []tls.CurveID{tls.CurveP521} // the server asks for another ClientHello
	if n := shake(t, other); n != 5 {
		t.Errorf("a handshake with two ClientHellos and the first write are %d writes, want 5", n)
	}
}

// TestAClientThatRefusesTheServerSendsItsAlert checks that the alert of a client that does not trust the server is
// written, though nothing follows it.
func TestAClientThatRefusesTheServerSendsItsAlert(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	served := make(chan error, 1)
	go func() { served <- tls.Server(far, selfSigned(t)).Handshake() }()
	client := tls.Client(&gathered{Conn: near}, &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: "one", RootCAs: x509.NewCertPool(),
	})
	if err := client.HandshakeContext(t.Context()); err == nil {
		t.Fatal("the client trusts a certificate that no authority of its has signed")
	}
	err := <-served
	var alert *net.OpError
	if !errors.As(err, &alert) || alert.Op != "remote error" {
		t.Errorf("the server ends with %v, want the client's alert", err)
	}
}
