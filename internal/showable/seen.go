package showable

import (
	"bytes"
	"slices"
	"unicode/utf8"
)

// seen is what Clean makes of a raw text, with the place in it of every byte.
type seen struct {
	text []byte
	at   []int32
	from int // where the piece begins that was asked for, behind an escape sequence that its border cuts
	to   int
}

// look returns what is seen of a window, and its piece without the parts of escape sequences that its borders cut.
func look(window []byte, from, to int) seen {
	out := seen{text: make([]byte, 0, len(window)), at: make([]int32, 0, len(window)), from: from, to: to}
	for begin := 0; begin < len(window); {
		size, char := unit(window[begin:])
		end := begin + size
		if char >= 0 {
			before := len(out.text)
			out.text = utf8.AppendRune(out.text, char)
			for i := range out.text[before:] {
				out.at = append(out.at, int32(min(begin+i, end-1))) //nolint:gosec // windows are far smaller
			}
		} else if kind, _ := introducer(window[begin:]); kind >= 0 {
			if begin < from && from < end {
				out.from = min(end, to)
			}
			if begin < to && to < end {
				out.to = max(begin, from)
			}
		}
		begin = end
	}
	out.to = max(out.from, out.to)
	return out
}

// raw returns the parts of the raw text in which spans of the seen text lie, with what stands inside of them.
func (s seen) raw(spans []span) []span {
	out := make([]span, 0, len(spans))
	for _, found := range spans {
		out = append(out, span{int(s.at[found.from]), int(s.at[found.to-1]) + 1})
	}
	return out
}

// plain reports whether everything in a text is seen as it is.
func plain(text []byte) bool {
	acts := func(char rune) bool {
		return char == utf8.RuneError || char == '\t' || char == '\r' || char != '\n' && hidden(char)
	}
	return bytes.IndexFunc(text, acts) < 0
}

// joined returns spans in order, those that overlap as one.
func joined(spans []span) []span {
	slices.SortFunc(spans, func(a, b span) int { return a.from - b.from })
	out := spans[:0]
	for _, one := range spans {
		if n := len(out); n > 0 && one.from < out[n-1].to {
			out[n-1].to = max(out[n-1].to, one.to)
			continue
		}
		out = append(out, one)
	}
	return out
}
