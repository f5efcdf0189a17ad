package drift_test

import (
	"fmt"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// kinds are the kinds of codes beside verdicts' reasons, each with the page that lists them.
var kinds = []struct {
	file, title, about string
	codes              func() []fault.Explanation
	refusals           bool // what a refused peer does by itself is part of the explanation
}{
	{
		"refusals.md", "Refusals", "What a refused caller is told. The action is what an agent or a client does next by " +
			"itself.", fault.Catalogue, true,
	},
	{
		"diagnostics.md", "Diagnostics of hosts", "What an agent records on its host before each retry " +
			"(`gpuaas-node-agent diag`, `gpuaas nodes get NODE`). It explains, and alone proves nothing.",
		fault.DiagnosticCatalogue, false,
	},
	{
		"findings.md", "Findings", "What contradicts itself (`gpuaas findings list`, [findings](../findings.md)).",
		fault.FindingCatalogue, false,
	},
	{
		"incidents.md", "Incidents", "What is wrong with the control plane, or with many at once " +
			"(`gpuaas incidents list`).", fault.IncidentCatalogue, false,
	},
	{
		"workspaces.md", "Reasons of workspaces", "What a workspace, its operation or its allocation shows of itself " +
			"(`gpuaas workspaces get WS`).", fault.StateCatalogue, false,
	},
}

const madeOfCodes = "<!-- Made by make runbooks of package fault. -->"

// others returns the pages of the codes that are no verdict's reason, and the lists of each kind of codes.
func others(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	listed := map[string][]string{} // the lists that a code is in
	for _, kind := range kinds {
		var b strings.Builder
		fmt.Fprintf(&b, "# %s\n\n%s\n\n%s\nAll reasons of nodes: [runbooks](README.md).\n\n", kind.title, madeOfCodes,
			kind.about)
		action, line := "", ""
		if kind.refusals {
			action, line = " | the caller", "|---"
		}
		fmt.Fprintf(&b, "| code | meaning | next action%s |\n|---|---|---%s|\n", action, line)
		for _, e := range kind.codes() {
			if kind.refusals {
				action = " | `" + names.Of(e.Action) + "`"
			}
			fmt.Fprintf(&b, "| [`%[1]s`](%[1]s.md) | %[2]s | %[3]s%[4]s |\n", e.Code, cell(e.Meaning), cell(e.NextAction),
				action)
			listed[e.Code] = append(listed[e.Code], fmt.Sprintf("[%s](%s)", strings.ToLower(kind.title), kind.file))
		}
		pages[kind.file] = b.String()
	}
	for _, kind := range kinds {
		for _, e := range kind.codes() {
			if reason, err := names.Parse[commonv1.DriftReason](e.Code); err == nil && reason != 0 {
				continue // the verdict's page explains it
			}
			name := e.Code + ".md"
			if page := codePage(e, kind.refusals, listed[e.Code]); pages[name] == "" {
				pages[name] = page
			} else if !strings.HasPrefix(pages[name], "# "+e.Code+"\n") {
				t.Fatalf("the page of the code %s has the name of a list", e.Code)
			}
		}
	}
	return pages
}

// codePage returns the page of one code. Of the lists that it is in the first one's explanation is shown: those of the
// others are the same.
func codePage(e fault.Explanation, refusal bool, lists []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n%s\n\n%s.\n\nImpact: %s.\n\n| | |\n|---|---|\n| owner | %s |\n", e.Code, madeOfCodes,
		sentence(e.Meaning), e.Impact, e.Owner)
	if refusal {
		fmt.Fprintf(&b, "| the refused caller, by itself | `%s` |\n", names.Of(e.Action))
	}
	fmt.Fprintf(&b, "\n## Next action\n\n%s.\n\nAll codes of this kind: %s. "+
		"All reasons of nodes: [runbooks](README.md).\n",
		sentence(e.NextAction), strings.Join(lists, ", "))
	return b.String()
}

// cell returns a text as it may stand in a table.
func cell(text string) string { return strings.ReplaceAll(text, "|", "\\|") }
