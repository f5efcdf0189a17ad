package showable

import (
	"bytes"
	"slices"
	"strings"
	"sync"
)

// Masked stands for a secret value. No value that is masked is shorter.
const Masked = "****"

// Mask hides the values of an environment in a program's output. The zero value hides nothing.
type Mask struct {
	values [][]byte // longest first
	find   func() *automaton
}

// NewMask returns the mask of values. Shorter ones than Masked are not hidden: they would be found everywhere, and
// hiding them would reveal more than it hides. Of a value of several lines each line of eight characters and more is
// hidden by itself too, as is a value without the space around it. The first use of a mask takes time and memory in
// proportion to the values, each further one in proportion to the text: keep a mask.
func NewMask(values []string) Mask {
	const line = 8
	var all []string
	for _, value := range values {
		trimmed := strings.TrimSpace(value)
		all = append(all, value, trimmed, Clean([]byte(trimmed)))
		if strings.Contains(trimmed, "\n") {
			for part := range strings.Lines(trimmed) {
				if part = strings.TrimSpace(part); len(part) >= line {
					all = append(all, part)
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b string) int {
		if len(a) != len(b) {
			return len(b) - len(a)
		}
		return strings.Compare(a, b)
	})
	var m Mask
	for _, value := range slices.Compact(all) {
		if len(value) >= len(Masked) {
			m.values = append(m.values, []byte(value))
		}
	}
	m.find = sync.OnceValue(func() *automaton { return newAutomaton(m.values) })
	return m
}

// Margin returns how many visible bytes must lie around a piece in the window that Piece gets, so that it finds every
// value that reaches into the piece.
func (m Mask) Margin() int {
	if len(m.values) == 0 {
		return 0
	}
	return len(m.values[0]) - 1
}

// Around reports whether so many bytes are visible before window[from:to] and behind it that Piece finds every value
// that reaches into the piece. whole means that the window begins between two characters and outside of escape
// sequences; otherwise what lies at its begin may be the rest of a sequence, which is not seen, and does not count.
func (m Mask) Around(window []byte, from, to int, whole bool) (bool, bool) {
	margin := m.Margin()
	if margin == 0 {
		return true, true
	}
	at := find(window[:len(window)-Unfinished(window)], 0, 0).at // an unfinished sequence may be no text
	uncertain := 0
	if !whole {
		uncertain, _ = slices.BinarySearch(at, longest)
	}
	first, _ := slices.BinarySearch(at, int32(from)) // windows are far smaller
	last, _ := slices.BinarySearch(at, int32(to))
	return first-uncertain >= margin, len(at)-last >= margin
}

// span is a part of a window that is hidden.
type span struct{ from, to int }

// Piece returns window[from:to] with every value hidden, also one of which only a part lies in the piece, and one
// inside of which something stands that Clean takes out, such as the colours of a search for a part of it. A value that
// begins in the piece and goes on behind it is hidden in this piece, and its rest in the next. An escape sequence that
// the piece cuts is left out. head and tail mean that the window begins or ends where output is missing: bytes there
// that may be the end or the beginning of a value are hidden as well.
func (m Mask) Piece(window []byte, from, to int, head, tail bool) []byte {
	if len(m.values) == 0 {
		return slices.Clone(window[from:to])
	}
	spans := m.spans(window, tail)
	if head {
		spans = append(spans, m.heads(window, tail)...)
		slices.SortFunc(spans, func(a, b span) int { return a.from - b.from })
	}
	if !plain(window) {
		clean := find(window, from, to)
		from, to = clean.from, clean.to
		spans = append(spans, clean.raw(m.spans(clean.text, false))...)
		if tail { // a sequence that is cut is not seen
			clean = find(window[:len(window)-Unfinished(window)], 0, 0)
			spans = append(spans, clean.raw(m.spans(clean.text, true))...)
			clean = clean.cut(window)
			spans = append(spans, clean.raw(m.spans(clean.text, true))...)
		}
		spans = joined(spans)
	}
	out := make([]byte, 0, to-from)
	at := from
	for _, s := range spans {
		begin, end := max(s.from, at), min(s.to, to)
		if begin >= end {
			continue
		}
		out = append(out, window[at:begin]...)
		// The mask replaces the first bytes of the value: the part of the mask that an earlier piece has returned is not
		// returned again.
		out = append(out, Masked[:max(0, min(end, s.from+len(Masked))-begin)]...)
		at = end
	}
	return append(out, window[at:to]...)
}

// spans returns where values lie in a text, in order, and with tail what may be the beginning of one at its end.
func (m Mask) spans(text []byte, tail bool) []span {
	spans, state := m.find().scan(text)
	if tail {
		if n := m.find().begun(state); n >= len(Masked) {
			spans = append(spans, span{len(text) - n, len(text)})
		}
	}
	slices.SortFunc(spans, func(a, b span) int { return a.from - b.from })
	return spans
}

// heads returns what may be the end of a value at the start of a window that begins anywhere: in a value, and also in
// an escape sequence inside of one. With tail the window ends anywhere too, and may be a part of a value whose
// beginning and end are both missing.
func (m Mask) heads(window []byte, tail bool) []span {
	var out []span
	if n := m.ending(window); n >= len(Masked) {
		out = append(out, span{0, n})
	}
	whole := window[:len(window)-Unfinished(window)]
	starts := make([]seen, 0, 5)
	for _, begin := range resumes(window) {
		starts = append(starts, findFrom(whole, begin, m.Margin(), 0, 0))
	}
	for _, clean := range append(starts, starts[0].begun(window)) {
		n := m.ending(clean.text)
		if tail && len(clean.text) < m.Margin() {
			if m.inside(clean.text) {
				n = len(clean.text)
			}
			if more := clean.cut(window); m.inside(more.text) {
				clean, n = more, len(more.text)
			}
		}
		if n >= len(Masked) {
			out = append(out, clean.raw([]span{{0, n}})...)
		}
	}
	return out
}

// inside reports whether a text is a part of a value.
func (m Mask) inside(text []byte) bool {
	return slices.ContainsFunc(m.values, func(value []byte) bool { return bytes.Contains(value, text) })
}

// Held returns how many bytes at the end of data may be the beginning of a value whose rest has not been written yet,
// or of an escape sequence or a character. head means that data begins where something is missing: all of it may be a
// part of a value then.
func (m Mask) Held(data []byte, head bool) int {
	rest := Unfinished(data)
	if len(m.values) == 0 {
		return rest
	}
	held := max(rest, m.held(data))
	if head {
		for _, begin := range resumes(data) {
			clean := findFrom(data[:len(data)-rest], begin, m.Margin(), 0, 0)
			if n := len(clean.text); n > 0 && n < m.Margin() && m.inside(clean.text) {
				held = max(held, len(data)-int(clean.at[0]))
			}
		}
	}
	if plain(data) {
		return held
	}
	clean := find(data[:len(data)-rest], 0, 0)
	if n := m.held(clean.text); n > 0 {
		held = max(held, len(data)-int(clean.at[len(clean.at)-n]))
	}
	return held
}

func (m Mask) held(text []byte) int {
	spans, state := m.find().scan(text)
	begun := m.find().begun(state)
	if n := len(spans); n > 0 && spans[n-1].to == len(text) && spans[n-1].from <= len(text)-begun {
		return 0 // it is hidden already
	}
	return begun
}

// ending returns how many bytes at the start of a window may be the end of a value whose beginning is missing. It
// follows each value through the window's beginning as the method of Knuth, Morris and Pratt does.
func (m Mask) ending(window []byte) int {
	window = window[:min(len(window), m.Margin())]
	border := make([]int, len(window)+1) // of each beginning: the longest other beginning that it ends with
	longer := func(n int, char byte) int {
		for n > 0 && (n == len(window) || window[n] != char) {
			n = border[n]
		}
		if n < len(window) && window[n] == char {
			n++
		}
		return n
	}
	for i := 1; i < len(window); i++ {
		border[i+1] = longer(border[i], window[i])
	}
	most := 0
	for _, value := range m.values {
		n := 0
		for _, char := range value[1:] { // an end of the value, not the whole
			n = longer(n, char)
		}
		most = max(most, n)
	}
	return most
}
