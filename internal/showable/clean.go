// Package showable makes what a tenant's program has written fit to be sent and shown: it masks the values of the program's environment, takes out what a
// terminal would act on, and cuts at whole characters.
//
// It is pure functions, and believes nothing about the bytes: they may be of any encoding, begin in the middle of a character and end in one.
package showable

import (
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
		if raw[0] == escape {
			raw = raw[escapeLength(raw):]
			continue
		}
		char, size := utf8.DecodeRune(raw)
		rest := raw[size:]
		switch {
		case char == '\n':
			out.WriteByte('\n')
		case char == '\r':
			if len(rest) == 0 || rest[0] != '\n' {
				out.WriteByte('\n')
			}
		case char == '\t':
			out.WriteByte(' ')
		case char == utf8.RuneError && size <= 1, hidden(char):
		default:
			out.WriteRune(char)
		}
		raw = rest
	}
	return out.String()
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
	return false
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
