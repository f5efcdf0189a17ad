package agents

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/pki"
)

// PointAt has the agent's environment file name other endpoints, which count from the next start on.
func (a *Agent) PointAt(api, enrol string) error {
	return Point(a.envFile(), map[string]string{envfile.APIURL: api, envfile.RecoveryURL: enrol})
}

// Endpoints returns the endpoints in the agent's environment file: those of the node API and of enrolment.
func (a *Agent) Endpoints() (string, string, error) {
	env, err := readEnv(a.envFile())
	return env.Get(envfile.APIURL), env.RecoveryURL(), err
}

// TakeBundle runs the agent's program on its host to take a bundle, as an operator does, and returns what it printed.
// The agent must not run. An empty digest is not named.
func (a *Agent) TakeBundle(ctx context.Context, archive []byte, digest string) ([]byte, error) {
	path := filepath.Join(a.cfg.Dir, "brought.gpuaas-bundle.tar.gz")
	if err := pki.WriteFile(path, archive); err != nil {
		return nil, fmt.Errorf("bring a bundle to %s: %w", a.cfg.Name, err)
	}
	args := []string{"enroll", "--bundle", path, "--etc-dir", a.etc(), "--state-dir", a.state()}
	if digest != "" {
		args = append(args, "--digest", digest)
	}
	if a.cfg.GPUs > 0 {
		args = append(args, "--gpus", strconv.Itoa(a.cfg.GPUs))
	}
	out, err := exec.CommandContext(ctx, a.cfg.Binary, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("take a bundle on %s: %w: %s", a.cfg.Name, err, out)
	}
	return out, errors.Join(err, os.Remove(path))
}
