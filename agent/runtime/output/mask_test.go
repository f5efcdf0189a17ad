package output

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/showable"
)

// unseen returns texts that a terminal does not show.
func unseen() []string {
	return []string{
		"\x1b[01;31m\x1b[K", "\x1b[m\x1b[K", "\x1b[0m", "\x1b(B\x1b[m", "\x1b7", "\x1b]0;title\a",
		"\x1b]8;;http://host/\x1b\\", "\x1bPq\x1b\\", "\x00", "\b", "\u200b", "\u202e", "\u0085", "\xff", "\x7f",
		strings.Repeat("\x1b[1m", 60), strings.Repeat("\x00", 300),
	}
}

// checker has the methods that a test and a property have in common.
type checker interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// reader reads an output as a client does that follows it, and keeps the pieces that it gets.
type reader struct {
	out     *recorded
	cursor  *nodev1.OutputCursor
	data    []byte // all pieces, one after the other
	carried []byte
	shown   strings.Builder
}

// read reads one piece of at most most bytes, and reports whether more is to be read at once.
func (r *reader) read(t checker, most int) bool {
	t.Helper()
	piece, err := r.out.read(r.cursor, most)
	if err != nil {
		t.Fatalf("read output: %v", err)
	}
	got := piece.masked()
	if len(got.GetData()) > most {
		t.Fatalf("a piece of at most %d bytes has %d", most, len(got.GetData()))
	}
	if r.cursor != nil && got.GetMore() && got.GetNext().GetOffset() <= r.cursor.GetOffset() {
		t.Fatalf("at offset %d of %d: there is more, and the next piece begins where this one did", r.cursor.GetOffset(),
			sizeOf(r.out.path))
	}
	r.cursor, r.data = got.GetNext(), append(r.data, got.GetData()...)
	data := slices.Concat(r.carried, got.GetData())
	keep := showable.Unfinished(data)
	r.shown.WriteString(showable.Clean(data[:len(data)-keep]))
	r.carried = append([]byte(nil), data[len(data)-keep:]...)
	return got.GetMore()
}

// hides fails the test if the pieces that were read show a value, or a part of one that is at least as long as a mask.
func (r *reader) hides(t checker, raw []byte, values []string) {
	t.Helper()
	r.shown.WriteString(showable.Clean(r.carried))
	r.carried = nil
	texts := map[string]string{
		"pieces": string(r.data), "their clean text": showable.Clean(r.data),
		"the screen": r.shown.String(),
	}
	for _, value := range values {
		for at := 0; at+len(showable.Masked) <= len(value); at++ {
			part := value[at : at+len(showable.Masked)]
			for what, text := range texts {
				if i := strings.Index(text, part); i >= 0 {
					t.Fatalf("a part of %q is in %s: %q, of the output %q", value, what, text[max(0, i-40):min(len(text), i+40)], raw)
				}
			}
		}
	}
}

// output returns an output with nothing in it, of a workload with these values.
func output(dir string, values []string) *recorded {
	return &recorded{
		runFile: runFile{Run: "run", Masked: values}, path: filepath.Join(dir, filePresent),
		masks: &maskCache{},
	}
}

