package compose_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/compose"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/topology"
)

const root = "../.."

// project loads the compose file as compose itself would, with every profile and an empty environment.
func project(t *testing.T) *types.Project {
	t.Helper()
	opts, err := cli.NewProjectOptions(
		[]string{filepath.Join(root, "docker-compose.yaml")},
		cli.WithDefaultProfiles("*"),
		cli.WithInterpolation(true),
		cli.WithConsistency(true),
		cli.WithResolvedPaths(true),
	)
	if err != nil {
		t.Fatal(err)
	}
	p, err := opts.LoadProject(t.Context())
	if err != nil {
		t.Fatalf("load docker-compose.yaml: %v", err)
	}
	return p
}

// oneShot reports whether a service runs to its end: others wait for its success rather than its health.
func oneShot(s types.ServiceConfig) bool {
	return s.Restart == types.RestartPolicyNo
}

func TestComposeHasTheMesh(t *testing.T) {
	p := project(t)
	for _, name := range []string{
		"postgres", "redis", "step-ca", "recovery", "lifecycle", "nodeapi", "readmodel",
		"agent",
	} {
		if _, ok := p.Services[name]; !ok {
			t.Errorf("service %s is missing", name)
		}
	}
}

// TestTheAgentsFilesOutliveItsContainer: what an agent keeps by default stands in volumes, the table of workspaces'
// users too. A table that begins anew may give a workspace the user as whom another's files stand in the state.
func TestTheAgentsFilesOutliveItsContainer(t *testing.T) {
	p := project(t)
	for _, name := range []string{"agent", "agent-enroll"} {
		for _, dir := range []string{agent.DefaultEtcDir, agent.DefaultStateDir, agent.DefaultUIDDir} {
			if !slices.ContainsFunc(p.Services[name].Volumes, func(v types.ServiceVolumeConfig) bool {
				return v.Target == dir && v.Type == types.VolumeTypeVolume && v.Source != ""
			}) {
				t.Errorf("%s of %s ends with its container", dir, name)
			}
		}
	}
}

func TestComposeServices(t *testing.T) {
	p := project(t)
	for name, s := range p.Services {
		t.Run(name, func(t *testing.T) {
			if !oneShot(s) && (s.HealthCheck == nil || len(s.HealthCheck.Test) == 0 || s.HealthCheck.Disable) {
				t.Error("no healthcheck")
			}
			_, tag, tagged := strings.Cut(s.Image, ":")
			if !tagged || tag == "" || tag == "latest" {
				t.Errorf("image %q is not pinned", s.Image)
			}
			if s.Build != nil {
				dockerfile := s.Build.Dockerfile
				if !filepath.IsAbs(dockerfile) {
					dockerfile = filepath.Join(s.Build.Context, dockerfile)
				}
				source, err := os.ReadFile(dockerfile)
				if err != nil {
					t.Fatalf("dockerfile: %v", err)
				}
				if stage := regexp.MustCompile(`(?m)^FROM .* AS ` + regexp.QuoteMeta(s.Build.Target) + `$`); !stage.Match(source) {
					t.Errorf("the dockerfile has no stage %q", s.Build.Target)
				}
				if !regexp.MustCompile(`go build [^\n]*-tags release`).Match(source) {
					t.Error("the image is no release build: it takes failpoints, clock offsets and facts from its environment")
				}
			}
			for dep, how := range s.DependsOn {
				target, ok := p.Services[dep]
				switch {
				case !ok:
					t.Errorf("depends on %s, which is no service", dep)
				case oneShot(target) && how.Condition != types.ServiceConditionCompletedSuccessfully:
					t.Errorf("%s runs to its end: wait for its success, not %q", dep, how.Condition)
				case !oneShot(target) && how.Condition != types.ServiceConditionHealthy:
					t.Errorf("wait until %s is healthy, not %q", dep, how.Condition)
				}
			}
			for _, port := range s.Ports {
				if port.HostIP != "127.0.0.1" {
					t.Errorf("port %s is open to the network", port.Published)
				}
			}
			for key, value := range s.Environment {
				if regexp.MustCompile(`(?i)(password|secret|token|key)$`).MatchString(key) && value != nil {
					t.Errorf("%s: a secret is a file, not a variable", key)
				}
			}
			for _, v := range s.Volumes {
				if v.Type == types.VolumeTypeVolume && v.Source == "" {
					t.Errorf("the volume at %s has no name", v.Target)
				}
			}
		})
	}
}

