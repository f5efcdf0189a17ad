package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/runbook"
)

// TestAdviceNamesCommandsThatExist: each command line in the advice of a reason or of a step can be parsed.
func TestAdviceNamesCommandsThatExist(t *testing.T) {
	var texts []string
	for _, e := range fault.Explanations("") {
		texts = append(texts, e.Meaning, e.NextAction, e.Impact)
	}
	for _, step := range runbook.Rows() {
		texts = append(texts, step.Cause, step.Advice)
	}
	for _, reason := range names.All[commonv1.DriftReason]() {
		row, _ := runbook.OfReason(reason)
		texts = append(texts, slices.Concat(row.Check, row.Steps)...)
	}
	quoted := regexp.MustCompile("`gpuaas ([^`]*)`")
	n := 0
	for _, text := range texts {
		for _, line := range quoted.FindAllStringSubmatch(text, -1) {
			n++
			if err := parses(strings.Fields(line[1])); err != nil {
				t.Errorf("%q advises `gpuaas %s`: %v", text, line[1], err)
			}
		}
	}
	if n < 10 {
		t.Errorf("only %d command lines are found", n)
	}
}

// parses returns an error if the names or the flags of a command line are wrong.
func parses(words []string) error {
	root := newRoot(kit.New())
	cmd, rest, err := root.Find(words)
	if err != nil {
		return err
	}
	if cmd.HasSubCommands() {
		return kit.UnknownCommand(cmd, strings.Join(append(rest, "?"), " "))
	}
	for _, word := range rest {
		if name, ok := strings.CutPrefix(word, "--"); ok && cmd.Flags().Lookup(name) == nil &&
			cmd.InheritedFlags().Lookup(name) == nil {
			return exit.Usage(fmt.Errorf("unknown flag %s", word))
		}
	}
	return nil
}
