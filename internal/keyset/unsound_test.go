package keyset

import (
	"os"
	"path/filepath"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// TestARotationIsRefusedWhileAFileIsBad: the replica that would make the key cannot sign it, and a request that was
// taken would refuse all others until the file is repaired. The key that was loaded goes on.
func TestARotationIsRefusedWhileAFileIsBad(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	a := b.signer(dir)
	first, path := a.signs(), filepath.Join(dir, "join-000001.pem")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, whole[:20], 0o600); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	_, err = b.ask("r1")
	refusedWith(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED, a.id, "join-000001.pem", "ask again")
	b.round(a)
	b.want(Signing)
	if a.signs() != first {
		t.Errorf("%s signs, want %s", a.signs(), first)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	if _, err := b.ask("r1"); err != nil {
		t.Fatal(err)
	}
	b.round(a)
	b.want("signing verify_only")
}

// TestARefusedFirstFileIsTyped: before a kind has any key, a file that is malformed, of another kind, or shared by two
// kinds, and a directory that cannot be read, keep the replica from starting, with the remedy.
func TestARefusedFirstFileIsTyped(t *testing.T) {
	b := newBench(t)
	shared := t.TempDir()
	if _, err := b.open(pg.RoleRecovery, signer(shared)); err != nil {
		t.Fatal(err)
	}
	tasks := func(path string) error {
		_, err := b.open(pg.RoleLifecycle, Part{Kind: TaskSigning, Signs: true, Files: FilesOf(path)})
		return err
	}
	copied := filepath.Join(t.TempDir(), "tasks.pem")
	copyFile(t, filepath.Join(shared, "join-000001.pem"), copied)
	refusedWith(t, tasks(copied), differs, "no key serves two kinds", "remove the file tasks.pem")
	malformed := filepath.Join(t.TempDir(), "tasks.pem")
	if err := os.WriteFile(malformed, []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, tasks(malformed), differs, "tasks.pem", "no Ed25519 private key")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, tasks(filepath.Join(file, "tasks.pem")), differs, "cannot be read from "+file, "right to read")
}
