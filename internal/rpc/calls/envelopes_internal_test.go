package calls

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
)

// send writes messages as connect does: the prefix and what follows are a write each.
func send(w io.Writer, messages ...[]byte) error {
	for _, m := range messages {
		prefix := make([]byte, prefixBytes)
		binary.BigEndian.PutUint32(prefix[1:], uint32(len(m)))
		if _, err := w.Write(prefix); err != nil {
			return err
		}
		if len(m) > 0 {
			if _, err := w.Write(m); err != nil {
				return err
			}
		}
	}
	return nil
}

func TestAReadReturnsAMessageWithItsPrefix(t *testing.T) {
	long := bytes.Repeat([]byte("0123456789"), 100)
	messages := [][]byte{[]byte("a"), {}, long, []byte("bc")}
	var want bytes.Buffer
	if err := send(&want, messages...); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		buffer int
		reads  int // 0: not counted
	}{
		"room for each":        {buffer: 4096, reads: len(messages)},
		"less than a message":  {buffer: 505, reads: len(messages) + 1},
		"only for the prefix":  {buffer: prefixBytes},
		"less than the prefix": {buffer: 3},
	} {
		t.Run(name, func(t *testing.T) {
			r, w := io.Pipe()
			go func() { _ = w.CloseWithError(send(w, messages...)) }()
			body := &envelopes{ReadCloser: r}
			var got bytes.Buffer
			reads := 0
			for b := make([]byte, tt.buffer); ; reads++ {
				n, err := body.Read(b)
				got.Write(b[:n])
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(got.Bytes(), want.Bytes()) {
				t.Errorf("%d bytes were read of %d, or others", got.Len(), want.Len())
			}
			if tt.reads != 0 && reads != tt.reads {
				t.Errorf("%d reads, want %d", reads, tt.reads)
			}
		})
	}
}

func TestABodyThatBreaksOffBetweenPrefixAndMessage(t *testing.T) {
	r, w := io.Pipe()
	broken := errors.New("broken")
	go func() {
		_, _ = w.Write([]byte{0, 0, 0, 0, 9})
		_ = w.CloseWithError(broken)
	}()
	b := make([]byte, 64)
	if n, err := (&envelopes{ReadCloser: r}).Read(b); n != prefixBytes || !errors.Is(err, broken) {
		t.Errorf("Read = %d, %v", n, err)
	}
}

// writesConn counts what is written to a connection.
type writesConn struct {
	net.Conn
	n *atomic.Int64
}

func (c writesConn) Write(b []byte) (int, error) {
	c.n.Add(1)
	return c.Conn.Write(b)
}

// TestAMessageOfAStreamIsOneWrite sends messages that are each answered with a byte.
func TestAMessageOfAStreamIsOneWrite(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		_ = control.Flush()
		for {
			prefix := make([]byte, prefixBytes)
			if _, err := io.ReadFull(r.Body, prefix); err != nil {
				return
			}
			if _, err := io.CopyN(io.Discard, r.Body, int64(binary.BigEndian.Uint32(prefix[1:]))); err != nil {
				return
			}
			_, _ = w.Write([]byte{1})
			_ = control.Flush()
		}
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	transport, ok := server.Client().Transport.(*http.Transport)
	if !ok {
		t.Fatal("the test server's transport is another")
	}
	var writes atomic.Int64
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return writesConn{Conn: conn, n: &writes}, err
	}
	r, w := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, r)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/connect+proto")
	res, err := (&http.Client{Transport: envelopeTransport{transport}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	round := func() {
		t.Helper()
		if err := send(w, []byte("message")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(res.Body, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	round() // the connection's own frames have been sent by now
	before := writes.Load()
	for range 20 {
		round()
	}
	if n := writes.Load() - before; n != 20 {
		t.Errorf("20 messages were %d writes", n)
	}
	_ = w.Close()
}
