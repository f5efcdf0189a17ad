package showable

import (
	"bytes"
	"slices"
	"unicode/utf8"
)

// seen is the result of Clean for a raw text, with the place in the raw text of every byte.
type seen struct {
	text []byte
	at   []int32
	from int // where the piece begins that was asked for, behind an escape sequence that its border cuts
	to   int
}

// find returns the visible text of a window, and its piece without the parts of escape sequences that its borders cut.
func find(window []byte, from, to int) seen {
	return findFrom(window, 0, len(window), from, to)
}

// findFrom returns the visible text of a window from a place on, up to about most bytes, and its piece as find does.
func findFrom(window []byte, begin, most, from, to int) seen {
	size := max(0, min(len(window)-begin, most))
	out := seen{text: make([]byte, 0, size), at: make([]int32, 0, size), from: from, to: to}
	for begin < len(window) && len(out.text) < most {
		size, char := unit(window[begin:])
		end := begin + size
		if char >= 0 {
			before := len(out.text)
			out.text = utf8.AppendRune(out.text, char)
			for i := range out.text[before:] {
				out.at = append(out.at, int32(min(begin+i, end-1))) // windows are far smaller
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

// begun returns the visible text of a window together with the part of a character at its start.
func (s seen) begun(window []byte) seen {
	n := 0
	for n < min(len(window), utf8.UTFMax-1) && !utf8.RuneStart(window[n]) {
		n++
	}
	if n == 0 || len(s.at) > 0 && int(s.at[0]) < n {
		return s
	}
	s.text = slices.Concat(window[:n], s.text)
	s.at = slices.Concat([]int32{0, 1, 2}[:n], s.at)
	return s
}

// cut returns the visible text of a window together with the part of a character at its end.
func (s seen) cut(window []byte) seen {
	at := len(window) - Unfinished(window)
	if at == len(window) || utf8.FullRune(window[at:]) {
		return s
	}
	for ; at < len(window); at++ {
		s.text, s.at = append(s.text, window[at]), append(s.at, int32(at)) // windows are far smaller
	}
	return s
}

// raw returns the parts of the raw text in which spans of the seen text lie, with what stands inside of them.
func (s seen) raw(spans []span) []span {
	out := make([]span, 0, len(spans))
	for _, found := range spans {
		out = append(out, span{int(s.at[found.from]), int(s.at[found.to-1]) + 1})
	}
	return out
}

// resumes returns where text may begin in a window whose begin may lie inside of an escape sequence: at the begin,
// behind the rest of a sequence of which the window lacks ESC, behind the rest of the parameters of one, and behind
// that of the text of one.
func resumes(window []byte) []int {
	window = window[:min(len(window), longest)]
	length, _ := sequence(append([]byte{escape}, window...))
	out := []int{0, length - 1}
	final := bytes.IndexFunc(window, func(char rune) bool { return char < 0x20 || char > 0x3f })
	if final >= 0 && window[final] >= 0x40 && window[final] <= 0x7e {
		out = append(out, final+1)
	}
	for at := 0; at < len(window); {
		char, size := utf8.DecodeRune(window[at:])
		switch char {
		case '\a', '\u009c':
			return append(out, at+size)
		case escape:
			return append(out, min(at+2, len(window)))
		case '\n':
			return out
		}
		at += size
	}
	return out
}

// plain reports whether every byte of a text is visible unchanged.
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
