package drill_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/drill"
	"github.com/gpuaas/mesh/internal/policy"
)

// TestThePageHasEveryDrill: docs/drills.md has a row of each drill, under its number in the matrix, and of no other.
func TestThePageHasEveryDrill(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "docs", "drills.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n| row | drill |")
	table, _, _ = strings.Cut(table, "\n\n")
	want := map[string]bool{}
	for _, d := range drill.Drills() {
		budget, _ := policy.BudgetOf(d.Name)
		start := fmt.Sprintf("| %d | `%s` |", budget.Row, d.Name)
		want[start] = true
		if !strings.Contains(table, "\n"+start) {
			t.Errorf("docs/drills.md has no row that begins with %q", start)
		}
	}
	for row := range strings.Lines(table) {
		cells := strings.SplitN(row, "|", 4)
		if len(cells) == 4 && strings.Contains(cells[2], "`") && !want["|"+cells[1]+"|"+cells[2]+"|"] {
			t.Errorf("docs/drills.md has a row of%s, which is no drill", cells[2])
		}
	}
}
