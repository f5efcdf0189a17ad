package drift_test

import (
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// others returns the pages of the codes that are no reasons of verdicts, by the names of their files.
func others() map[string]string {
	return map[string]string{
		"refusals.md": codesPage("Refusals", "What a refused caller is told. The action is what an agent or a client "+
			"does next by itself.", fault.Catalogue(), true),
		"diagnostics.md": codesPage("Diagnostics of hosts", "What an agent records on its host before each retry "+
			"(`gpuaas-node-agent diag`, `gpuaas nodes get NODE`). It explains, and alone proves nothing.",
			fault.DiagnosticCatalogue(), false),
		"findings.md": codesPage("Findings", "What contradicts itself (`gpuaas findings list`, [findings](../findings.md)).",
			fault.FindingCatalogue(), false),
		"incidents.md": codesPage("Incidents", "What is wrong with the control plane, or with many at once "+
			"(`gpuaas incidents list`).", fault.IncidentCatalogue(), false),
	}
}

// codesPage returns the page of one kind of codes. A code that is a verdict's reason too is explained on that page.
func codesPage(title, about string, list []fault.Explanation, action bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n<!-- Made by make runbooks of package fault. -->\n\n%s\nAll reasons of nodes: "+
		"[runbooks](README.md).\n", title, about)
	for _, e := range list {
		fmt.Fprintf(&b, "\n## %s\n\n", e.Code)
		if reason, err := names.Parse[commonv1.DriftReason](e.Code); err == nil && reason != 0 && !action {
			fmt.Fprintf(&b, "See [`%[1]s`](%[1]s.md).\n", e.Code)
			continue
		}
		fmt.Fprintf(&b, "%s.\n\n- Impact: %s.\n- Owner: %s\n- Next action: %s.\n", sentence(e.Meaning), e.Impact, e.Owner,
			e.NextAction)
		if action {
			fmt.Fprintf(&b, "- The caller: `%s`\n", names.Of(e.Action))
		}
	}
	return b.String()
}
