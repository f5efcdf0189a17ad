package output

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// stopRotation begins the rotation of an output that is larger than its limit and ends it after a number of steps, as a
// kill does. Behind each step that was done the workload writes.
func (w *written) stopRotation(done int, write func(step int)) {
	w.t.Helper()
	lock, err := lockBriefly(w.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	files, err := w.shim.contents()
	if err != nil {
		w.t.Fatal(err)
	}
	path := filepath.Join(w.dir, filePresent)
	size := sizeOf(path)
	r := &rotation{dir: w.dir, path: path, files: files, from: size - w.shim.Limit, to: size}
	for step, do := range r.steps()[:done] {
		if err := do(); err != nil {
			w.t.Fatalf("step %d: %v", step, err)
		}
		write(step)
	}
}

// follow reads a run from its begin. It returns the kept output, with `<n>` where n bytes are counted as dropped, and
// the sum of these.
func (w *written) follow(run string) (string, int64) {
	w.t.Helper()
	var text strings.Builder
	var dropped int64
	for cursor, more := (&nodev1.OutputCursor{Run: run}), true; more; {
		out, err := w.piece(w.t.Context(), false, cursor, 0)
		if err != nil {
			w.t.Fatal(err)
		}
		if n := out.GetDroppedBytes(); n > 0 {
			fmt.Fprintf(&text, "<%d>", n)
			dropped += n
		}
		if cursor.GetOffset()+out.GetDroppedBytes() != out.GetOffset() {
			w.t.Fatalf("from %d: %d are dropped, and it begins at %d", cursor.GetOffset(), out.GetDroppedBytes(),
				out.GetOffset())
		}
		text.Write(out.GetData())
		cursor, more = out.GetNext(), out.GetMore()
	}
	return text.String(), dropped
}

// TestWhatIsWrittenDuringARotationIsCounted: output that the workload writes between two steps is shown, or counted as
// dropped. No other bytes are counted.
func TestWhatIsWrittenDuringARotationIsCounted(t *testing.T) {
	for name, tc := range map[string]struct {
		writes [5]string // behind each step
		want   string
	}{
		"nothing":        {want: "<4>456789abcdef<1>"},
		"before the cut": {writes: [5]string{"12", "345", "6", "", ""}, want: "<4>456789abcdef<6>"},
		"behind it":      {writes: [5]string{3: "next", 4: " line"}, want: "<4>456789abcdef<1>next line"},
		"on both sides":  {writes: [5]string{"1", "2", "3", "next", " line"}, want: "<4>456789abcdef<3>next line"},
		"more than there": {
			writes: [5]string{3: strings.Repeat("n", 40)}, want: "<4>456789abcdef<1>" + strings.Repeat("n", 40),
		},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			w, out := tooLarge(t, "", "0123456789abcdef")
			w.stopRotation(5, func(step int) { appendTo(t, out, tc.writes[step]) })
			if got, _ := w.follow("run-1"); got != tc.want {
				t.Errorf("read %q, want %q", got, tc.want)
			}
			if w.shim.Rotate(); len(tc.writes[3]) > 12 {
				return // it is cut again
			}
			if got, _ := w.follow("run-1"); got != tc.want {
				t.Errorf("after a look at its size: %q, want %q", got, tc.want)
			}
		})
	}
}

// TestAKillDuringARotation: a shim is killed after each step of a rotation, and the workload goes on. A reader gets the
// same before the next shim finishes the rotation, after that, and once a new run has begun; before the cut no output
// is lost, and after it all offsets are right.
func TestAKillDuringARotation(t *testing.T) {
	const whole, lost, size = "0123456789abcdefuvw", "<4>456789abcdef", 16
	wants := []string{whole, whole, whole, whole, lost + "<1>uvw", lost + "<1>uvw"}
	for done, want := range wants {
		for _, more := range []string{"", " and more than there was before"} {
			t.Run(fmt.Sprintf("after_%d_steps_and_%d_bytes", done, len(more)), func(t *testing.T) {
				w, out := tooLarge(t, "", "0123456789abcdef")
				w.stopRotation(done, func(int) {})
				appendTo(t, out, "uvw"+more)
				if got, _ := w.follow("run-1"); got != want+more {
					t.Fatalf("before it is settled: %q, want %q", got, want+more)
				}
				next := &Recorder{Dir: w.dir, Limit: w.shim.Limit, Masked: w.shim.Masked}
				next.Limit = 1000 // it is finished by the next shim, whether it is too large or not
				next.Rotate()
				if got, _ := w.follow("run-1"); got != want+more {
					t.Errorf("once it is settled: %q, want %q", got, want+more)
				}
				var info contents
				if _, err := jsonfile.Read(w.dir, InfoFile, &info); err != nil || info.Rotating != nil {
					t.Errorf("%+v is recorded, %v", info, err)
				}
				if n := sizeOf(filepath.Join(w.dir, filePresent+formerPiece+nextPiece)); n != 0 {
					t.Errorf("%d bytes of a piece that is not used are left", n)
				}
				// The next rotation cuts the present output.
				next.Limit = 2
				next.Rotate()
				end := int64(size + len("uvw"+more))
				if done > 3 {
					end++
				}
				text := "uvw" + more
				if got, dropped := w.follow("run-1"); got != fmt.Sprintf("<%d>%s<1>", end-2, text[len(text)-2:]) ||
					dropped != end-1 {
					t.Errorf("once it is rotated again: %q, %d dropped", got, dropped)
				}
			})
		}
	}
}

