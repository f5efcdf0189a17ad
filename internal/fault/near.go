package fault

import (
	"cmp"
	"slices"
	"strings"
)

// nearEnough is the share of a code's letters, in parts of a hundred, that may differ from a text that means it.
const nearEnough = 34

// mostNear bounds the codes that Near returns, and longestNear the text that it compares.
const (
	mostNear    = 3
	longestNear = 64
)

// Near returns the codes that can be explained and are most like a text, the nearest first: those that contain it as
// whole words or the other way round, and those that differ from it by a few letters. It returns at most three.
func Near(text string) []string {
	text = strings.ToLower(strings.NewReplacer("-", "_", " ", "_").Replace(strings.TrimSpace(text)))
	if text == "" || len(text) > longestNear {
		return nil
	}
	type candidate struct {
		code     string
		distance int
	}
	var found []candidate
	for _, e := range Explanations("") {
		distance := edits(text, e.Code)
		words := strings.Contains("_"+e.Code+"_", "_"+text+"_") || strings.Contains("_"+text+"_", "_"+e.Code+"_")
		if words || distance*100 <= nearEnough*len(e.Code) {
			found = append(found, candidate{e.Code, distance})
		}
	}
	slices.SortStableFunc(found, func(a, b candidate) int { return cmp.Compare(a.distance, b.distance) })
	var out []string
	for _, c := range found[:min(len(found), mostNear)] {
		out = append(out, c.code)
	}
	return out
}

// edits returns how many bytes must be inserted, removed or replaced to make one text of the other.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
