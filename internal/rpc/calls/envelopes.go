package calls

import (
	"encoding/binary"
	"io"
	"net/http"
	"strings"
)

// envelopeTransport sends each message of a streaming request in one frame of HTTP/2. Connect writes the five bytes
// before a message (flags and length) apart from it, and net/http sends what one read of a body returns: that is two
// frames, two TLS records and two writes, and two reads at the server.
type envelopeTransport struct{ *http.Transport }

// RoundTrip implements http.RoundTripper.
func (t envelopeTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if kind := req.Header.Get("Content-Type"); req.Body != nil && strings.HasPrefix(kind, "application/connect+") {
		whole := *req
		whole.Body = &envelopes{ReadCloser: req.Body}
		req = &whole
	}
	return t.Transport.RoundTrip(req)
}

const prefixBytes = 5 // flags, and the length of the message, big-endian

// envelopes reads a body of messages. A read that begins with a prefix returns the message along with it, or as much of
// the message as there is room for.
type envelopes struct {
	io.ReadCloser
	left int64 // bytes of the message
	cut  bool  // a prefix was read in part: its message is unknown, and what follows is passed on as it comes
}

// Read implements io.Reader.
func (e *envelopes) Read(b []byte) (int, error) {
	if e.cut {
		return e.ReadCloser.Read(b)
	}
	if e.left > 0 {
		n, err := e.ReadCloser.Read(b[:min(int64(len(b)), e.left)])
		e.left -= int64(n)
		return n, err
	}
	n, err := e.ReadCloser.Read(b[:min(len(b), prefixBytes)])
	if n < prefixBytes {
		e.cut = n > 0
		return n, err
	}
	e.left = int64(binary.BigEndian.Uint32(b[1:prefixBytes]))
	if err != nil || e.left == 0 || len(b) == prefixBytes {
		return n, err
	}
	more, err := e.Read(b[prefixBytes:])
	return prefixBytes + more, err
}
