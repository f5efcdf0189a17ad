package agents

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpuaas/mesh/agent/identity/envfile"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/reap"
)

// tokenLife is how long a token that was not yet used is assumed to be good.
const tokenLife = 15 * time.Minute

// NeedsToken reports whether the agent can only go on with a new token.
func (a *Agent) NeedsToken() bool {
	if a.Enrolled() {
		return false
	}
	env, err := readEnv(a.envFile())
	if err != nil || env.Get(envfile.Token) == "" {
		return true
	}
	info, err := os.Stat(a.envFile())
	return err != nil || time.Since(info.ModTime()) > tokenLife
}

func readEnv(path string) (envfile.Env, error) {
	data, err := pki.ReadFile(path)
	if err != nil {
		return envfile.Env{}, err
	}
	return envfile.Parse(data)
}

// Furnish writes the files that an installer would: where the mesh is, what to trust, and a token if there is a new
// one. It must not run beside the agent.
func (a *Agent) Furnish(token string) error {
	roots, err := pki.ReadFile(a.cfg.CAFile)
	if err != nil {
		return fmt.Errorf("furnish agent: %w", err)
	}
	pinned := a.pinned()
	for _, path := range []string{filepath.Join(a.etc(), "ca-bundle.crt"), pinned} {
		if have, err := pki.ReadFile(path); err == nil && slices.Equal(have, roots) {
			continue
		}
		if err := pki.WriteFile(path, roots); err != nil {
			return fmt.Errorf("furnish agent: %w", err)
		}
	}
	set := map[string]string{
		envfile.APIURL: a.cfg.APIURL, envfile.RecoveryURL: a.cfg.EnrollURL, envfile.RecoveryBundle: pinned,
		envfile.TrustDomain: a.cfg.TrustDomain, envfile.NodeName: a.cfg.Name,
	}
	if token != "" {
		set[envfile.Token] = token
	}
	if err := Point(a.envFile(), set); err != nil {
		return fmt.Errorf("furnish agent: %w", err)
	}
	return nil
}

// Point sets variables in an agent's environment file and leaves the others alone. A file that has these values already
// is not written.
func Point(path string, set map[string]string) error {
	var env envfile.Env
	found, err := pki.Exists(path)
	if err != nil {
		return err
	}
	if found {
		if env, err = readEnv(path); err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
	}
	before := string(env.Render())
	for _, name := range []string{
		envfile.APIURL, envfile.RecoveryURL, envfile.RecoveryBundle, envfile.TrustDomain,
		envfile.NodeName, envfile.Token,
	} {
		if value, ok := set[name]; ok {
			env = env.With(name, value)
		}
	}
	if after := string(env.Render()); after != before {
		return pki.WriteFile(path, []byte(after))
	}
	return nil
}

// PointInstances writes the present addresses of the mesh to the instances that a process driver launched below dir. An
// instance with other addresses is powered off first; the driver powers it on again.
func PointInstances(ctx context.Context, dir, apiURL, enrollURL string) error {
	files, err := filepath.Glob(filepath.Join(dir, "boxes", "*", "etc", "node-agent.env"))
	if err != nil {
		return fmt.Errorf("list instances: %w", err)
	}
	for _, file := range files {
		env, err := readEnv(file)
		if err != nil {
			return fmt.Errorf("read %s: %w", file, err)
		}
		if env.Get(envfile.APIURL) == apiURL && env.Get(envfile.RecoveryURL) == enrollURL {
			continue
		}
		instance := filepath.Dir(filepath.Dir(file))
		if _, err := reap.EndAgents(ctx, instance, Program, 2*time.Second); err != nil {
			return err
		}
		if err := Point(file, map[string]string{envfile.APIURL: apiURL, envfile.RecoveryURL: enrollURL}); err != nil {
			return fmt.Errorf("point instance: %w", err)
		}
	}
	return nil
}
