// Package meshtest gives tests of whole meshes the environment that they need: a directory that other users may
// traverse, and the programs.
//
// A later run removes the programs that it built. It never appears in a binary that ships.
package meshtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Dir returns a directory of the test's own under the system's temporary directory. Unlike that of testing.T, users to
// which servers and workloads drop may traverse it.
func Dir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "gpuaas-mesh-*") //nolint:usetesting // see above
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("kept for inspection: %s", dir)
			return
		}
		if err := os.RemoveAll(dir); err != nil {
			tb.Errorf("remove directory: %v", err)
		}
	})
	if err := os.Chmod(dir, 0o711); err != nil { // traversable on purpose
		tb.Fatal(err)
	}
	return dir
}

// build builds the programs once for each test process.
var build = sync.OnceValues(func() (string, error) {
	// A test runs in its package's directory, and its source paths are of no use when it was built with -trimpath.
	gomod, err := exec.Command("go", "env", "GOMOD").Output() // ends with the test process
	if err != nil {
		return "", fmt.Errorf("find module: %w", err)
	}
	module := filepath.Dir(strings.TrimSpace(string(gomod)))
	sweep(programsPattern)
	dir, err := os.MkdirTemp("", programsPattern)
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o711); err != nil { // workloads run the agent's binary as another user
		return "", err
	}
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", dir+"/",
		"./cmd/gpuaas", "./cmd/gpuaas-node-agent") // ends with the test process
	cmd.Dir = module
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build programs: %w: %s", err, out)
	}
	return dir, nil
})

const (
	programsPattern = "gpuaas-programs-*"
	// sharedLife is longer than any run of the tests.
	sharedLife = 2 * time.Hour
)

// sweep removes what tests of earlier runs shared: the end of the last test of a test process cannot be detected.
func sweep(pattern string) {
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), pattern))
	if err != nil {
		return
	}
	for _, dir := range dirs {
		if info, err := os.Stat(dir); err == nil && time.Since(info.ModTime()) > sharedLife {
			_ = os.RemoveAll(dir) // another may be at it
		}
	}
}

// Programs returns the directory of the two programs, built from this tree; GPUAAS_TEST_BIN names one with programs
// that are built already.
func Programs(tb testing.TB) string {
	tb.Helper()
	if dir := os.Getenv("GPUAAS_TEST_BIN"); dir != "" {
		return dir
	}
	dir, err := build()
	if err != nil {
		tb.Fatal(err)
	}
	return dir
}
