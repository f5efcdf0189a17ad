package showable

import (
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

// NewMask returns the mask of values. Shorter ones than Masked are not hidden: they would be found everywhere, and hiding them would tell more than it
// hides. Of a value of several lines each line of eight characters and more is hidden by itself too, as is a value without the space around it.
// The first use of a mask takes time and memory in proportion to the values, each further one in proportion to the text: keep a mask.
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

// Margin is how many bytes that are seen must lie around a piece in the window that Piece gets, so that it finds every value that reaches into the piece.
func (m Mask) Margin() int {
	if len(m.values) == 0 {
		return 0
	}
	return len(m.values[0]) - 1
}

// Around reports whether so much is seen before window[from:to] and behind it that Piece finds every value that reaches into the piece.
func (m Mask) Around(window []byte, from, to int) (bool, bool) {
	margin := m.Margin()
	if margin == 0 {
		return true, true
	}
	at := look(window[:len(window)-Unfinished(window)], 0, 0).at // what is unfinished may be no text
	first, _ := slices.BinarySearch(at, int32(from))             //nolint:gosec // windows are far smaller
	last, _ := slices.BinarySearch(at, int32(to))                //nolint:gosec // as above
	return first >= margin, len(at)-last >= margin
}

// span is a part of a window that is hidden.
type span struct{ from, to int }

// Piece returns window[from:to] with every value hidden, also one of which only a part lies in the piece, and one inside of which something stands that
// Clean takes out, such as the colours of a search for a part of it. A value that begins in the piece and goes on behind it is hidden in this piece, and
// its rest in the next. An escape sequence that the piece cuts is left out. head and tail mean that the window begins or ends where something is missing:
// what may be the end or the beginning of a value there is hidden as well.
func (m Mask) Piece(window []byte, from, to int, head, tail bool) []byte {
	if len(m.values) == 0 {
		return slices.Clone(window[from:to])
	}
	spans := m.spans(window, head, tail)
	if !plain(window) {
		clean := look(window, from, to)
		spans = joined(append(spans, clean.raw(m.spans(clean.text, head, tail))...))
		from, to = clean.from, clean.to
	}
	out := make([]byte, 0, to-from)
	at := from
	for _, s := range spans {
		begin, end := max(s.from, at), min(s.to, to)
		if begin >= end {
			continue
		}
		out = append(out, window[at:begin]...)
		// The mask stands in the place of the first bytes: what a piece before has shown of it is not shown again.
		out = append(out, Masked[:max(0, min(end, s.from+len(Masked))-begin)]...)
		at = end
	}
	return append(out, window[at:to]...)
}

// spans returns where values lie in a text, in order.
func (m Mask) spans(text []byte, head, tail bool) []span {
	spans, state := m.find().scan(text)
	if head {
		if n := m.ending(text); n >= len(Masked) {
			spans = append(spans, span{0, n})
		}
	}
	if tail {
		if n := m.find().begun(state); n >= len(Masked) {
			spans = append(spans, span{len(text) - n, len(text)})
		}
	}
	slices.SortFunc(spans, func(a, b span) int { return a.from - b.from })
	return spans
}

// Held returns how many bytes at the end of data may be the beginning of a value whose rest has not been written yet, or of an escape sequence or a
// character.
func (m Mask) Held(data []byte) int {
	rest := Unfinished(data)
	if len(m.values) == 0 {
		return rest
	}
	held := max(rest, m.held(data))
	if plain(data) {
		return held
	}
	clean := look(data[:len(data)-rest], 0, 0)
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

// ending returns how many bytes at the start of a window may be the end of a value whose beginning is missing. It follows each value through the window's
// beginning as the method of Knuth, Morris and Pratt does.
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
