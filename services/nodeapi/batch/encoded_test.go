package batch_test

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/services/nodeapi/batch"
)

// TestRequestsThatWaitAreKeptWhole checks that requests which share pieces of memory are read back as they were given,
// those that are larger than what is left of a piece, and than a piece, too.
func TestRequestsThatWaitAreKeptWhole(t *testing.T) {
	var all batch.Encoded
	var given []*lifecyclev1.SessionReady
	var kept [][]byte
	for i := range 3 * batch.PieceSize / 1000 {
		size := 1000
		if i%40 == 39 {
			size = batch.PieceSize + 1
		}
		m := &lifecyclev1.SessionReady{Generation: int64(i + 1), LedgerId: strings.Repeat("l", size)}
		b, err := all.Keep(m)
		if err != nil {
			t.Fatal(err)
		}
		given, kept = append(given, m), append(kept, b)
	}
	for i, b := range kept {
		got := &lifecyclev1.SessionReady{}
		if err := proto.Unmarshal(b, got); err != nil || !proto.Equal(got, given[i]) {
			t.Fatalf("report %d of %d bytes is not read back: %v", i, len(b), err)
		}
		if cap(b) != len(b) {
			t.Fatalf("report %d can be appended to: %d of %d bytes", i, len(b), cap(b))
		}
	}
}
