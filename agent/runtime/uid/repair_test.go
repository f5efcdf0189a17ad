package uid_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/uid"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestLeftoversGoAndWritesUnderWayStay: another agent of the host may be writing just now, and needs the files that it
// has made so far.
func TestLeftoversGoAndWritesUnderWayStay(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	old := time.Now().Add(-time.Hour)
	for _, name := range []string{".register-old", ".claim-old", ".register-new", ".claim-new"} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(name, "-old") {
			if err := os.Chtimes(path, old, old); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := uid.Open(uid.Config{Dir: dir, Roots: []string{filepath.Join(dir, "root")}}); err != nil {
		t.Fatal(err)
	}
	for name, stays := range map[string]bool{
		".register-old": false, ".claim-old": false, ".register-new": true,
		".claim-new": true,
	} {
		_, err := os.Lstat(filepath.Join(dir, name))
		if (err == nil) != stays || err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v, want it to stay: %t", name, err, stays)
		}
	}
}
