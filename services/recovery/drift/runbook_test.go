package drift_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/runbook"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// pages is the directory of the runbooks' pages, which GPUAAS_UPDATE_GOLDEN=1 makes anew.
const pages = "../../../docs/runbooks"

// TestExplanationsAgreeWithTheCatalogue: explain reason names the owner and the next action that verdicts have, and has
// a text for each.
func TestExplanationsAgreeWithTheCatalogue(t *testing.T) {
	for _, row := range drift.Catalogue() {
		code := names.Of(row.Reason)
		found := fault.Explanations(code)
		if len(found) != 1 {
			t.Errorf("%s has %d explanations", code, len(found))
			continue
		}
		e := found[0]
		if e.Code != code || e.Meaning == "" || e.Impact == "" || e.Action == 0 {
			t.Errorf("explanation of %s: %+v", code, e)
		}
		if e.Owner != row.Owner || e.NextAction != row.NextAction {
			t.Errorf("%s is explained with owner %q and next action %q, verdicts have %q and %q", code, e.Owner, e.NextAction,
				row.Owner, row.NextAction)
		}
	}
}

// TestRunbooksAreMadeOfTheCatalogue: docs/runbooks has one page for each code that can be explained, and a list of each
// kind of codes, with what the catalogue says, and no other page.
func TestRunbooksAreMadeOfTheCatalogue(t *testing.T) {
	want := others(t)
	want["README.md"] = index()
	for _, row := range drift.Catalogue() {
		steps, ok := runbook.OfReason(row.Reason)
		if !ok || len(steps.Check) == 0 || len(steps.Steps) == 0 {
			t.Errorf("the runbook has no whole entry for %s: %+v", names.Of(row.Reason), steps)
		}
		want[names.Of(row.Reason)+".md"] = page(row, steps)
	}
	if os.Getenv("GPUAAS_UPDATE_GOLDEN") != "" {
		write(t, want)
	}
	for _, e := range fault.Explanations("") {
		if want[e.Code+".md"] == "" {
			t.Errorf("%s can be explained, and has no page", e.Code)
		}
	}
	got := map[string]string{}
	found, err := filepath.Glob(filepath.Join(pages, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got[filepath.Base(path)] = string(text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("docs/runbooks is not what the catalogue says, run make runbooks (-want +got):\n%s", diff)
	}
}

func write(t *testing.T, files map[string]string) {
	t.Helper()
	if err := os.RemoveAll(pages); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(pages, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(pages, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

const made = "<!-- Made by make runbooks of internal/fault/rows_drift.go, internal/runbook/reasons.go and " +
	"services/recovery/drift/rows.go. -->\n"

func index() string {
	var b strings.Builder
	b.WriteString("# Runbooks\n\n" + made + `
One page for each code that ` + "`gpuaas explain reason CODE`" + ` explains without a mesh: CODE.md. Below are the
reasons that the verdict about a node may name (` + "`gpuaas nodes get NODE`" + `).
Of several reasons that hold at once the verdict names the one of the highest severity.
` + "`disconnected`" + ` is shown without a verdict. Terms are those of the [glossary](../glossary.md).

Other codes: [refusals](refusals.md), [diagnostics of hosts](diagnostics.md), [findings](findings.md),
[incidents](incidents.md), [reasons of workspaces](workspaces.md).
`)
	for _, severity := range names.All[commonv1.Severity]() {
		fmt.Fprintf(&b, "\n## %s\n\n| reason | people see | owner | next action |\n|---|---|---|---|\n",
			strings.ToUpper(names.Of(severity)))
		for _, row := range drift.Catalogue() {
			if row.Severity == severity {
				fmt.Fprintf(&b, "| [`%[1]s`](%[1]s.md) | `%s` | %s | %s |\n", names.Of(row.Reason), names.Of(row.UserState),
					row.Owner, row.NextAction)
			}
		}
	}
	return b.String()
}

func page(row drift.Row, steps runbook.Reason) string {
	e := fault.ExplainDrift(row.Reason)
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n%s\n%s.\n\nImpact: %s.\n\n", e.Code, made, sentence(e.Meaning), e.Impact)
	fmt.Fprintf(&b, "| | |\n|---|---|\n| severity | %s |\n| people see | `%s` |\n| owner | %s |\n"+
		"| detected within | %s |\n| over within | %s |\n| budgets | row `%s` of the failure matrix |\n",
		strings.ToUpper(names.Of(row.Severity)), names.Of(row.UserState), row.Owner, span(row.DetectWithin),
		span(row.RecoverWithin), row.Drill)
	fmt.Fprintf(&b, "\n## Next action\n\n%s.\n\n## Check\n\n", sentence(row.NextAction))
	for i, line := range steps.Check {
		fmt.Fprintf(&b, "%d. %s.\n", i+1, sentence(line))
	}
	b.WriteString("\n## Steps\n\n")
	for i, line := range steps.Steps {
		fmt.Fprintf(&b, "%d. %s.\n", i+1, sentence(line))
	}
	b.WriteString("\nIt is over when `gpuaas nodes get NODE` names no reason, or another one. All reasons: " +
		"[runbooks](README.md).\n")
	return b.String()
}

// sentence returns the text with a capital letter, unless it begins with a command.
func sentence(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// span returns a duration without the zeros at its end.
func span(d time.Duration) string {
	text := strings.Replace(d.String(), "m0s", "m", 1)
	return strings.Replace(text, "h0m", "h", 1)
}
