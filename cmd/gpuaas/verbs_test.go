package main

import (
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/policy"
)

// TestVerbsOfStatesAreCommands: each verb that the table of states names is a command of this program.
func TestVerbsOfStatesAreCommands(t *testing.T) {
	found := 0
	for _, row := range policy.States() {
		group, list, _ := strings.Cut(row.Verb, " ")
		for verb := range strings.SplitSeq(list, "|") {
			if row.Verb == "" {
				continue
			}
			found++
			if err := parses([]string{group, verb}); err != nil {
				t.Errorf("%s %s: `gpuaas %s %s`: %v", row.Enum, row.State, group, verb, err)
			}
		}
	}
	if found < 20 {
		t.Errorf("only %d verbs", found)
	}
}
