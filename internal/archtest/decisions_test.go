package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
)

// decision finds the number of a row of the table of decisions.
var decision = regexp.MustCompile(`(?m)^\| (\d+) \|`)

// TestDecisionsStandInOrder: a reader finds a decision by its number, which no other decision has.
func TestDecisionsStandInOrder(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(root(t), "docs", "decisions", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	last := 0
	for _, match := range decision.FindAllStringSubmatch(string(content), -1) {
		n, err := strconv.Atoi(match[1])
		if err != nil || n <= last {
			t.Errorf("decision %s stands behind decision %d", match[1], last)
		}
		last = max(last, n)
	}
	if last == 0 {
		t.Error("no decision was found")
	}
}
