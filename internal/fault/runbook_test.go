package fault_test

import (
	"os"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestEveryRunbookIsThere: the page that is named for a code exists, with a heading of the code where the page has
// several.
func TestEveryRunbookIsThere(t *testing.T) {
	testkit.IO(t)
	for _, list := range [][]fault.Explanation{
		fault.Catalogue(), fault.DriftCatalogue(), fault.DiagnosticCatalogue(), fault.FindingCatalogue(),
		fault.IncidentCatalogue(),
	} {
		for _, e := range list {
			page, heading, several := strings.Cut(fault.Runbook(e.Code), "#")
			text, err := os.ReadFile("../../" + page)
			if err != nil || page == "" {
				t.Errorf("%s: %q: %v", e.Code, page, err)
				continue
			}
			if several && !strings.Contains(string(text), "\n## "+heading+"\n") {
				t.Errorf("%s has no heading %s", page, heading)
			}
		}
	}
	if got := fault.Runbook("no_such_code"); got != "" {
		t.Errorf("%s", got)
	}
}
