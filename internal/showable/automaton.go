package showable

import "slices"

// automaton finds values in a text by the method of Aho and Corasick, in time that grows with the length of the text,
// however many values there are and however they overlap. Its states are the beginnings of the values, shorter ones
// first: the children of a state have consecutive numbers, in the order of their last bytes. State 0 is the empty
// beginning.
type automaton struct {
	label  []byte  // the last byte of a state
	first  []int32 // the first child of a state; its children end before the first child of the state after it
	suffix []int32 // the longest other state that a state ends with
	depth  []int32 // the length of a state
	match  []int32 // the length of the longest value that a state ends with; zero if there is none
}

// newAutomaton returns the automaton of values, of which none is empty.
func newAutomaton(values [][]byte) *automaton {
	sorted := slices.Clone(values)
	slices.SortFunc(sorted, slices.Compare)
	a := &automaton{label: []byte{0}, suffix: []int32{0}, depth: []int32{0}, match: []int32{0}}
	type group struct{ from, to, parent int32 } // the values that begin with a state
	// the rules of workloads bound the values to less than a MiB
	groups := []group{{to: int32(len(sorted))}}
	for state := int32(0); int(state) < len(groups); state++ {
		own := groups[state]
		a.first = append(a.first, int32(len(groups)))
		depth := a.depth[state]
		if state > 0 {
			if a.depth[own.parent] > 0 {
				a.suffix[state] = a.next(a.suffix[own.parent], a.label[state])
			}
			if int(depth) == len(sorted[own.from]) {
				a.match[state] = depth
				for own.from < own.to && int(depth) == len(sorted[own.from]) {
					own.from++
				}
			} else {
				a.match[state] = a.match[a.suffix[state]]
			}
		}
		for at := own.from; at < own.to; {
			begin, char := at, sorted[at][depth]
			for at < own.to && sorted[at][depth] == char {
				at++
			}
			groups = append(groups, group{begin, at, state})
			a.label, a.depth = append(a.label, char), append(a.depth, depth+1)
			a.suffix, a.match = append(a.suffix, 0), append(a.match, 0)
		}
	}
	a.first = append(a.first, int32(len(groups)))
	return a
}

// child returns the state that a byte leads to without leaving the beginning of a value.
func (a *automaton) child(state int32, char byte) (int32, bool) {
	from, to := a.first[state], a.first[state+1]
	i, found := slices.BinarySearch(a.label[from:to], char)
	return from + int32(i), found
}

// next returns the longest state that a text ends with after a byte, from the one before it.
func (a *automaton) next(state int32, char byte) int32 {
	for {
		if to, ok := a.child(state, char); ok {
			return to
		}
		if state == 0 {
			return 0
		}
		state = a.suffix[state]
	}
}

// scan returns where values lie whole in a text, and the state at its end. Values that overlap are one span.
func (a *automaton) scan(text []byte) ([]span, int32) {
	var spans []span
	state := int32(0)
	for i, char := range text {
		state = a.next(state, char)
		length := int(a.match[state]) // shorter values that end here lie in the longest one
		if length == 0 {
			continue
		}
		found := span{i + 1 - length, i + 1}
		for n := len(spans); n > 0 && spans[n-1].to > found.from; n-- {
			found.from = min(found.from, spans[n-1].from)
			spans = spans[:n-1]
		}
		spans = append(spans, found)
	}
	return spans, state
}

// begun returns the length of the longest beginning of a value, which goes on, that a state ends with.
func (a *automaton) begun(state int32) int {
	for state > 0 && a.first[state] == a.first[state+1] {
		state = a.suffix[state]
	}
	return int(a.depth[state])
}
