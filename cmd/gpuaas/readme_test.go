package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
)

// TestReadmeNamesWhatIsMissing: no command that it lists as missing is there.
func TestReadmeNamesWhatIsMissing(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, ok := strings.Cut(string(text), "these do not exist yet")
	if !ok {
		return // nothing is missing any more
	}
	commands := regexp.MustCompile("`([a-z -]+)`")
	n := 0
	for line := range strings.Lines(list) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			continue
		}
		missing, _, _ := strings.Cut(cells[2], ":")
		for _, found := range commands.FindAllStringSubmatch(missing, -1) {
			n++
			words := strings.Fields(found[1])
			cmd, rest, err := newRoot(client.New()).Find(words)
			if err == nil && len(rest) == 0 && cmd.Name() == words[len(words)-1] {
				t.Errorf("README says that %q does not exist, and it does", found[1])
			}
		}
	}
	if n == 0 {
		t.Error("the table of README is not recognised")
	}
}
