package showable_test

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/showable"
)

// naive finds values by looking for each of them everywhere: slow, and plainly right.
type naive []string

// hidden returns the unbroken stretches of a text that lie in values: of two that only touch, each by itself.
func (values naive) hidden(text string) [][2]int {
	joined := make([]bool, len(text)) // the byte and the one before it lie in the same value
	inside := make([]bool, len(text))
	for at := range text {
		for _, value := range values {
			if len(value) >= len(showable.Masked) && strings.HasPrefix(text[at:], value) {
				for i := at; i < at+len(value); i++ {
					inside[i], joined[i] = true, joined[i] || i > at
				}
			}
		}
	}
	var out [][2]int
	for at := range text {
		switch {
		case !inside[at]:
		case joined[at]:
			out[len(out)-1][1] = at + 1
		default:
			out = append(out, [2]int{at, at + 1})
		}
	}
	return out
}

func (values naive) held(text string) int {
	spans := values.hidden(text)
	for n := len(text); n > 0; n-- {
		for _, value := range values {
			begins := len(value) >= len(showable.Masked) && n < len(value) && strings.HasPrefix(value, text[len(text)-n:])
			if begins && !slices.ContainsFunc(spans, func(s [2]int) bool { return s[0] <= len(text)-n && s[1] == len(text) }) {
				return n
			}
		}
	}
	return 0
}

// longest returns the longest part of a value, as long as a mask and no whole value, that is there.
func (values naive) longest(there func(value string, n int) bool) int {
	most := 0
	for _, value := range values {
		for n := len(showable.Masked); n < len(value); n++ {
			if there(value, n) {
				most = max(most, n)
			}
		}
	}
	return most
}

// piece returns the stretch of a text with its values masked.
func (values naive) piece(text string, from, to int, head, tail bool) string {
	spans := values.hidden(text)
	places := []int{0}
	if rest := strings.TrimLeft(text, "."); rest != "" { // dots and a letter may be the end of an escape sequence
		places = append(places, len(text)-len(rest)+1)
	}
	for _, begin := range places {
		n := values.longest(func(value string, n int) bool { return strings.HasPrefix(text[begin:], value[len(value)-n:]) })
		if rest := text[begin:]; tail && len(rest) >= len(showable.Masked) &&
			slices.ContainsFunc(values, func(value string) bool {
				return len(rest) < len(value)-1 && strings.Contains(value, rest)
			}) {
			n = len(rest)
		}
		if head {
			spans = append(spans, [2]int{begin, begin + n})
		}
	}
	if n := values.longest(func(value string, n int) bool { return strings.HasSuffix(text, value[:n]) }); tail {
		spans = append(spans, [2]int{len(text) - n, len(text)})
	}
	slices.SortFunc(spans, func(a, b [2]int) int { return a[0] - b[0] })
	var out strings.Builder
	for at := from; at < to; at++ {
		first := slices.IndexFunc(spans, func(s [2]int) bool { return s[0] <= at && at < s[1] })
		switch {
		case first < 0:
			out.WriteByte(text[at])
		case at < spans[first][0]+len(showable.Masked):
			out.WriteByte('*')
		default:
		}
	}
	return out.String()
}

// TestMaskIsWhatASlowSearchFinds compares masks with the slow search, on texts of few letters, in which values overlap,
// contain and continue each other.
func TestMaskIsWhatASlowSearchFinds(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(3, 5))
	word := func(letters, most int) string {
		out := make([]byte, rnd.IntN(most))
		for i := range out {
			out[i] = "ab.c"[rnd.IntN(letters)]
		}
		return string(out)
	}
	for round := range 4000 {
		letters := 1 + rnd.IntN(4)
		var values naive
		for range rnd.IntN(8) {
			values = append(values, word(letters, 12))
		}
		text := word(letters, 60)
		mask := showable.NewMask(values)
		if got, want := mask.Held([]byte(text), false), values.held(text); got != want {
			t.Fatalf("round %d: of %q with the values %q %d bytes are held, want %d", round, text, values, got, want)
		}
		from := rnd.IntN(len(text) + 1)
		to := from + rnd.IntN(len(text)-from+1)
		head, tail := rnd.IntN(2) == 0, rnd.IntN(2) == 0
		got, want := string(mask.Piece([]byte(text), from, to, head, tail)), values.piece(text, from, to, head, tail)
		if got != want {
			t.Fatalf("round %d: %q[%d:%d] with the values %q, head %t, tail %t: %q, want %q", round, text, from, to, values,
				head, tail, got, want)
		}
	}
}

