package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
)

// TestReadmeNamesWhatIsMissing: no command that README lists as missing exists.
func TestReadmeNamesWhatIsMissing(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, ok := strings.Cut(string(text), "these do not exist yet")
	if !ok {
		return // README lists nothing as missing
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
			cmd, rest, err := newRoot(kit.New()).Find(words)
			if err == nil && len(rest) == 0 && cmd.Name() == words[len(words)-1] {
				t.Errorf("README says that %q does not exist, and it does", found[1])
			}
		}
	}
	if n == 0 {
		t.Error("the table of README is not recognised")
	}
}

// TestReadmeNamesTheVerbsWithADryRun: the verbs that ask and that README names with --dry-run have that flag, and the
// others do not.
func TestReadmeNamesTheVerbsWithADryRun(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "cannot be taken back (")
	list, rest, _ := strings.Cut(rest, ")")
	sentence, _, found := strings.Cut(rest, " have it.")
	_, sentence, named := strings.Cut(sentence, "`--dry-run`")
	if !found || !named {
		t.Fatal("README does not say which verbs have --dry-run")
	}
	promised := func(path string) bool {
		group, verb, _ := strings.Cut(path, " ")
		return strings.Contains(sentence, "of "+group) || strings.Contains(sentence, "`"+path+"`") ||
			strings.Contains(sentence, "`"+verb+"`")
	}
	groups := map[string]string{
		"decommission": "workspaces", "recreate": "workspaces", "skip-undo": "workspaces",
		"force-release": "allocations",
	}
	for _, verb := range regexp.MustCompile("`([a-z -]+)`").FindAllStringSubmatch(list, -1) {
		path := verb[1]
		if group, bare := groups[path]; bare {
			path = group + " " + path
		}
		cmd, rest, err := newRoot(kit.New()).Find(strings.Fields(path))
		if err != nil || len(rest) > 0 || cmd.Flags().Lookup("yes") == nil {
			t.Errorf("README says that %q asks: %v, %q", path, err, rest)
			continue
		}
		if has := cmd.Flags().Lookup("dry-run") != nil; has != promised(path) {
			t.Errorf("%s has --dry-run: %t; README promises it: %t", path, has, promised(path))
		}
	}
}
