package fault

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// Explanation is the text about a reason that is shown to people.
type Explanation struct {
	Code       string
	Meaning    string
	Impact     string
	Owner      string
	NextAction string
	Action     commonv1.Action
}

// Explain returns the explanation of one reason; for an unknown reason the explanation says that it is unknown.
func Explain(reason commonv1.Reason) Explanation {
	row := RowOf(reason)
	return Explanation{
		Code: names.Of(reason), Meaning: row.Public, Impact: row.Impact, Owner: row.Owner, NextAction: row.Remedy,
		Action: row.Action,
	}
}

// Catalogue returns the explanations of every reason, in the order of the enum.
func Catalogue() []Explanation {
	return explainAll(Explain)
}

// explainAll returns the explanations of all values of an enum, in its order.
func explainAll[E protoreflect.Enum](explain func(E) Explanation) []Explanation {
	all := names.All[E]()
	out := make([]Explanation, len(all))
	for i, value := range all {
		out[i] = explain(value)
	}
	return out
}

// explainShared returns the explanation of a value whose code may be that of a verdict or of a refusal too: it is that
// one then, else the row.
func explainShared[E interface {
	comparable
	protoreflect.Enum
}](value E, rows map[E]Explanation) Explanation {
	code := names.Of(value)
	if reason, err := names.Parse[commonv1.DriftReason](code); err == nil && reason != 0 {
		return ExplainDrift(reason)
	}
	if reason, err := names.Parse[commonv1.Reason](code); err == nil && reason != 0 {
		return Explain(reason)
	}
	e := rows[value]
	e.Code = code
	return e
}

// Runbook returns the page about a code that Explanations knows, as a path in the repository; empty for any other.
func Runbook(code string) string {
	if len(Explanations(code)) != 1 {
		return ""
	}
	return "docs/runbooks/" + strings.ToLower(code) + ".md"
}

// Explanations returns the explanations of everything that is printed as a reason and has this code, in upper or lower
// case: refusals, verdicts, diagnostics, findings, incidents and states. For an empty code it returns all of them, the
// reasons of refusals first. A code that several of them share has one explanation: the verdict's, where it is one.
func Explanations(code string) []Explanation {
	all := Catalogue()
	for _, more := range [][]Explanation{
		DriftCatalogue(), DiagnosticCatalogue(), FindingCatalogue(), IncidentCatalogue(), states,
	} {
		for _, e := range more {
			if i := slices.IndexFunc(all, func(o Explanation) bool { return o.Code == e.Code }); i >= 0 {
				all[i] = e
			} else {
				all = append(all, e)
			}
		}
	}
	if code == "" {
		return all
	}
	return slices.DeleteFunc(all, func(e Explanation) bool { return !strings.EqualFold(e.Code, code) })
}
