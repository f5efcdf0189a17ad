package client_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDiagOfAFileThatIsNoRecord checks that a file which cannot be read, is no record, is too large, or has no entry is
// a mistake of the caller with a way out, in both forms, and that nothing is sent.
func TestDiagOfAFileThatIsNoRecord(t *testing.T) {
	mesh(t) // a call of it would have no answer
	dir := t.TempDir()
	for name, text := range map[string]string{
		"garbage": "\x00\xffnot a record", "empty": "", "other": `{"a": 1}`, "none": "[]", "numbers": "[1, 2]",
		"large": strings.Repeat(" ", 1<<20+1), "missing": "",
	} {
		path := filepath.Join(dir, name)
		if name != "missing" {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, form := range []string{"table", "json"} {
			got := call(t, "nodes", "diag", "n", "--file", path, "-o", form).wants(t, 2)
			for _, want := range []string{name, "invalid_argument", "gpuaas-node-agent diag -o json"} {
				if !strings.Contains(got.err, want) {
					t.Errorf("%s: %q is not in %s", name, want, got.err)
				}
			}
		}
	}
}
