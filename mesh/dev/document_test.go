package dev_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// block is a fenced block of commands of a document, and the lines that they print, in order.
type block struct {
	line     int
	commands string
	prints   []string
}

// blocks reads the blocks `sh` of a document, each with the block `text` that follows it.
func blocks(t *testing.T, path string) []block {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var out []block
	kind := ""
	for i, line := range strings.Split(string(data), "\n") {
		fence, ok := strings.CutPrefix(line, "```")
		switch {
		case ok && kind == "":
			if kind = fence; kind == "sh" {
				out = append(out, block{line: i + 1})
			}
		case ok:
			kind = ""
		case kind == "sh":
			out[len(out)-1].commands += line + "\n"
		case kind == "text" && len(out) > 0:
			out[len(out)-1].prints = append(out[len(out)-1].prints, line)
		}
	}
	if kind != "" {
		t.Fatalf("%s ends within a block", path)
	}
	return out
}

// spaces are what separates columns, and what JSON may hold around its punctuation.
var spaces = regexp.MustCompile(`\s+`)

func squeeze(s string) string { return spaces.ReplaceAllString(s, " ") }

// runDocument runs every block of docs/api.md, in order and in one directory, and compares its output with that of the
// document.
func runDocument(t *testing.T, server string) {
	t.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	found := blocks(t, filepath.Join(root, "docs", "api.md"))
	if len(found) < 12 {
		t.Fatalf("%d blocks: the document would prove little", len(found))
	}
	for _, tool := range []string{"buf", "grpcurl"} {
		if _, err := os.Stat(filepath.Join(root, "bin", tool)); err != nil {
			t.Fatalf("the document uses %s; `make tools` builds it: %v", tool, err)
		}
	}
	dir := t.TempDir()
	path := strings.Join(
		[]string{meshtest.Programs(t), filepath.Join(root, "bin"), os.Getenv("PATH")},
		string(os.PathListSeparator),
	)
	for _, b := range found {
		if len(b.prints) == 0 {
			t.Errorf("docs/api.md:%d: nothing says what it prints", b.line)
		}
		cmd := exec.CommandContext(
			testkit.Context(t),
			"bash",
			"-euc",
			strings.ReplaceAll(b.commands, dev.DefaultConsoleAddr, server),
		)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "PATH="+path, "CHECKOUT="+root, "HOME="+dir, "XDG_CACHE_HOME="+dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			var exit *exec.ExitError
			if !errors.As(err, &exit) {
				t.Fatal(err)
			}
			t.Errorf("docs/api.md:%d: %v: %s\n%s", b.line, err, b.commands, out)
			continue
		}
		rest := squeeze(string(out))
		for _, want := range b.prints {
			_, after, ok := strings.Cut(rest, squeeze(want))
			if !ok {
				t.Errorf("docs/api.md:%d: %q is not printed, or not in this place:\n%s", b.line, want, out)
				break
			}
			rest = after
		}
	}
}