// prepared makes the state once for a test, owned by the user who runs it.
func prepared(t *testing.T) (compose.State, compose.Config) {
	t.Helper()
	cfg := compose.Config{Dir: t.TempDir(), TrustDomain: "mesh.local", UID: os.Getuid(), GID: os.Getgid()}
	state, err := compose.Prepare(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return state, cfg
}

// inState returns the place of a path of the compose file in a state that was prepared elsewhere.
func inState(t *testing.T, state compose.State, path string) string {
	t.Helper()
	usual, err := filepath.Abs(filepath.Join(root, "deploy", "compose", "state"))
	if err != nil {
		t.Fatal(err)
	}
	if rest, ok := strings.CutPrefix(path, usual); ok {
		return filepath.Join(state.Dir, rest)
	}
	return path
}

// TestComposeFilesExist: every file that it refers to exists, or is prepared by the command that it names to run first.
func TestComposeFilesExist(t *testing.T) {
	t.Parallel()
	p := project(t)
	state, _ := prepared(t)
	exists := func(what, path string) {
		if _, err := os.Stat(inState(t, state, path)); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for name, c := range p.Configs {
		exists("config "+name, c.File)
	}
	for name, s := range p.Secrets {
		exists("secret "+name, s.File)
	}
	for name, s := range p.Services {
		for _, v := range s.Volumes {
			if v.Type == types.VolumeTypeBind {
				exists("volume of "+name, v.Source)
			}
		}
	}
}

// TestPrepareKeepsWhatIsThere: a second run must not lock the services out of a database that was made with the first
// run's passwords.
func TestPrepareKeepsWhatIsThere(t *testing.T) {
	t.Parallel()
	state, cfg := prepared(t)
	before := contents(t, state.Dir)
	if _, err := compose.Prepare(cfg); err != nil {
		t.Fatal(err)
	}
	if len(before) < 20 {
		t.Fatalf("only %d files were made", len(before))
	}
	if diff := cmp.Diff(before, contents(t, state.Dir)); diff != "" {
		t.Errorf("the second run changed files: %s", diff)
	}
	for path := range before {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode().Perm())
		}
	}
}

func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		content, err := os.ReadFile(path)
		out[path] = string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// inContainer returns the file of this machine that a container finds under a path: a mount of the state, a secret or a
// configuration.
func inContainer(t *testing.T, p *types.Project, s types.ServiceConfig, state compose.State, path string) string {
	t.Helper()
	if name, ok := strings.CutPrefix(path, "/run/secrets/"); ok {
		for _, secret := range s.Secrets {
			if secret.Source == name && (secret.Target == "" || secret.Target == path) {
				return inState(t, state, p.Secrets[name].File)
			}
		}
		return ""
	}
	for _, v := range s.Volumes {
		if rest, ok := strings.CutPrefix(path, v.Target); ok && (rest == "" || rest[0] == '/') &&
			v.Type == types.VolumeTypeBind {
			return inState(t, state, filepath.Join(v.Source, rest))
		}
	}
	return ""
}

// paths collects the absolute paths of a configuration, by key.
func paths(prefix string, value any, into map[string]string) {
	switch v := value.(type) {
	case map[string]any:
		for key, inner := range v {
			paths(prefix+"."+key, inner, into)
		}
	case string:
		if strings.HasPrefix(v, "/") {
			into[strings.TrimPrefix(prefix, ".")] = v
		}
	}
}

// TestServicesReadTheirConfigurations: each file is a good configuration of its service, by that service's own rules,
// and every path in it is mounted into its container and prepared.
func TestServicesReadTheirConfigurations(t *testing.T) {
	t.Parallel()
	p := project(t)
	state, _ := prepared(t)
	for _, kind := range topology.Kinds() {
		t.Run(kind.Name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(root, "deploy", "compose", kind.Name+".yaml")
			if _, err := kind.Load(file, nil); err != nil {
				t.Fatal(err)
			}
			s := p.Services[kind.Name]
			if want := []string{kind.Name, "--config", "/etc/gpuaas/" + kind.Name + ".yaml"}; !slices.Equal(s.Command, want) {
				t.Errorf("it runs %q, want %q", s.Command, want)
			}
			if !slices.ContainsFunc(s.Configs, func(c types.ServiceConfigObjConfig) bool {
				return c.Target == "/etc/gpuaas/"+kind.Name+".yaml" && p.Configs[c.Source].File != "" &&
					filepath.Base(p.Configs[c.Source].File) == kind.Name+".yaml"
			}) {
				t.Error("its configuration is not mounted where it reads it")
			}
			checkPaths(t, p, s, state, file)
		})
	}
	t.Run("migrate", func(t *testing.T) {
		t.Parallel()
		checkPaths(t, p, p.Services["migrate"], state, filepath.Join(root, "deploy", "compose", "migrate.yaml"))
	})
}

func checkPaths(t *testing.T, p *types.Project, s types.ServiceConfig, state compose.State, file string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var parsed map[string]any
	if err := yaml.UnmarshalStrict(content, &parsed); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	paths("", parsed, found)
	if len(found) == 0 {
		t.Fatal("no path was found")
	}
	for key, path := range found {
		file := inContainer(t, p, s, state, path)
		if file == "" {
			t.Errorf("%s: %s is not mounted", key, path)
		} else if _, err := os.Stat(file); err != nil {
			t.Errorf("%s: %s is not prepared: %v", key, path, err)
		}
	}
}

// TestOnlyOwnSecrets: a service has its own login, and the sequencer's that all share.
func TestOnlyOwnSecrets(t *testing.T) {
	t.Parallel()
	p := project(t)
	for _, kind := range topology.Kinds() {
		for _, secret := range p.Services[kind.Name].Secrets {
			role, isLogin := strings.CutSuffix(secret.Source, ".url")
			allowed := []string{kind.Name, pg.RoleSequencer}
			if kind.Name == material.Lifecycle {
				allowed = append(allowed, pg.RoleWorkloadAdmin, "redis")
			}
			if isLogin && !slices.Contains(allowed, role) {
				t.Errorf("%s holds the login of %s", kind.Name, role)
			}
		}
	}
}

func TestConfigurationsHoldNoSecret(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(root, "deploy", "compose", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no configurations: %v", err)
	}
	secret := regexp.MustCompile(`(?i)(password|secret):\s*\S`)
	for _, path := range files {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if secret.Match(content) {
			t.Errorf("%s holds a secret", path)
		}
	}
}
