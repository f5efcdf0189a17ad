package fault_test

import (
	"os"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestEveryRunbookIsThere: the page that is named for a code exists.
func TestEveryRunbookIsThere(t *testing.T) {
	testkit.IO(t)
	for _, e := range fault.Explanations("") {
		page := fault.Runbook(e.Code)
		text, err := os.ReadFile("../../" + page)
		if err != nil || !strings.HasPrefix(string(text), "# "+e.Code) && !strings.HasPrefix(string(text), "# `"+e.Code) {
			t.Errorf("%s: %q: %v", e.Code, page, err)
		}
	}
	if got := fault.Runbook("no_such_code"); got != "" {
		t.Errorf("%s", got)
	}
	if got := fault.Runbook(""); got != "" {
		t.Errorf("%s", got)
	}
}
