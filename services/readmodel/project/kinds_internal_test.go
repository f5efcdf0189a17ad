package project

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestEveryKindIsReadAndMakesRows: a kind without an entry would make no row, and one that Kinds lacks is not read.
func TestEveryKindIsReadAndMakesRows(t *testing.T) {
	kinds := Kinds()
	slices.Sort(kinds)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(rowsOf)), kinds); diff != "" {
		t.Errorf("the kinds that are read, and not those that make rows (-make rows +are read):\n%s", diff)
	}
}
