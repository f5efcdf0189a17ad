package contexts_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestPutUseRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deep", "contexts.yaml")
	if f, err := contexts.Load(path); err != nil || len(f.Contexts) != 0 {
		t.Fatalf("a file that is not there: %v, %v", f, err)
	}
	dev := contexts.Context{Name: "dev", Server: "127.0.0.1:1", CAPEM: "pem", Token: "secret"}
	prod := contexts.Context{Name: "prod", Server: "mesh.example:443", CAFile: "/ca.pem", TokenFile: "/token"}
	for _, step := range []func() error{
		func() error { return contexts.Put(path, prod, true) },
		func() error { return contexts.Put(path, contexts.Context{Name: "dev", Server: "old"}, false) },
		func() error { return contexts.Put(path, dev, true) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	got, err := contexts.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	dev.Previous = "prod"
	if diff := cmp.Diff(contexts.File{Current: "dev", Contexts: []contexts.Context{prod, dev}}, got); diff != "" {
		t.Fatalf("file differs (-want +got):\n%s", diff)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	if err := contexts.Use(path, "nowhere"); !errors.Is(err, contexts.ErrUnknown) {
		t.Fatalf("use of an unknown context: %v", err)
	}
	if err := contexts.Use(path, "prod"); err != nil {
		t.Fatal(err)
	}
	if err := contexts.RemoveNamed(path, "prod"); err != nil {
		t.Fatal(err)
	}
	dev.Previous = ""
	got, err = contexts.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := got.Get(""); !errors.Is(err, contexts.ErrUnknown) {
		t.Fatalf("current after its removal: %v", err)
	}
	if c, err := got.Get("dev"); err != nil || c != dev {
		t.Fatalf("dev: %v, %v", c, err)
	}
}

func TestLoadRefuses(t *testing.T) {
	tests := []struct {
		name, content string
		mode          os.FileMode
		want          string
	}{
		{"others may read", "current: \"\"\n", 0o644, "others than its owner"},
		{"the group may write", "current: \"\"\n", 0o620, "others than its owner"},
		{"an unknown key", "current: \"\"\nservers: []\n", 0o600, "servers"},
		{"no such current", "current: dev\n", 0o600, `current context "dev"`},
		{"twice", "contexts: [{name: a, server: s}, {name: a, server: s}]\n", 0o600, "twice"},
		{"all at once", "contexts: [{name: a}, {server: s}]\n", 0o600, "context 2 has no name"},
		{"two trusts", "contexts: [{name: a, server: s, ca_pem: x, ca_file: y}]\n", 0o600, "both"},
		{"no yaml", ":\n\t", 0o600, "read contexts"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "contexts.yaml")
			if err := os.WriteFile(path, []byte(tt.content), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, tt.mode); err != nil {
				t.Fatal(err)
			}
			_, err := contexts.Load(path)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v does not hold %q", err, tt.want)
			}
			if err := contexts.Put(path, contexts.Context{Name: "b", Server: "s"}, false); err == nil {
				t.Fatal("such a file was overwritten")
			}
		})
	}
}

// TestWritersKeepEachOther: no change is lost between writers.
func TestWritersKeepEachOther(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	const writers = 12
	var wg sync.WaitGroup
	failures := make(chan error, writers)
	for i := range writers {
		wg.Go(func() {
			failures <- contexts.Put(path, contexts.Context{Name: fmt.Sprintf("c%d", i), Server: "s"}, true)
		})
	}
	wg.Wait()
	for range writers {
		if err := <-failures; err != nil {
			t.Error(err)
		}
	}
	f, err := contexts.Load(path)
	if err != nil || len(f.Contexts) != writers {
		t.Fatalf("%d contexts, %v", len(f.Contexts), err)
	}
}
