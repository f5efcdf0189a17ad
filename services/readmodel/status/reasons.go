package status

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Explain returns the rows of a reason, or the rows of all reasons for an empty code.
func Explain(code string) ([]*readmodelv1.ReasonText, error) {
	found := fault.Explanations(code)
	if len(found) == 0 {
		return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no such reason")
	}
	out := make([]*readmodelv1.ReasonText, len(found))
	for i, e := range found {
		out[i] = &readmodelv1.ReasonText{
			Code: e.Code, Meaning: e.Meaning, Impact: e.Impact, Owner: e.Owner, NextAction: e.NextAction, Action: e.Action,
		}
	}
	return out, nil
}
