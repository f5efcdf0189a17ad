package fault

import (
	"slices"
	"strings"

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
	all := names.All[commonv1.Reason]()
	out := make([]Explanation, len(all))
	for i, reason := range all {
		out[i] = Explain(reason)
	}
	return out
}

// Explanations returns the explanations of everything that is printed as a reason and has this code, in upper or lower
// case; for an empty code it returns all of them, the reasons of refusals first. A code that a refusal and a verdict
// share has one explanation, the verdict's.
func Explanations(code string) []Explanation {
	all := Catalogue()
	for _, e := range DriftCatalogue() {
		if i := slices.IndexFunc(all, func(o Explanation) bool { return o.Code == e.Code }); i >= 0 {
			all[i] = e
		} else {
			all = append(all, e)
		}
	}
	all = append(all, states...)
	if code == "" {
		return all
	}
	return slices.DeleteFunc(all, func(e Explanation) bool { return !strings.EqualFold(e.Code, code) })
}
