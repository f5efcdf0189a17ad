package envelope

import (
	"bytes"
	"testing"
	"time"
)

// Bytes that decode must encode to the same bytes again: otherwise one task would have two encodings, and one signature
// two meanings.
func FuzzDecode(f *testing.F) {
	seed, err := encode(Task{
		TaskID: "t", Type: "probe.noop", NodeID: "n", NotBefore: time.UnixMicro(1), ExpiresAt: time.UnixMicro(2),
		Payload: []byte("p"),
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte{})
	f.Add([]byte{1, 0xff, 0xff})
	f.Add(bytes.Repeat([]byte{1}, 200))
	f.Fuzz(func(t *testing.T, in []byte) {
		task, err := decode(in)
		if err != nil {
			return
		}
		out, err := encode(task)
		if err != nil {
			t.Fatalf("decoded but not encoded: %v", err)
		}
		if !bytes.Equal(in, out) {
			t.Fatalf("two spellings:\n%x\n%x", in, out)
		}
	})
}
