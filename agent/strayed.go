package agent

import (
	"context"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// noteStrayed records, beside a failure to reach the node API, that node-agent.env names another address than the
// profile that this host was given: then the address is what an operator has to repair, with a bundle.
func (a *Agent) noteStrayed(ctx context.Context, d session.Diagnostic) {
	switch d.Code { // every other failure came from a server of this mesh, or from this host
	case commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED,
		commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_TIMED_OUT,
		commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED,
		commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_NAME_MISMATCH:
	default:
		return
	}
	node, _ := a.store.Node()
	used, err := envfile.HostPort(a.store.Env().Get(envfile.APIURL))
	if err != nil || node.ProfileAPI == "" || node.ProfileAPIOf != node.ProfileFingerprint || used == node.ProfileAPI {
		return
	}
	a.record(ctx, commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENDPOINT_PROFILE_DRIFT,
		"the node API is looked for at "+used+", and profile "+node.ProfileName+" of this host has it at "+
			node.ProfileAPI, d.NextRetry)
}
