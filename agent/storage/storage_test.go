package storage_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpuaas/mesh/agent/runtime/uid"
	"github.com/gpuaas/mesh/agent/storage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	wsA = "01970000-0000-7000-8000-00000000000a"
	wsB = "01970000-0000-7000-8000-00000000000b"
)

type quota struct {
	held  bool
	err   error
	asked map[string]uint32
}

func (q *quota) Limit(dir string, project uint32, _ int64) (bool, error) {
	q.asked[dir] = project
	return q.held, q.err
}

func (q *quota) Project(dir string) uint32 {
	if q.held {
		return q.asked[dir]
	}
	return 0
}

func open(t *testing.T, dir string, q storage.Quota) *storage.Store {
	t.Helper()
	testkit.IO(t)
	uids, err := uid.Open(uid.Config{Dir: filepath.Join(dir, "uids"), Disabled: os.Getuid() != 0})
	if err != nil {
		t.Fatal(err)
	}
	s, err := storage.New(storage.Deps{Logger: testkit.Logger(t), UIDs: uids, Quota: q}, storage.Config{
		Root: filepath.Join(dir, "storage"), MetaDir: filepath.Join(dir, "meta"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestAllocateAdoptRelease(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, nil)
	first, err := s.Allocate(t.Context(), wsA, "data", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(first.GetPath())
	if err != nil || info.Mode().Perm() != 0o700 || !info.IsDir() {
		t.Fatalf("storage: %v, %v", info, err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int32(st.Uid) != first.GetUid() {
		t.Errorf("owner %v, want %d", st, first.GetUid())
	}
	if os.Getuid() == 0 && first.GetUid() < uid.DefaultFirst {
		t.Errorf("uid %d", first.GetUid())
	}
	if first.GetAdopted() || first.GetEnforced() {
		t.Errorf("first: %v", first)
	}
	if err := os.WriteFile(filepath.Join(first.GetPath(), "file"), make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := open(t, dir, nil).Allocate(t.Context(), wsA, "data", 2<<20)
	if err != nil || !again.GetAdopted() || again.GetUid() != first.GetUid() || again.GetUsedBytes() < 3<<20 {
		t.Errorf("again: %v, %v", again, err)
	}
	usage, err := s.List(t.Context())
	if err != nil || len(usage) != 1 || usage[0].LimitBytes != 2<<20 || !usage[0].Over() {
		t.Errorf("usage %+v, %v", usage, err)
	}
	if path, ok, err := s.Path(wsA, "data"); err != nil || !ok || path != first.GetPath() {
		t.Errorf("path %q, %t, %v", path, ok, err)
	}
	for i, want := range []bool{true, false} {
		existed, err := s.Release(t.Context(), wsA, "data")
		if err != nil || existed != want {
			t.Errorf("release %d: %t, %v", i, existed, err)
		}
	}
	for _, tree := range []string{"storage", "meta"} {
		if left, err := os.ReadDir(filepath.Join(dir, tree)); err != nil || len(left) != 0 {
			t.Errorf("left in %s: %v, %v", tree, left, err)
		}
	}
}

// The content of a workspace's storage cannot make the agent touch files outside of it.
func TestHostileContent(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, nil)
	outside := filepath.Join(dir, "outside")
	if err := os.MkdirAll(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	precious := filepath.Join(outside, "precious")
	if err := os.WriteFile(precious, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	st, err := s.Allocate(t.Context(), wsA, "data", 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"dir": outside, "file": precious, "up": "../../../..", "self": "self"} {
		if err := os.Symlink(target, filepath.Join(st.GetPath(), name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(st.GetPath(), "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(st.GetPath(), "closed", "deep"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(st.GetPath(), "closed"), 0); err != nil {
		t.Fatal(err)
	}
	again, err := s.Allocate(t.Context(), wsA, "data", 0)
	if err != nil || again.GetUsedBytes() > 1<<19 {
		t.Errorf("measured beyond the storage: %v, %v", again, err)
	}
	if os.Getuid() != 0 {
		if err := os.Chmod(filepath.Join(st.GetPath(), "closed"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Release(t.Context(), wsA, "data"); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(precious); err != nil || info.Size() != 1<<20 {
		t.Errorf("outside: %v, %v", info, err)
	}
}

// A link in the place of a workspace or a storage is refused, not followed.
func TestLinkInPlace(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, nil)
	outside := filepath.Join(dir, "outside")
	if err := os.MkdirAll(filepath.Join(outside, "data"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "storage", wsA)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Allocate(t.Context(), wsA, "data", 0); !fault.Has(err, commonv1.Reason_REASON_STORAGE_FAILED) {
		t.Errorf("allocate: %v", err)
	}
	if _, err := s.Release(t.Context(), wsA, "data"); err == nil {
		t.Error("release went through a link")
	}
	if _, err := os.Stat(filepath.Join(outside, "data")); err != nil {
		t.Errorf("outside: %v", err)
	}
}

func TestNames(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	for _, c := range [][2]string{
		{wsA, ""},
		{wsA, "."},
		{wsA, ".."},
		{wsA, "../x"},
		{wsA, "a/b"},
		{wsA, "A"},
		{wsA, "-a"},
		{wsA, "a-"},
		{wsA, "a\x00"},
		{"", "a"},
		{"..", "a"},
		{"../../../../../../../../../../../etc/x", "a"},
	} {
		if _, err := s.Allocate(t.Context(), c[0], c[1], 0); !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
			t.Errorf("allocate %q: %v", c, err)
		}
		if _, err := s.Release(t.Context(), c[0], c[1]); !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
			t.Errorf("release %q: %v", c, err)
		}
	}
	if _, err := s.Allocate(t.Context(), wsA, "a", -1); !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
		t.Errorf("negative: %v", err)
	}
}

func TestQuota(t *testing.T) {
	q := &quota{held: true, asked: map[string]uint32{}}
	s := open(t, t.TempDir(), q)
	a, err := s.Allocate(t.Context(), wsA, "one", 1<<20)
	if err != nil || !a.GetEnforced() {
		t.Fatalf("enforced: %v, %v", a, err)
	}
	b, err := s.Allocate(t.Context(), wsB, "two", 1<<20)
	if err != nil || q.asked[a.GetPath()] == q.asked[b.GetPath()] || q.asked[a.GetPath()] == 0 {
		t.Errorf("projects %v, %v", q.asked, err)
	}
	q.held, q.err = false, errors.New("broken")
	if c, err := s.Allocate(t.Context(), wsA, "one", 2<<20); err != nil || c.GetEnforced() {
		t.Errorf("a limit that cannot be set is only measured: %v, %v", c, err)
	}
}

// Whether or not this host supports project quota, Limit returns no error.
func TestProjectQuotaOfThisHost(t *testing.T) {
	s := open(t, t.TempDir(), storage.ProjectQuota{})
	out, err := s.Allocate(t.Context(), wsA, "data", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("enforced: %t", out.GetEnforced())
	err = os.WriteFile(filepath.Join(out.GetPath(), "big"), make([]byte, 8<<20), 0o600)
	if out.GetEnforced() && err == nil && os.Getuid() != 0 {
		t.Error("a limit that is said to be enforced is not")
	}
}

// TestNamesAreThoseOfDirectories checks that the reported storages of a workspace are its directories on the disk, even
// if the records differ.
func TestNamesAreThoseOfDirectories(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	names := func() string {
		t.Helper()
		out, err := s.Names(wsA)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(out, " ")
	}
	if got := names(); got != "" {
		t.Errorf("before anything is made: %q", got)
	}
	made := map[string]string{}
	for _, name := range []string{"data", "cache"} {
		out, err := s.Allocate(t.Context(), wsA, name, 0)
		if err != nil {
			t.Fatal(err)
		}
		made[name] = out.GetPath()
	}
	if got := names(); got != "cache data" {
		t.Errorf("with both: %q", got)
	}
	if err := os.RemoveAll(made["data"]); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(made["data"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := names(); got != "cache" {
		t.Errorf("with a file in place of one: %q", got)
	}
	if err := os.RemoveAll(filepath.Dir(made["data"])); err != nil {
		t.Fatal(err)
	}
	if got := names(); got != "" {
		t.Errorf("once the workspace's tree is gone: %q", got)
	}
	if _, err := s.Names("../etc"); err == nil {
		t.Error("a malformed workspace is read")
	}
}