// TestAKillDuringARotationAndANewRun: the shim that comes after the kill starts the workload anew, and the former run's
// output is kept as it was.
func TestAKillDuringARotationAndANewRun(t *testing.T) {
	for done, want := range []string{"789abcdefuvw", "789abcdefuvw", "789abcdefuvw", "789abcdefuvw", "uvw", "uvw"} {
		w, out := tooLarge(t, "", "0123456789abcdef")
		w.stopRotation(done, func(int) {})
		appendTo(t, out, "uvw")
		w.run("run-2", "anew")
		got, err := w.piece(t.Context(), true, nil, 12)
		if err != nil || string(got.GetData()) != want || !got.GetEnded() {
			t.Errorf("after %d steps: %v, %v", done, got, err)
		}
	}
}

// TestAValueAcrossACutIsHidden checks that neither end of a value is shown whose middle was lost by a rotation, and
// neither part of a value across a cut by which nothing was lost.
func TestAValueAcrossACutIsHidden(t *testing.T) {
	const value = "OUTPUT-CANARY-91be"
	for at := 1; at < len(value); at += 4 {
		for _, lost := range []int{0, 1, min(4, len(value)-at)} {
			for done := 2; done <= 5; done++ {
				w, out := tooLarge(t, value, "many lines of text\n"+value[:at])
				w.shim.Limit = int64(at) + 3 // the value is the end of the piece
				w.stopRotation(done, func(step int) {
					if step == 1 {
						appendTo(t, out, value[at:at+lost])
					}
				})
				appendTo(t, out, value[at+lost:]+"\nend\n")
				text, _ := w.follow("run-1")
				for i := 0; i+4 <= len(value); i++ {
					if strings.Contains(text, value[i:i+4]) {
						t.Fatalf("%d bytes before the cut, %d lost, after %d steps: %q", at, lost, done, text)
					}
				}
				if !strings.HasSuffix(text, "\nend\n") {
					t.Fatalf("%d bytes before the cut, %d lost, after %d steps: %q", at, lost, done, text)
				}
			}
		}
	}
}

// TestTheEndIsShownRightAfterACut: a caller that asks for the last lines of a workload that has written nothing since
// the cut gets those before it.
func TestTheEndIsShownRightAfterACut(t *testing.T) {
	w, out := tooLarge(t, "", "0123456789abcdef")
	w.shim.Rotate()
	if got := w.read(false); string(got.GetData()) != "456789abcdef" || got.GetOffset() != 4 {
		t.Errorf("after the cut: %v", got)
	}
	appendTo(t, out, "next")
	if got := w.read(false); string(got.GetData()) != "next" || got.GetOffset() != 17 {
		t.Errorf("and what came then: %v", got)
	}
}

// tooLarge returns a workload with an output that is larger than its limit of twelve bytes, and its file as the
// workload writes it.
func tooLarge(t *testing.T, masked, text string) (*written, *os.File) {
	t.Helper()
	w := newWritten(t)
	if masked != "" {
		w.shim.Masked = []string{masked}
	}
	w.shim.Limit = 12
	w.run("run-1", text)
	out, err := os.OpenFile(filepath.Join(w.dir, filePresent), os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.Close() })
	return w, out
}

func appendTo(t *testing.T, out *os.File, text string) {
	t.Helper()
	if _, err := out.WriteString(text); err != nil {
		t.Fatal(err)
	}
}
