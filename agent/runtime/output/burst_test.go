package output

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
)

// numbered is a writer of lines of sixteen bytes, each with its number.
type numbered struct {
	*testing.T
	out  *os.File
	next int
}

func (n *numbered) lines(count int) {
	var text strings.Builder
	for range count {
		fmt.Fprintf(&text, "%015d\n", n.next)
		n.next++
	}
	if _, err := n.out.WriteString(text.String()); err != nil {
		n.Error(err)
	}
}

// TestNoLossIsJoined: a workload writes in bursts while its output is rotated. The output kept behind a cut is never
// joined to the output kept before it, no line comes twice, and the offset of a line is at least the size that the
// output was seen to have before it.
func TestNoLossIsJoined(t *testing.T) {
	w := newWritten(t)
	w.shim.Limit = 1 << 20
	w.run("run-1", "")
	path := filepath.Join(w.dir, filePresent)
	out, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = out.Close() }()
	source := &numbered{T: t, out: out}
	for round := range 4 {
		source.lines(70_000)
		stop, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					source.lines(1)
					return
				case <-tick.C:
					source.lines(20)
				}
			}
		}()
		w.shim.Rotate()
		close(stop)
		<-done
		var info contents
		if found, err := jsonfile.Read(w.dir, InfoFile, &info); !found || err != nil {
			t.Fatal(found, err)
		}
		all := (&recorded{runFile: info.runFile, path: path}).stretches()
		last, first := numberAt(t, path+formerPiece, -1), numberAt(t, path, 0)
		if first <= last {
			t.Fatalf("round %d: line %d is kept behind line %d", round, first, last)
		}
		if len(all) != 2 || all[1].from <= all[0].to {
			t.Fatalf("round %d: %v is joined, and %d lines are lost in it", round, all, first-last-1)
		}
		// Output written between the read of the size and the cut cannot be counted; one byte may be counted that was not
		// lost.
		if lost, counted := int64(first-last-1)*16, all[1].from-all[0].to; counted > max(lost, 1) {
			t.Fatalf("round %d: %d bytes are counted, and %d lost", round, counted, lost)
		}
	}
}

// numberAt returns the number of a line of a file, counted from its begin, or from its end if it is negative.
func numberAt(t *testing.T, path string, line int) int {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil || len(data) == 0 {
		t.Fatalf("%d bytes of %s, %v", len(data), path, err)
	}
	at := line * 16
	if line < 0 {
		at += len(data)
	}
	var number int
	if _, err := fmt.Sscanf(string(data[at:at+16]), "%d", &number); err != nil {
		t.Fatalf("%q: %v", data[at:at+16], err)
	}
	return number
}
