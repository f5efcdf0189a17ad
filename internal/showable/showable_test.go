package showable_test

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpuaas/mesh/internal/showable"
)

func TestClean(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain\ntext\n":                      "plain\ntext\n",
		"\x1b[1;31mred\x1b[0m":               "red",
		"\x1b]0;title\arest":                 "rest",
		"\x1b]8;;u\x1b\\link":                "link",
		"\x1bcreset \x1b(B\x1b7x\x1b\x00y":   "reset xy",
		"\x1b":                               "",
		"a\tb\r\nc\rd\x00\x07\x7fe":          "a b\nc\nde",
		"a\u202eb\u200bc\u2066\u2028d\ufeff": "abcd",
		"\u009b31mx\u009b0m":                 "x",
		"\x9b31mx\x9b0m":                     "x",
		"\u009d0;title\u009crest":            "rest",
		"\u0090q\x1b\\rest \u009fx":          "rest x",
		"\x1b]0;✜ title\arest":               "rest",
		"\xff\xfebyte\xc3":                   "byte",
		"Ä€😀":                                "Ä€😀",
		"\x1b[" + strings.Repeat("1", 400):   strings.Repeat("1", 400),
	} {
		if got := showable.Clean([]byte(in)); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestTail(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("€", showable.MaxTail) // three bytes each: 2048 is no border
	got := showable.Tail(long, showable.MaxTail)
	if len(got) != 2046 || !utf8.ValidString(got) {
		t.Errorf("%d bytes, valid %t", len(got), utf8.ValidString(got))
	}
	if got := showable.Tail("\n\na\nb\n\n", 100); got != "a\nb" {
		t.Errorf("%q", got)
	}
	if got := showable.Tail(strings.Repeat("x", 100)+"\nlast line of it", 40); got != "last line of it" && len(got) > 40 {
		t.Errorf("%q", got)
	}
	if got := showable.Tail("aaaaaaaaaaaaaaaaaaaaaaa\n0123456789012345678901234567890123456",
		40); got != "0123456789012345678901234567890123456" {
		t.Errorf("%q begins in the middle of a line", got)
	}
}

func TestMaskWhole(t *testing.T) {
	t.Parallel()
	m := showable.NewMask([]string{
		"hunter2", "hunter22", "abc", "", " padded-value ",
		"-----BEGIN KEY-----\nMIIEvQIBADANBg\n-----END KEY-----\n",
	})
	for in, want := range map[string]string{
		"pw=hunter2.":         "pw=****.",
		"pw=hunter22.":        "pw=****.",
		"hunter2hunter2":      "********",
		"abc stays":           "abc stays",
		"[padded-value]":      "[****]",
		"line MIIEvQIBADANBg": "line ****",
		"hunter":              "hunter",
	} {
		if got := string(m.Piece([]byte(in), 0, len(in), false, false)); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if got := string(m.Piece([]byte("nter2 and hunt"), 0, 14, true, true)); got != "**** and ****" {
		t.Errorf("cut values at both ends: %q", got)
	}
	if got := string((showable.Mask{}).Piece([]byte("hunter2"), 1, 6, true, true)); got != "unter" {
		t.Errorf("a mask of nothing: %q", got)
	}
}

// TestMaskAcrossPieces reads random text with values in it in random pieces: no part of a value of four bytes or more
// is ever in the pieces, the pieces together are the same as the whole masked at once, and nothing else is lost.
func TestMaskAcrossPieces(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(7, 11))
	secrets := []string{"S3CR3T-alpha", "TOPSECRETVALUE-beta-0123456789", "zzzz"}
	m := showable.NewMask(secrets)
	for range 500 {
		var text []byte
		for range rnd.IntN(30) {
			if rnd.IntN(3) == 0 {
				text = append(text, secrets[rnd.IntN(len(secrets))]...)
			}
			text = append(text, strings.Repeat(".", 1+rnd.IntN(20))...)
		}
		var got []byte
		for at := 0; at < len(text); {
			to := min(len(text), at+1+rnd.IntN(12))
			from := max(0, at-m.Margin())
			end := min(len(text), to+m.Margin())
			got = append(got, m.Piece(text[from:end], at-from, to-from, false, false)...)
			at = to
		}
		for _, secret := range secrets {
			if bytes.Contains(got, []byte(secret)) || len(secret) > 6 && bytes.Contains(got, []byte(secret[:5])) {
				t.Fatalf("%q is in %q", secret, got)
			}
		}
		if strings.Count(string(got), ".") != strings.Count(string(text), ".") {
			t.Fatalf("%q became %q", text, got)
		}
	}
}

func TestHeld(t *testing.T) {
	t.Parallel()
	m := showable.NewMask([]string{"S3CR3T-alpha"})
	for in, want := range map[string]int{
		"": 0, "x S3CR": 4, "x S": 1, "x S3CR3T-alpha": 0, "nothing": 0, "S3CR3T-alphaS3": 2,
		"x S\x1b[1m3\x1b[0": 9, "x S3CR3T\x1b[m-alpha\x1b[m": 0, "x \x1b[0": 3, "x\xc3": 1,
		"x S\u009b1m3\u009b0": 9, "x \x9b0": 2, "x\xe2\x9b": 2, "x \u009d0;t": 5, "😀": 0, "x\u009b": 2,
	} {
		if got := m.Held([]byte(in), false); got != want {
			t.Errorf("%q: %d, want %d", in, got, want)
		}
	}
}

// TestCleanInPieces: wherever a text is cut, its pieces give the same as the whole, if what is unfinished goes with the
// next.
func TestCleanInPieces(t *testing.T) {
	t.Parallel()
	text := []byte("a\x1b[1;31mred\x1b[0m\r\n\x1b]0;title\x07Ä€😀\rb\x1b]8;;u\x1b\\link\x1bx\n\u009b31mred\x9b0m " +
		"\u009d0;t✜\u009c⛛x\n")
	want := showable.Clean(text)
	for first := range text {
		for second := first; second <= len(text); second++ {
			var got strings.Builder
			var carried []byte
			for _, piece := range [][]byte{text[:first], text[first:second], text[second:]} {
				data := append(append([]byte{}, carried...), piece...)
				keep := showable.Unfinished(data)
				got.WriteString(showable.Clean(data[:len(data)-keep]))
				carried = data[len(data)-keep:]
			}
			got.WriteString(showable.Clean(carried))
			if got.String() != want {
				t.Fatalf("cut at %d and %d: %q, want %q", first, second, got.String(), want)
			}
		}
	}
}
