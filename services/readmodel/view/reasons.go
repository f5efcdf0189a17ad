package view

import (
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// nodeReasons explain what Describe says beside the reasons of refusals.
var nodeReasons = []*readmodelv1.ReasonText{
	{
		Code: ReasonDisconnected, Meaning: "the node has no session now; it was heard a short time ago",
		Impact: "no work is offered to it; its workloads go on", Owner: "agent", NextAction: "wait: it connects again by itself",
		Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: ReasonAgentDown, Meaning: "nothing was heard of the agent for longer than node.heartbeat_stale_after_seconds, while we listened",
		Impact: "no work is offered to it; its workloads go on unless the host is down", Owner: "agent / host",
		NextAction: "wait; restart the agent on its host", Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: ReasonOutage, Meaning: "no replica of nodeapi listens, so no silence means anything",
		Impact: "running workloads go on; operations wait", Owner: "control plane", NextAction: "restore nodeapi or its database",
		Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: ReasonTokenReuse, Meaning: "an enrolment token was used with two keys; its family is revoked",
		Impact: "the node is on hold", Owner: "security", NextAction: "fence it and give the machine a new identity",
		Action: commonv1.Action_ACTION_STOP,
	},
}

// Explain answers the rows of a reason, all of them for an empty code.
func Explain(code string) ([]*readmodelv1.ReasonText, error) {
	var out []*readmodelv1.ReasonText
	add := func(r *readmodelv1.ReasonText) {
		if code == "" || strings.EqualFold(code, r.GetCode()) {
			out = append(out, r)
		}
	}
	for _, e := range fault.Catalogue() {
		add(&readmodelv1.ReasonText{
			Code: e.Code, Meaning: e.Meaning, Impact: e.Impact, Owner: e.Owner, NextAction: e.NextAction, Action: e.Action,
		})
	}
	for _, r := range append(slices.Clone(nodeReasons), workspaceReasons...) {
		add(r)
	}
	if len(out) == 0 {
		return nil, notFound("reason")
	}
	return out, nil
}
