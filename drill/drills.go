package drill

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/drill/kit"
)

// Drills returns every drill, in the order of the matrix.
func Drills() []kit.Drill {
	return []kit.Drill{
		doubleProvision(), register(), wedged(), releaseFailed(), restoreReusesNothing(), oldInstance(),
		diskFull(),
	}
}

// Find returns the drills of these names in the order of the matrix; an unknown name is an error that lists the known
// ones.
func Find(names ...string) ([]kit.Drill, error) {
	all := Drills()
	var unknown []string
	for _, n := range names {
		if !slices.ContainsFunc(all, func(d kit.Drill) bool { return d.Name == n }) {
			unknown = append(unknown, n)
		}
	}
	if len(unknown) > 0 {
		known := make([]string, 0, len(all))
		for _, d := range all {
			known = append(known, d.Name)
		}
		return nil, fmt.Errorf("there is no drill %s; there are %s", strings.Join(unknown, ", "), strings.Join(known, ", "))
	}
	return slices.DeleteFunc(all, func(d kit.Drill) bool { return !slices.Contains(names, d.Name) }), nil
}
