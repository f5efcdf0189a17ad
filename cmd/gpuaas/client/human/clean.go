package human

import (
	"fmt"
	"io"
	"strings"
	"unicode"
)

// Clean returns a text that is safe as one field of a line, because a text from a node or a tenant may have escape
// sequences for the terminal. A format character, such as one that turns the direction of what follows, is shown by its
// number.
func Clean(s string) string {
	if strings.IndexFunc(s, isFormat) >= 0 {
		var out strings.Builder
		for _, r := range s {
			if isFormat(r) {
				fmt.Fprintf(&out, "<U+%04X>", r)
				continue
			}
			out.WriteRune(r)
		}
		s = out.String()
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || r == unicode.ReplacementChar {
			return ' '
		}
		return r
	}, s)
}

func isFormat(r rune) bool { return unicode.Is(unicode.Cf, r) }

// Note prints a line for people, which is not part of the data.
func Note(w io.Writer, format string, values ...any) {
	_, _ = fmt.Fprintf(w, format+"\n", values...)
}
