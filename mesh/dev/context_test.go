package dev_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// TestContextsFollowTheMeshes: a second mesh takes a context of its own name, and the context of each ephemeral mesh
// goes with it, also when it was killed.
func TestContextsFollowTheMeshes(t *testing.T) {
	testkit.IO(t)
	tmp := meshtest.Dir(t)
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	t.Setenv(contexts.EnvPath, path)
	if err := contexts.Put(path, contexts.Context{Name: "prod", Server: "mesh.example:443"}, true); err != nil {
		t.Fatal(err)
	}
	wants := func(when, current string, names ...string) {
		t.Helper()
		f, err := contexts.Load(path)
		if err != nil {
			t.Fatal(err)
		}
		var have []string
		for _, c := range f.Contexts {
			have = append(have, c.Name)
		}
		slices.Sort(have)
		if f.Current != current || strings.Join(have, " ") != strings.Join(names, " ") {
			t.Fatalf("%s: current %q of %v, want %q of %v", when, f.Current, have, current, names)
		}
	}
	named := []string{"--no-demo", "--context-name", "dev"}
	first := startEphemeral(t, tmp, named...)
	first.until("ready in")
	// Without a demo there is no tenant, and no person of it.
	of := func(mesh string) []string {
		return []string{mesh, mesh + "-operator", mesh + "-security", mesh + "-viewer"}
	}
	one, both := append(of("dev"), "prod"), append(of("dev-2"), append(of("dev"), "prod")...)
	slices.Sort(both)
	wants("first mesh", "dev", one...)
	if info, err := os.Stat(filepath.Join(first.dir(), "dev.log")); err != nil || info.Size() == 0 {
		t.Errorf("the log of the mesh: %v", err)
	}
	if log := filepath.Join(first.dir(), "dev.log"); !strings.Contains(first.out.String(), log) {
		t.Errorf("the log's path is not printed: %s", first.out)
	}

	second := startEphemeral(t, tmp, named...)
	second.until("ready in")
	wants("second mesh", "dev-2", both...)
	if !strings.Contains(second.out.String(), "context: dev-2\n") {
		t.Errorf("the name is not printed: %s", second.out)
	}
	want := "the context \"dev\" is in use by another mesh, or is a person's own; that of this mesh is \"dev-2\"\n"
	if !strings.Contains(second.errs.String(), want) {
		t.Errorf("it does not say so: %s", second.errs)
	}
	second.interrupt()
	if code := second.status(); code != 0 {
		t.Errorf("exit status %d", code)
	}
	wants("end of the second", "dev", one...)

	if err := first.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	first.status()
	third := startEphemeral(t, tmp, named...)
	third.until("ready in")
	wants("third mesh, after the death of the first", "dev", one...)
	third.interrupt()
	if code := third.status(); code != 0 {
		t.Errorf("exit status %d", code)
	}
	wants("end of all", "prod", "prod")
	third.nothingLeft()
}
