package agent

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

const codeProfileDrift = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENDPOINT_PROFILE_DRIFT

// profileDrift is the last comparison of the profile that the control plane announces with the one that the host has.
type profileDrift struct {
	mu                 sync.Mutex
	announced, present string // fingerprints; both empty: none was compared
	recorded           bool   // their difference is in the record
}

// compareProfile compares the fingerprint in a heartbeat's answer with that of the profile on the host. A difference
// that two answers in a row show is recorded once, until there is another one, and ended when there is none. The agent
// changes nothing: it takes a version when it is offered. An empty fingerprint is compared with nothing.
func (a *Agent) compareProfile(ctx context.Context, announced string) {
	node, ok := a.store.Node()
	present := node.ProfileFingerprint
	if !ok || announced == "" || present == "" || len(announced) > maxFingerprint {
		return
	}
	c := &a.profileDrift
	c.mu.Lock()
	defer c.mu.Unlock()
	again := c.announced == announced && c.present == present
	if again && (c.recorded || announced == present) {
		return
	}
	c.announced, c.present, c.recorded = announced, present, again
	switch {
	case announced == present:
		_, err := a.diag.End(codeProfileDrift)
		a.warn(ctx, "diagnostic not ended", a.noted(err))
	case again:
		a.meters.Retry(codeProfileDrift)
		detail := fmt.Sprintf("the host has version %d of profile %s, of fingerprint %s, and the control plane has %s for "+
			"this node; the host waits for an offer", node.ProfileVersion, node.ProfileName, shortPrint(present),
			shortPrint(announced))
		a.record(ctx, codeProfileDrift, detail, 0)
		a.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "the profile of this host is not the one that the control plane has",
			slog.String("held", present), slog.String("told", announced))
	}
}

// shortPrint returns the begin of a fingerprint, by which people compare two.
func shortPrint(fingerprint string) string { return fingerprint[:min(len(fingerprint), 16)] }

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
	a.record(ctx, codeProfileDrift,
		"the node API is looked for at "+used+", and profile "+node.ProfileName+" of this host has it at "+
			node.ProfileAPI, d.NextRetry)
}
