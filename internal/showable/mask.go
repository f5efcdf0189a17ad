package showable

import (
	"bytes"
	"slices"
	"strings"
)

// Masked stands for a secret value. No value that is masked is shorter.
const Masked = "****"

// Mask hides the values of an environment in a program's output. The zero value hides nothing.
type Mask struct {
	values [][]byte // longest first
}

// NewMask returns the mask of values. Shorter ones than Masked are not hidden: they would be found everywhere, and hiding them would tell more than it
// hides. Of a value of several lines each line of eight characters and more is hidden by itself too, as is a value without the space around it.
func NewMask(values []string) Mask {
	const line = 8
	var all []string
	for _, value := range values {
		trimmed := strings.TrimSpace(value)
		all = append(all, value, trimmed)
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
	return m
}

// Margin is how many bytes around a piece Piece must see to find every value that reaches into it.
func (m Mask) Margin() int {
	if len(m.values) == 0 {
		return 0
	}
	return len(m.values[0]) - 1
}

// span is a part of a window that is hidden.
type span struct{ from, to int }

// Piece returns window[from:to] with every value hidden, also one of which only a part lies in the piece. A value that begins in the piece and goes on
// behind it is hidden in this piece, and its rest in the next. head and tail say that the window begins or ends where something is missing: what may be
// the end or the beginning of a value there is hidden as well.
func (m Mask) Piece(window []byte, from, to int, head, tail bool) []byte {
	spans := m.spans(window)
	if head {
		spans = append(spans, span{0, m.cut(window, bytes.HasPrefix, func(value []byte, n int) []byte { return value[len(value)-n:] })})
	}
	if tail {
		n := m.cut(window, bytes.HasSuffix, func(value []byte, n int) []byte { return value[:n] })
		spans = append(spans, span{len(window) - n, len(window)})
	}
	slices.SortFunc(spans, func(a, b span) int { return a.from - b.from })
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

// Held returns how many bytes at the end of data may be the beginning of a value whose rest has not been written yet.
func (m Mask) Held(data []byte) int {
	spans := m.spans(data)
	most := 0
	for _, value := range m.values {
		for n := min(len(value)-1, len(data)); n > most; n-- {
			if bytes.HasSuffix(data, value[:n]) && !covered(spans, len(data)-n, len(data)) {
				most = n
				break
			}
		}
	}
	return most
}

func covered(spans []span, from, to int) bool {
	return slices.ContainsFunc(spans, func(s span) bool { return s.from <= from && s.to >= to })
}

// spans returns where values lie whole. Overlapping ones are joined.
func (m Mask) spans(window []byte) []span {
	var found []span
	for _, value := range m.values {
		for at := 0; ; {
			i := bytes.Index(window[at:], value)
			if i < 0 {
				break
			}
			found = append(found, span{at + i, at + i + len(value)})
			at += i + 1
		}
	}
	slices.SortFunc(found, func(a, b span) int { return a.from - b.from })
	var out []span
	for _, s := range found {
		if n := len(out); n > 0 && s.from < out[n-1].to {
			out[n-1].to = max(out[n-1].to, s.to)
			continue
		}
		out = append(out, s)
	}
	return out
}

// cut returns the length of the longest part of a value, of at least Masked's length, that lies at an end of the window.
func (m Mask) cut(window []byte, at func(s, part []byte) bool, part func(value []byte, n int) []byte) int {
	most := 0
	for _, value := range m.values {
		for n := min(len(value)-1, len(window)); n >= max(len(Masked), most+1); n-- {
			if at(window, part(value, n)) {
				most = n
				break
			}
		}
	}
	return most
}
