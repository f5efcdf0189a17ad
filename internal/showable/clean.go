// Package showable makes the output of a tenant's program fit to be sent and displayed: it masks the values of the
// program's environment, removes everything that a terminal would act on, and cuts at whole characters.
//
// It consists of pure functions, and assumes nothing about the bytes: they may be of any encoding, begin in the middle
// of a character and end in one.
package showable

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxTail bounds, in bytes, the last output that is kept of a workload that failed.
const MaxTail = 2048

const (
	escape = '\x1b'
	csi    = '\u009b' // ESC [ as one character
)

// Clean returns text without what a terminal acts on or does not display: escape sequences, control and format
// characters except line ends, and bytes that are no UTF-8. A tab becomes a space; CR LF and a lone CR become line
// ends.
func Clean(raw []byte) string {
	var out strings.Builder
	out.Grow(len(raw))
	for len(raw) > 0 {
		size, char := unit(raw)
		if char >= 0 {
			out.WriteRune(char)
		}
		raw = raw[size:]
	}
	return out.String()
}

// unit returns the length of what stands at the start of raw, an escape sequence or a character, and the character that
// is shown of it; a negative one if none is.
func unit(raw []byte) (int, rune) {
	if kind, _ := introducer(raw); kind >= 0 {
		length, _ := sequence(raw)
		return length, -1
	}
	char, size := utf8.DecodeRune(raw)
	switch {
	case char == '\n':
	case char == '\r' && (len(raw) == 1 || raw[1] != '\n'):
		char = '\n'
	case char == '\t':
		char = ' '
	case char == utf8.RuneError && size <= 1, hidden(char):
		char = -1
	}
	return size, char
}

// hidden reports whether a character acts on the text around it instead of being shown.
func hidden(char rune) bool {
	return unicode.IsControl(char) || unicode.Is(unicode.Cf, char) || char == '\u2028' || char == '\u2029'
}

// introducer returns the kind of the escape sequence that begins at the start of raw, as the byte that follows ESC, and
// the length of its beginning. The kind is 0 if nothing follows ESC yet, and negative if no sequence begins there. A
// control character of eight bits (C1) begins the same sequence as ESC and a letter; as a byte that is no UTF-8 only
// CSI counts, since the others are letters in other encodings.
func introducer(raw []byte) (rune, int) {
	const toLetter = 0x40 // from a C1 character to the letter that stands for it behind ESC
	switch {
	case raw[0] == escape && len(raw) == 1:
		return 0, 1
	case raw[0] == escape:
		return rune(raw[1]), 2
	case raw[0] == csi:
		return csi - toLetter, 1
	}
	switch char, size := utf8.DecodeRune(raw); char {
	case '\u0090', '\u0098', csi, '\u009d', '\u009e', '\u009f':
		return char - toLetter, size
	}
	return -1, 0
}

// longest is the greatest length of an escape sequence, in bytes: anything longer is none, and is displayed.
const longest = 256

// sequence returns the length of the escape sequence at the start of raw, and whether raw ends before the sequence
// does. The length of one that does not end is that of its beginning.
func sequence(raw []byte) (int, bool) {
	kind, begun := introducer(raw)
	window := raw[:min(len(raw), longest)]
	cut := len(window) == len(raw)
	switch kind {
	case 0:
		return begun, true
	case '[':
		for i := begun; i < len(window); i++ {
			switch char := window[i]; {
			case char >= 0x40 && char <= 0x7e:
				return i + 1, false
			case char < 0x20 || char > 0x3f:
				return i, false
			}
		}
		return begun, cut
	case ']', 'P', 'X', '^', '_': // up to BEL or ST, which is ESC \ or a character of its own
		for i := begun; i < len(window); {
			char, size := utf8.DecodeRune(window[i:])
			switch char {
			case '\a', '\u009c':
				return i + size, false
			case escape:
				return min(i+2, len(raw)), i+1 == len(raw)
			case '\n':
				return i, false
			}
			i += size
		}
		return begun, cut
	}
	for i := 1; i < len(window); i++ {
		if window[i] >= 0x30 && window[i] <= 0x7e { // such as ESC ( B, which selects a character set, and ESC 7
			return i + 1, false
		}
		if window[i] < 0x20 || window[i] > 0x2f {
			return 1, false
		}
	}
	return 1, cut
}

// Unfinished returns how many bytes at the end of a piece belong to a unit that the next piece may complete: an escape
// sequence, a line end, or a character.
func Unfinished(raw []byte) int {
	at := max(0, len(raw)-longest)
	for n := 1; n < utf8.UTFMax && at > 0 && at < len(raw) && !utf8.RuneStart(raw[at]); n++ {
		at++ // the end of a character that begins before
	}
	for at < len(raw) {
		if !utf8.FullRune(raw[at:]) {
			return len(raw) - at
		}
		_, size := utf8.DecodeRune(raw[at:])
		if kind, _ := introducer(raw[at:]); kind >= 0 {
			length, cut := sequence(raw[at:])
			if cut {
				return len(raw) - at
			}
			size = length
		}
		at += size
	}
	if len(raw) > 0 && raw[len(raw)-1] == '\r' {
		return 1
	}
	return 0
}

// Tail returns the end of a clean text: at most limit bytes, from a whole character on, and from the start of a line if
// one begins soon.
func Tail(text string, limit int) string {
	text = strings.Trim(text, "\n")
	if len(text) <= limit {
		return text
	}
	text = text[len(text)-limit:]
	for len(text) > 0 && !utf8.RuneStart(text[0]) {
		text = text[1:]
	}
	if i := strings.IndexByte(text, '\n'); i >= 0 && i < limit/4 {
		text = text[i+1:]
	}
	return text
}