// TestMaskOfValuesThatAreEverywhere: values that lie at every byte of a text, and each in the next, cost no more memory
// than in proportion to the text. A search for each value by itself finds 32 million of them.
func TestMaskOfValuesThatAreEverywhere(t *testing.T) {
	var values []string
	for n := range 500 {
		values = append(values, strings.Repeat("a", n+4), strings.Repeat("a", n)+"b"+strings.Repeat("a", 500-n))
	}
	text := bytes.Repeat([]byte("a"), 64<<10)
	mask := showable.NewMask(values)
	if got := mask.Held(text[:1000], false); got != 0 {
		t.Errorf("%d bytes are held", got)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	held, piece := mask.Held(text, false), string(mask.Piece(text, 0, len(text), true, true))
	runtime.ReadMemStats(&after)
	if held != 0 || piece != showable.Masked {
		t.Errorf("%d bytes are held; a piece of %d bytes: %.40q", held, len(piece), piece)
	}
	if got, most := after.TotalAlloc-before.TotalAlloc, uint64(16*len(text)); got > most {
		t.Errorf("%d bytes are allocated, want at most %d", got, most)
	}
}

// Characters that a terminal does not display stand inside of a value: once Clean removes them the value would be whole
// again.
func TestMaskHidesWhatCleanPutsTogether(t *testing.T) {
	mask := showable.NewMask([]string{"v4lue-Kp7TtRw21", "tab\tand\u200bjoiner"})
	for _, inside := range []string{
		"\x00", "\x1b[0m", "\x1b[01;31m\x1b[K", "\x1b]0;title\a", "\x1bPq\x1b\\", "\u202e", "\u200b", "\u00ad", "\ufeff",
		"\xff", "\b", "\x7f", "\u0085", "\x1b(B\x1b[m", "\x1b7", "\x1bc", "\u009b31m", "\x9b01;31m\x9bK",
		"\u009d0;title\u009c", "\u0090q\x1b\\",
	} {
		raw := []byte("TOKEN=v4lue-" + inside + "Kp7TtRw21\ntab" + inside + "\tandjoiner\nnext\n")
		got := mask.Piece(raw, 0, len(raw), false, false)
		if string(got) != "TOKEN=****\n****\nnext\n" {
			t.Errorf("%q inside: shown is %q", inside, got)
		}
	}
	plain := []byte("a \x1b[31mred\x1b[0m line\n")
	if got := mask.Piece(plain, 0, len(plain), false, false); !bytes.Equal(got, plain) {
		t.Errorf("without a value it becomes %q", got)
	}
}

// TestMaskHidesTheRestsOfValuesThatWereCutInsideOfASequence: a window begins or ends anywhere, also in an escape
// sequence inside of a value.
func TestMaskHidesTheRestsOfValuesThatWereCutInsideOfASequence(t *testing.T) {
	mask := showable.NewMask([]string{"v4lue-Kp7TtRw21"})
	for _, inside := range []string{
		"\x1b[0m", "\x1b[01;31m\x1b[K", "\x1b]0;title\a", "\x1b]8;;http://host/\x1b\\", "\x1bPq\x1b\\", "\u202e", "\x1b(B",
		"\x1b7", "\x1bc", "\u009b31m", "\u009d0;title\u009c",
	} {
		for cut := range len(inside) + 1 {
			begun := []byte("TOKEN=v4lue-" + inside[:cut])
			got := showable.Clean(mask.Piece(begun, 0, len(begun), false, true))
			if !strings.HasPrefix(got, "TOKEN=****") || strings.Contains(got, "v4l") {
				t.Errorf("cut at byte %d of %q: shown is %q of the beginning", cut, inside, got)
			}
			rest := []byte(inside[cut:] + "Kp7TtRw21 next\n")
			got = showable.Clean(mask.Piece(rest, 0, len(rest), true, false))
			if !strings.HasSuffix(got, "**** next\n") || strings.Contains(got, "w21") {
				t.Errorf("cut at byte %d of %q: shown is %q of the end", cut, inside, got)
			}
		}
	}
}
