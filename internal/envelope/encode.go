package envelope

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"
)

// The encoding, all integers big-endian:
//
//	version  1 byte
//	task id, type, node id, workspace id    each: length 2 bytes, bytes
//	epoch, op_seq                           each: 8 bytes
//	not before, expires at                  each: microseconds since 1970, 8 bytes
//	attempt                                 4 bytes
//	payload                                 length 4 bytes, bytes
//
// Every field is always present and has one encoding, so equal tasks have equal bytes; no bytes may follow the payload.

const maxString = 256

var errTruncated = errors.New("decode task: truncated")

func encode(t Task) ([]byte, error) {
	if len(t.Payload) > MaxPayload {
		return nil, fmt.Errorf("encode task: payload of %d bytes", len(t.Payload))
	}
	if t.TaskID == "" || t.Type == "" || t.NodeID == "" {
		return nil, errors.New("encode task: id, type or node is missing")
	}
	if t.Epoch < 0 || t.OpSeq < 0 || t.Attempt < 0 {
		return nil, errors.New("encode task: negative number")
	}
	if !t.NotBefore.Before(t.ExpiresAt) {
		return nil, errors.New("encode task: its window is empty")
	}
	out := make([]byte, 0, 128+len(t.Payload))
	out = append(out, Version)
	for _, s := range []string{t.TaskID, t.Type, t.NodeID, t.WorkspaceID} {
		if len(s) > maxString || !utf8.ValidString(s) {
			return nil, errors.New("encode task: an id is too long or no text")
		}
		out = binary.BigEndian.AppendUint16(out, uint16(len(s))) // bounded above.
		out = append(out, s...)
	}
	for _, n := range []int64{t.Epoch, t.OpSeq, t.NotBefore.UnixMicro(), t.ExpiresAt.UnixMicro()} {
		out = binary.BigEndian.AppendUint64(out, uint64(n)) // two's complement, read back the same way.
	}
	out = binary.BigEndian.AppendUint32(out, uint32(t.Attempt))      // not negative.
	out = binary.BigEndian.AppendUint32(out, uint32(len(t.Payload))) // bounded above.
	return append(out, t.Payload...), nil
}

// decode reads exactly what encode writes: a task that it accepts encodes to the same bytes again.
func decode(in []byte) (Task, error) {
	r := reader{rest: in}
	if v := r.bytes(1); r.err == nil && v[0] != Version {
		return Task{}, fmt.Errorf("decode task: version %d", v[0])
	}
	t := Task{TaskID: r.text(), Type: r.text(), NodeID: r.text(), WorkspaceID: r.text()}
	t.Epoch, t.OpSeq = r.int64(), r.int64()
	t.NotBefore, t.ExpiresAt = time.UnixMicro(r.int64()).UTC(), time.UnixMicro(r.int64()).UTC()
	attempt := r.uint32()
	size := r.uint32()
	if r.err == nil && size > MaxPayload {
		return Task{}, errors.New("decode task: payload too large")
	}
	if payload := r.bytes(int(size)); len(payload) > 0 {
		t.Payload = append([]byte(nil), payload...)
	}
	switch {
	case r.err != nil:
		return Task{}, r.err
	case len(r.rest) > 0:
		return Task{}, errors.New("decode task: bytes after the end")
	case attempt > 1<<31-1 || t.Epoch < 0 || t.OpSeq < 0:
		return Task{}, errors.New("decode task: negative number")
	case t.TaskID == "" || t.Type == "" || t.NodeID == "":
		return Task{}, errors.New("decode task: id, type or node is missing")
	case !t.NotBefore.Before(t.ExpiresAt):
		return Task{}, errors.New("decode task: its window is empty")
	}
	t.Attempt = int32(attempt) // checked above.
	return t, nil
}

// reader reads fields from the front; after the first failure it returns zero values.
type reader struct {
	rest []byte
	err  error
}

func (r *reader) bytes(n int) []byte {
	if r.err != nil {
		return nil
	}
	if n > len(r.rest) {
		r.err = errTruncated
		return nil
	}
	out := r.rest[:n]
	r.rest = r.rest[n:]
	return out
}

func (r *reader) text() string {
	size := r.bytes(2)
	if r.err != nil {
		return ""
	}
	n := int(binary.BigEndian.Uint16(size))
	if n > maxString {
		r.err = errors.New("decode task: an id is too long")
		return ""
	}
	s := string(r.bytes(n))
	if r.err == nil && !utf8.ValidString(s) {
		r.err = errors.New("decode task: an id is no text")
	}
	return s
}

func (r *reader) int64() int64 {
	b := r.bytes(8)
	if r.err != nil {
		return 0
	}
	return int64(binary.BigEndian.Uint64(b)) // two's complement, written the same way.
}

func (r *reader) uint32() uint32 {
	b := r.bytes(4)
	if r.err != nil {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}
