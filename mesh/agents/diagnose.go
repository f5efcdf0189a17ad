package agents

import (
	"context"
	"errors"
	"fmt"
	"os/exec"

	"github.com/gpuaas/mesh/agent/identity"
)

// Diagnose runs the agent's program on its host to print what the agent has recorded there, and returns that. The agent
// may be running.
func (a *Agent) Diagnose(ctx context.Context) ([]byte, error) {
	out, err := exec.CommandContext(ctx, a.cfg.Binary, "diag", "-o", "json", "--etc-dir", a.etc(),
		"--state-dir", a.state()).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil, fmt.Errorf("print the diagnostics of %s: %w: %s", a.cfg.Name, err, exit.Stderr)
	}
	if err != nil {
		return nil, fmt.Errorf("print the diagnostics of %s: %w", a.cfg.Name, err)
	}
	return out, nil
}

// TrustFile returns the path of the roots by which the agent verifies the node API.
func (a *Agent) TrustFile() string { return identity.BundleFile(a.etc()) }

// RecoveryTrustFile returns the path of the roots by which the agent verifies enrolment.
func (a *Agent) RecoveryTrustFile() string { return a.pinned() }
