package transport

import (
	"encoding/binary"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	frameHeader = 9 // of HTTP/2: length, type, flags, stream
	// mostRead bounds what is kept of a response until its first headers are complete.
	mostRead = 32 << 10
	// mostRetryAfter bounds the wait that an edge may ask for: nothing ends that wait early, and a node is to be back well
	// within the hour in which an outage of the control plane must have been recovered from.
	mostRetryAfter = 10 * time.Minute
)

// limitReader finds the Retry-After of an edge in the first response of a connection: grpc reports a response that is
// not grpc's only as text, without its headers. It reads along and changes nothing.
type limitReader struct {
	kept []byte
	done bool
}

// read takes the next bytes of the server and returns the wait that it asked for, zero if it asked for none.
func (l *limitReader) read(b []byte) time.Duration {
	if l.done {
		return 0
	}
	if l.kept = append(l.kept, b...); len(l.kept) > mostRead {
		l.end()
		return 0
	}
	for len(l.kept) >= frameHeader {
		size := int(binary.BigEndian.Uint32(l.kept) >> 8) // the first three bytes
		if len(l.kept) < frameHeader+size {
			return 0
		}
		kind, flags, payload := http2.FrameType(l.kept[3]), http2.Flags(l.kept[4]), l.kept[frameHeader:frameHeader+size]
		if kind == http2.FrameHeaders {
			wait := retryAfter(flags, payload)
			l.end()
			return wait
		}
		l.kept = l.kept[frameHeader+size:]
	}
	return 0
}

func (l *limitReader) end() { l.kept, l.done = nil, true }

// retryAfter returns the Retry-After, in seconds, of a response that refuses a request as one too many. Headers in more
// than one frame are not read.
func retryAfter(flags http2.Flags, payload []byte) time.Duration {
	const priority = 5
	padding := 0
	if flags.Has(http2.FlagHeadersPadded) && len(payload) > 0 {
		padding, payload = int(payload[0]), payload[1:]
	}
	if flags.Has(http2.FlagHeadersPriority) && len(payload) >= priority {
		payload = payload[priority:]
	}
	if !flags.Has(http2.FlagHeadersEndHeaders) || padding > len(payload) {
		return 0
	}
	fields, err := hpack.NewDecoder(4096, nil).DecodeFull(payload[:len(payload)-padding])
	if err != nil {
		return 0
	}
	limited, wait := false, time.Duration(0)
	for _, f := range fields {
		switch f.Name {
		case ":status":
			limited = f.Value == strconv.Itoa(http.StatusTooManyRequests) ||
				f.Value == strconv.Itoa(http.StatusServiceUnavailable)
		case "retry-after":
			if seconds, err := strconv.ParseUint(f.Value, 10, 32); err == nil {
				wait = min(time.Duration(seconds)*time.Second, mostRetryAfter)
			}
		}
	}
	if !limited {
		return 0
	}
	return wait
}
