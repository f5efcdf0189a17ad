package contexts_test

import (
	"net"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/internal/testkit"
)

// listener returns the API address of a running mesh.
func listener(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(testkit.Context(t), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

// silent returns an address on which nothing listens.
func silent(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(testkit.Context(t), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return addr
}

func announce(t *testing.T, path, want string, c contexts.Context) {
	t.Helper()
	got, err := contexts.Announce(testkit.Context(t), path, "dev", c)
	if err != nil || got.Name != want {
		t.Fatalf("context %q, %v; want %q", got.Name, err, want)
	}
	f, err := contexts.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := f.Get(""); err != nil || got.Name != want || got.Server != c.Server || got.Mesh != c.Mesh {
		t.Fatalf("current context %+v, %v", got, err)
	}
}

func current(t *testing.T, path string) string {
	t.Helper()
	f, err := contexts.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	return f.Current
}

// TestASecondMeshTakesANameOfItsOwn: the context of a mesh that runs stays, and is current again when the second ends.
func TestASecondMeshTakesANameOfItsOwn(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	first := contexts.Context{Server: listener(t), Mesh: "/meshes/a"}
	second := contexts.Context{Server: listener(t), Mesh: "/meshes/b", Ephemeral: true}
	third := contexts.Context{Server: listener(t), Mesh: "/meshes/c"}
	announce(t, path, "dev", first)
	announce(t, path, "dev", first) // started again, it keeps its name
	announce(t, path, "dev-2", second)
	announce(t, path, "dev-3", third)
	if err := contexts.RemoveMesh(path, second.Mesh); err != nil {
		t.Fatal(err)
	}
	if got := current(t, path); got != "dev-3" {
		t.Fatalf("current %q after the end of another mesh", got)
	}
	if err := contexts.RemoveMesh(path, third.Mesh); err != nil {
		t.Fatal(err)
	}
	if got := current(t, path); got != "dev" {
		t.Fatalf("current %q after the end of the last two", got)
	}
	if err := contexts.RemoveMesh(path, first.Mesh); err != nil {
		t.Fatal(err)
	}
	if got := current(t, path); got != "" {
		t.Fatalf("current %q after the end of all", got)
	}
}

// TestAMeshTakesTheNameOfOneThatEnded: no server listens at the address in its context. The context of a person's own
// mesh elsewhere stays.
func TestAMeshTakesTheNameOfOneThatEnded(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	announce(t, path, "dev", contexts.Context{Server: silent(t), Mesh: "/meshes/a"})
	announce(t, path, "dev", contexts.Context{Server: silent(t), Mesh: "/meshes/b"})
	if err := contexts.Put(path, contexts.Context{Name: "dev", Server: silent(t)}, true); err != nil {
		t.Fatal(err)
	}
	announce(t, path, "dev", contexts.Context{Server: silent(t), Mesh: "/meshes/c"})
	if err := contexts.Put(path, contexts.Context{Name: "dev", Server: "mesh.example.invalid:443"}, true); err != nil {
		t.Fatal(err)
	}
	announce(t, path, "dev-2", contexts.Context{Server: silent(t), Mesh: "/meshes/d"})
}

// TestAMeshKeepsItsNameWhereAnotherIsFree: a name is taken only while another mesh that runs, or a person, has it.
func TestAMeshKeepsItsNameWhereAnotherIsFree(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	first, second := contexts.Context{Server: listener(t), Mesh: "/meshes/a"},
		contexts.Context{Server: listener(t), Mesh: "/meshes/b"}
	announce(t, path, "dev", first)
	wants := func(when string, want contexts.Announced) {
		t.Helper()
		if got, err := contexts.Announce(testkit.Context(t), path, "dev", second); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", when, got, err, want)
		}
	}
	wants("beside the first", contexts.Announced{Name: "dev-2", Taken: true})
	wants("again", contexts.Announced{Name: "dev-2", Taken: true})
	if err := contexts.RemoveMesh(path, first.Mesh); err != nil {
		t.Fatal(err)
	}
	wants("after the end of the first", contexts.Announced{Name: "dev-2"})
	announce(t, path, "dev", contexts.Context{Server: silent(t), Mesh: "/meshes/c"})
	wants("beside one that does not run", contexts.Announced{Name: "dev-2"})
}

// TestTheContextsOfAMeshGoTogether: the contexts of its further persons are removed with its own, and none that now
// points elsewhere.
func TestTheContextsOfAMeshGoTogether(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "contexts.yaml")
	if err := contexts.Put(path, contexts.Context{Name: "prod", Server: "mesh.example:443"}, true); err != nil {
		t.Fatal(err)
	}
	gone := filepath.Join(dir, "gone")
	announce(t, path, "dev", contexts.Context{Server: silent(t), Mesh: gone, Ephemeral: true})
	viewer := contexts.Context{Name: "dev-viewer", Server: "127.0.0.1:1", Mesh: gone, Ephemeral: true}
	if err := contexts.Put(path, viewer, true); err != nil {
		t.Fatal(err)
	}
	// its directory may be on a disk that is not mounted
	kept := contexts.Context{Name: "kept", Server: "127.0.0.1:2", Mesh: gone}
	if err := contexts.Put(path, kept, false); err != nil {
		t.Fatal(err)
	}
	alive := contexts.Context{Name: "alive", Server: "127.0.0.1:3", Mesh: dir, Ephemeral: true}
	if err := contexts.Put(path, alive, false); err != nil {
		t.Fatal(err)
	}
	if err := contexts.RemoveDead(path); err != nil {
		t.Fatal(err)
	}
	f, err := contexts.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	want := contexts.File{
		Current:  "prod",
		Contexts: []contexts.Context{{Name: "prod", Server: "mesh.example:443"}, kept, alive},
	}
	if diff := cmp.Diff(want, f); diff != "" {
		t.Fatalf("file differs (-want +got):\n%s", diff)
	}
}
