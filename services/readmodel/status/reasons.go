package status

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// ExplainToTenant returns the rows that Explain returns, without those of reasons that a person of a tenant is not
// shown. Of a reason that is not about their own request the next action is to wait.
func ExplainToTenant(code string) ([]*readmodelv1.ReasonText, error) {
	rows, err := Explain(code)
	var out []*readmodelv1.ReasonText
	for _, row := range rows {
		reason, parseErr := names.Parse[commonv1.Reason](row.GetCode())
		if parseErr != nil || !fault.ForTenants(reason) {
			continue
		}
		if !fault.OfCaller(reason) {
			row.NextAction, row.Owner = "wait, and ask your operator if it stays", "operator"
		}
		out = append(out, row)
	}
	if err == nil && len(out) == 0 {
		return nil, fault.NoSuch("reason", code)
	}
	return out, err
}

// Explain returns the rows of a reason, or the rows of all reasons for an empty code.
func Explain(code string) ([]*readmodelv1.ReasonText, error) {
	found := fault.Explanations(code)
	if len(found) == 0 {
		return nil, fault.NoSuch("reason", code)
	}
	out := make([]*readmodelv1.ReasonText, len(found))
	for i, e := range found {
		out[i] = &readmodelv1.ReasonText{
			Code: e.Code, Meaning: e.Meaning, Impact: e.Impact, Owner: e.Owner, NextAction: e.NextAction, Action: e.Action,
		}
	}
	return out, nil
}