// follow writes an output in pieces of the sizes that cut returns, reads after each in pieces of the sizes that most
// returns, and returns the reader. It begins at an offset; if that is negative, at the end of the first piece, as a
// client without a cursor does. raw is the kept part of the run's output, from the output's cut on.
func follow(t checker, out *recorded, raw []byte, offset int64, cut, most func() int) *reader {
	t.Helper()
	r := &reader{out: out}
	if offset >= 0 {
		r.cursor = &nodev1.OutputCursor{Run: out.Run, Offset: offset}
	}
	file, err := os.Create(out.path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for at := 0; at < len(raw); {
		to := min(len(raw), at+cut())
		if _, err := file.Write(raw[at:to]); err != nil {
			t.Fatal(err)
		}
		at = to
		if out.Cut+int64(at) < offset {
			continue
		}
		for r.read(t, most()) {
		}
	}
	out.over = true
	for r.read(t, most()) {
	}
	return r
}

// hidden is the property that a value is hidden wherever the reader or the writer cuts the output, and whatever
// sequences are inside of the value.
func hidden(dir string) func(*rapid.T) {
	// None of these letters is in an escape sequence, nor has the first byte of a character that is not shown: the rest of
	// such a character is shown, and must not look like a part of a value.
	letter := rapid.SampledFrom([]rune("abcdfACDEF24569-_=한ü"))
	return func(t *rapid.T) {
		value := rapid.StringOfN(letter, 8, 40, -1)
		values := rapid.SliceOfN(value, 1, 3).Draw(t, "values")
		filler := rapid.StringMatching(`(?:[.,:;!]{0,30}\n?){0,3}`)
		inside := rapid.SampledFrom(append(unseen(), "", "", "", "", "", "", "", "", "", ""))
		var raw []byte
		fill := func() {
			text := filler.Draw(t, "filler")
			raw = append(raw, text...)
		}
		fill()
		for range rapid.IntRange(1, 4).Draw(t, "times") {
			for _, char := range rapid.SampledFrom(values).Draw(t, "value") {
				raw = append(append(raw, inside.Draw(t, "inside")...), string(char)...)
			}
			raw = append(raw, inside.Draw(t, "behind")...)
			raw = append(raw, '.') // of two values that touch, the ends together may look like a part of a third
			fill()
		}
		var lost int // at the begin; what is missing at the end was not written when the run ended
		whole := raw
		if rapid.Bool().Draw(t, "cut at the ends") {
			lost = rapid.IntRange(0, len(raw)).Draw(t, "lost")
			raw = raw[lost:rapid.IntRange(lost, len(raw)).Draw(t, "end")]
		}
		widths := rapid.SampledFrom([]int{1, 2, 3, 5, 8, 13, 34, 89, 1000, MaxPiece})
		offset := int64(rapid.IntRange(-1, lost+len(raw)).Draw(t, "offset"))
		cut := func() int { return widths.Draw(t, "cut") }
		out := output(dir, values)
		out.Cut = int64(lost)
		r := follow(t, out, raw, offset, cut, func() int { return widths.Draw(t, "most") })
		r.hides(t, raw, values)
		if offset != 0 || len(raw) < len(whole) {
			return
		}
		keep := func(char rune) rune {
			if strings.ContainsRune(".,:;!\n", char) {
				return char
			}
			return -1
		}
		// A title may be cut, and has such characters in it: only what is shown is compared.
		if got, want := strings.Map(keep, r.shown.String()), strings.Map(keep, showable.Clean(raw)); got != want {
			t.Fatalf("around the values %q is shown, want %q, of %q", got, want, raw)
		}
		if !utf8.ValidString(r.shown.String()) {
			t.Fatalf("a character was cut: %q", r.shown.String())
		}
	}
}

func TestAValueIsHiddenWhereverItIsCut(t *testing.T) {
	rapid.Check(t, hidden(t.TempDir()))
}

func FuzzAValueIsHiddenWhereverItIsCut(f *testing.F) {
	check := rapid.MakeFuzz(hidden(f.TempDir()))
	// Shorter input than the property draws counts as a skip.
	for seed := range byte(4) {
		input := make([]byte, 64<<10)
		_, _ = rand.NewChaCha8([32]byte{seed}).Read(input)
		f.Add(input)
	}
	f.Fuzz(check)
}

// TestColouredValuesAcrossBorders: a search for a part of a value colours that part; a border of 64 KiB or the moment
// of a read lies at each byte of it.
func TestColouredValuesAcrossBorders(t *testing.T) {
	const value = "OUTPUT-CANARY-91be"
	coloured := "key=OUTPUT-\x1b[01;31m\x1b[KCANARY-91be\x1b[m\x1b[K\n"
	for at := range len(coloured) + 1 {
		t.Run(fmt.Sprintf("byte_%d", at), func(t *testing.T) {
			values := []string{value}
			all := func() int { return MaxPiece }
			before := strings.Repeat("0123456789abcde\n", MaxPiece/16)[:MaxPiece-at]
			r := follow(t, output(t.TempDir(), values), []byte(before+coloured+"end\n"), 0, func() int { return 1 << 20 }, all)
			r.hides(t, []byte(coloured), values)
			if !strings.HasSuffix(r.shown.String(), "key=****\nend\n") {
				t.Errorf("over a border of two pieces: %q", r.shown.String()[len(before)-at:])
			}
			first := true
			half := func() int {
				if first {
					first = false
					return max(1, at)
				}
				return 1 << 20
			}
			r = follow(t, output(t.TempDir(), values), []byte(coloured+"end\n"), 0, half, all)
			r.hides(t, []byte(coloured), values)
			if r.shown.String() != "key=****\nend\n" {
				t.Errorf("when it was read in the middle: %q", r.shown.String())
			}
		})
	}
}

// TestWhatIsHeldBackIsBounded: a value that was begun is held back; unseen text follows that is longer than a window,
// and the reader must still go on.
func TestWhatIsHeldBackIsBounded(t *testing.T) {
	values := []string{"OUTPUT-CANARY-91be"}
	raw := "OUTPUT-" + strings.Repeat("\x00", 5*MaxPiece) + "CANARY-91be\nend\n"
	r := follow(t, output(t.TempDir(), values), []byte(raw), 0, func() int { return 10000 },
		func() int { return MaxPiece })
	if got := r.shown.String(); !strings.HasSuffix(got, "\nend\n") || strings.Contains(got, "OUTPUT-CANARY-91be") {
		t.Errorf("shown is %q", got)
	}
}

// TestAReadThatBeginsBehindSequences: the output read around a piece may begin within an escape sequence, the rest of
// which looks like text but is not.
func TestAReadThatBeginsBehindSequences(t *testing.T) {
	const value = "OUTPUT-CANARY-91be"
	for _, inside := range []string{
		"\x1b]0;" + strings.Repeat("title", 20) + "\a", "\x1b]8;;http://host/\x1b\\",
		"\x1b[38;5;206m",
	} {
		raw := []byte(strings.Repeat(".", 1000) + "id=")
		for _, char := range []byte(value) {
			raw = append(append(raw, inside...), char)
		}
		raw = append(raw, '\n')
		out := output(t.TempDir(), []string{value})
		for at := 1000; at < len(raw); at += 37 {
			r := follow(t, out, raw, int64(at), func() int { return len(raw) }, func() int { return 50 })
			r.hides(t, raw, []string{value})
			if strings.ContainsAny(r.shown.String(), value) {
				t.Errorf("from byte %d on with %q inside: shown is %q", at, inside, r.shown.String())
			}
			out.over = false
		}
	}
}
