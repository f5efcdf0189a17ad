package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// link finds the target of a Markdown link or image.
var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// code matches text between backticks, in which an index with a call looks like a link.
var code = regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")

// TestLinksLeadSomewhere: every path in the documentation exists, because a reader who finds a broken link stops
// trusting the rest.
func TestLinksLeadSomewhere(t *testing.T) {
	top := root(t)
	seen := 0
	walk(t, func(rel string) {
		if !strings.HasSuffix(rel, ".md") {
			return
		}
		content, err := os.ReadFile(filepath.Join(top, filepath.FromSlash(rel)))
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range link.FindAllStringSubmatch(code.ReplaceAllString(string(content), ""), -1) {
			target, _, _ := strings.Cut(match[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			seen++
			if _, err := os.Stat(filepath.Join(top, filepath.FromSlash(filepath.Dir(rel)),
				filepath.FromSlash(target))); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", rel, match[1])
			}
		}
	})
	if seen == 0 {
		t.Error("no link was found")
	}
}
