// Package showable makes what a tenant's program has written fit to be sent and shown: it masks the values of the program's environment, takes out what a
// terminal would act on, and cuts at whole characters.
//
// It is pure functions, and believes nothing about the bytes: they may be of any encoding, begin in the middle of a character and end in one.
package showable

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxTail bounds, in bytes, the last output that is kept of a workload that failed.
const MaxTail = 2048

const escape = '\x1b'

// Clean returns text without what a terminal acts on or does not show: escape sequences, control and format characters except line ends, and bytes
// that are no UTF-8. A tab becomes a space; CR LF and a lone CR become line ends.
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

// unit returns the length of what stands at the start of raw, an escape sequence or a character, and the character that is shown of it; a negative one
// if none is.
func unit(raw []byte) (int, rune) {
	if raw[0] == escape {
		return escapeLength(raw), -1
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

// escapeLength returns the length of the escape sequence at the start of raw, which begins with ESC.
func escapeLength(raw []byte) int {
	if len(raw) < 2 {
		return len(raw)
	}
	const most = 256 // what goes on for longer is no sequence, and is shown
	switch raw[1] {
	case '[':
		for i := 2; i < min(len(raw), most); i++ {
			if raw[i] >= 0x40 && raw[i] <= 0x7e {
				return i + 1
			}
			if raw[i] < 0x20 || raw[i] > 0x3f {
				return i
			}
		}
		return 2
	case ']', 'P', 'X', '^', '_': // up to BEL or ESC \
		for i := 2; i < min(len(raw), most); i++ {
			if raw[i] == '\a' {
				return i + 1
			}
			if raw[i] == escape {
				return min(i+2, len(raw))
			}
			if raw[i] == '\n' {
				return i
			}
		}
		return 2
	}
	for i := 1; i < min(len(raw), most); i++ {
		if raw[i] >= 0x30 && raw[i] <= 0x7e { // such as ESC ( B, which chooses a character set, and ESC 7
			return i + 1
		}
		if raw[i] < 0x20 || raw[i] > 0x2f {
			break
		}
	}
	return 1
}

// Unfinished returns how many bytes at the end of a piece belong to what the next piece may complete: an escape sequence, a line end, or a character.
func Unfinished(raw []byte) int {
	const most = 256
	for i := max(0, len(raw)-most); i < len(raw); i++ {
		if raw[i] == escape && open(raw[i:]) {
			return len(raw) - i
		}
	}
	if len(raw) > 0 && raw[len(raw)-1] == '\r' {
		return 1
	}
	for n := 1; n <= min(utf8.UTFMax-1, len(raw)); n++ {
		if part := raw[len(raw)-n:]; utf8.RuneStart(part[0]) {
			if !utf8.FullRune(part) {
				return n
			}
			break
		}
	}
	return 0
}

// open reports whether an escape sequence at the start of raw goes on to its end.
func open(raw []byte) bool {
	if len(raw) == 1 {
		return true
	}
	switch raw[1] {
	case '[':
		for _, c := range raw[2:] {
			if c < 0x20 || c > 0x3f {
				return false
			}
		}
		return true
	case ']', 'P', 'X', '^', '_':
		for i, c := range raw[2:] {
			if c == '\a' || c == '\n' || c == escape && i+3 < len(raw) {
				return false
			}
		}
		return true
	}
	return !slices.ContainsFunc(raw[1:], func(c byte) bool { return c < 0x20 || c > 0x2f })
}

// Tail returns the end of a clean text: at most limit bytes, from a whole character on, and from the start of a line if one begins soon.
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
