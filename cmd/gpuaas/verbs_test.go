package main

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/internal/policy"
)

// reading are the last words of commands that change no state.
var reading = []string{
	"get", "list", "watch", "wait", "timeline", "logs", "actions", "verdicts", "recoveries", "escalate", "diag", "probe",
}

// noWayOut are the commands on objects with states that are no way out of one, with the reason.
var noWayOut = map[string]string{
	"nodes enroll":       "it makes an identity, which has no state before",
	"nodes fence":        "it leads into a state that operators choose; no state needs it to be left",
	"nodes quarantine":   "it leads into a state that operators choose; no state needs it to be left",
	"nodes cordon":       "it keeps new workspaces away; no state of an identity changes",
	"nodes uncordon":     "it lets new workspaces come; no state of an identity changes",
	"nodes accept-facts": "it changes what a machine is expected to have; no state of an identity changes",
	"tokens extend":      "it lengthens the time of issued tokens; each stays issued",
	"workspaces create":  "it makes a workspace, which has no state before",
	"instances end":      "it ends an instance that no row names, which has no state here",
}

// TestVerbsOfStatesAreCommands: each verb that the table of states names is a command of this program that changes
// something, and each such command on the same objects is in the table or stated not to be a way out of a state.
func TestVerbsOfStatesAreCommands(t *testing.T) {
	commands := map[string]bool{}
	groups := map[string]bool{}
	verbs := map[string]bool{}
	for _, row := range policy.States() {
		group, list, _ := strings.Cut(row.Verb, " ")
		for verb := range strings.SplitSeq(list, "|") {
			if row.Verb != "" {
				groups[group], verbs[group+" "+verb] = true, true
			}
		}
	}
	groups["instances"] = true // its states are left by verbs of workspaces alone
	for _, group := range newRoot(kit.New()).Commands() {
		if !groups[group.Name()] {
			continue
		}
		for _, cmd := range group.Commands() {
			if cmd.Runnable() && !cmd.HasSubCommands() && !slices.Contains(reading, cmd.Name()) {
				commands[group.Name()+" "+cmd.Name()] = true
			}
		}
	}
	if len(verbs) < 15 {
		t.Errorf("only %d verbs", len(verbs))
	}
	for _, verb := range slices.Sorted(maps.Keys(verbs)) {
		if !commands[verb] {
			t.Errorf("the table of states names `gpuaas %s`, which is no command that changes something", verb)
		}
		if noWayOut[verb] != "" {
			t.Errorf("`gpuaas %s` is a way out of a state, and is listed as none", verb)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(commands)) {
		if !verbs[name] && noWayOut[name] == "" {
			t.Errorf("`gpuaas %s` changes something, and no state names it as its way out", name)
		}
	}
	for name := range noWayOut {
		if !commands[name] {
			t.Errorf("`gpuaas %s` is listed, and is no command", name)
		}
	}
}
