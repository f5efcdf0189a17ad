package dev_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// TestDevMakesAPersonOfEachRole: each has a context of its own, which works, and none is left of an ephemeral mesh.
// People that the CLI makes see their own objects, until they are ended.
func TestDevMakesAPersonOfEachRole(t *testing.T) {
	testkit.IO(t)
	file := filepath.Join(t.TempDir(), "contexts.yaml")
	t.Setenv(contexts.EnvPath, file)
	for _, name := range []string{"GPUAAS_SERVER", "GPUAAS_TOKEN_FILE", "GPUAAS_CA_FILE", "GPUAAS_CONTEXT"} {
		t.Setenv(name, "")
	}
	e := startEphemeral(t, meshtest.Dir(t), "--context-name", "mesh")
	e.until("Demo: ")
	for line := range strings.SplitSeq(e.out.String(), "\n") {
		// Lines that depend on the directory of the mesh and on the machine may be longer.
		if utf8.RuneCountInString(line) > 80 && !strings.HasPrefix(line, "gpuaas dev ") &&
			!strings.HasPrefix(line, "Demo:") && !strings.HasPrefix(line, "Log:") {
			t.Errorf("%d columns: %s", utf8.RuneCountInString(line), line)
		}
	}
	for _, want := range []string{
		"People:    mesh-viewer mesh-tenant mesh-operator mesh-security\n",
		"gpuaas --context mesh-tenant workspaces list\n",
	} {
		if !strings.Contains(e.out.String(), want) {
			t.Errorf("no %q in\n%s", want, e.out)
		}
	}
	var secrets []string
	server := ""
	run := func(code int, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(testkit.Context(t), filepath.Join(meshtest.Programs(t), "gpuaas"), args...)
		out, err := cmd.CombinedOutput()
		got := 0
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			got = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if got != code {
			t.Errorf("gpuaas %v: exit %d, want %d: %s", args, got, code, out)
		}
		for _, secret := range secrets {
			if strings.Contains(string(out), secret) {
				t.Errorf("gpuaas %v shows a token: %s", args, out)
			}
		}
		return string(out)
	}
	tokens := func() []string {
		f, err := contexts.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		secrets = nil
		for _, c := range f.Contexts {
			names, secrets, server = append(
				names,
				c.Name,
			), append(
				secrets,
				strings.SplitN(c.Token, "_", 3)[2],
			), c.Server
		}
		slices.Sort(names)
		return names
	}
	if names := tokens(); !slices.Equal(
		names,
		[]string{"mesh", "mesh-operator", "mesh-security", "mesh-tenant", "mesh-viewer"},
	) {
		t.Errorf("contexts %v", names)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("contexts: %v, %v", info.Mode(), err)
	}
	run(0, "--context", "mesh-viewer", "nodes", "list")
	run(4, "--context", "mesh-viewer", "nodes", "cordon", "n1", "--reason", "may I")
	run(0, "--context", "mesh-operator", "nodes", "cordon", "n1", "--reason", "I may")
	run(0, "--context", "mesh-operator", "nodes", "uncordon", "n1", "--reason", "I may")
	run(0, "--context", "mesh-security", "people", "list")
	run(4, "--context", "mesh-operator", "people", "list")
	run(4, "--context", "mesh-security", "people", "create", "root", "--role", "operator")
	run(4, "--context", "mesh-tenant", "nodes", "list")
	if out := run(0, "--context", "mesh-tenant", "workspaces", "list", "-o", "name"); !strings.Contains(out, "demo") {
		t.Errorf("the demo tenant's person sees %q", out)
	}
	// A tenant's person of another tenant.
	run(0, "tenants", "create", "other")
	run(0, "people", "create", "bo", "--role", "tenant", "--tenant", "other", "--expires", "1h")
	tokens()
	if out := run(0, "--context", "mesh-bo", "workspaces", "list", "-o", "name"); out != "" {
		t.Errorf("another tenant's person sees %q", out)
	}
	run(3, "--context", "mesh-bo", "workspaces", "get", "acme/demo")
	run(0, "--context", "mesh-bo", "workspaces", "create", "own", "--tenant", "other", "--dry-run")
	testkit.Eventually(t, testkit.Patience, func() error { // the log is a projection
		if out := run(0, "audit", "list", "--action", "person.create"); !strings.Contains(out, "bo") {
			return fmt.Errorf("audit: %s", out)
		}
		return nil
	})
	run(0, "people", "end", "bo", "--yes")
	run(4, "--context", "mesh-bo", "workspaces", "list")
	if out := run(
		0,
		"people",
		"list",
		"-o",
		"json",
		"--jq",
		`.items[] | select(.name == "bo") | .state`,
	); !strings.Contains(
		out,
		"ended",
	) {
		t.Errorf("bo is %q", out)
	}
	if log := e.errs.String(); slices.ContainsFunc(secrets, func(s string) bool { return strings.Contains(log, s) }) {
		t.Errorf("a token is in the log: %s", log)
	}
	t.Run("docs/api.md", func(t *testing.T) { runDocument(t, server) })
	if err := e.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := e.status(); code != 0 {
		t.Errorf("exit %d: %s", code, e.errs)
	}
	if names := tokens(); slices.ContainsFunc(
		names,
		func(n string) bool { return strings.HasPrefix(n, "mesh") },
	) {
		t.Errorf("contexts of a mesh that is gone: %v", names)
	}
}
