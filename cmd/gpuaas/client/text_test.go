package client_test

import (
	"path/filepath"
	"strings"
	"testing"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// TestAValueThatIsNoTextIsRefusedByName: a value that is not UTF-8 is a mistake in the command line that names the flag
// or the argument, and no failure of the mesh that may be tried again. Nothing is sent.
func TestAValueThatIsNoTextIsRefusedByName(t *testing.T) {
	f := mesh(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"nodes", "hold", "\xff", "--reason", "r"}, `NODE: "\xff" is not UTF-8`},
		{[]string{"nodes", "hold", nodeID, "--reason", "a\xffb"}, `--reason: "a\xffb" is not UTF-8`},
		{[]string{"workspaces", "recreate", "\xff", "--reason", "r", "--dry-run"}, `WS: "\xff" is not UTF-8`},
		{[]string{"workspaces", "escalate", "\xff", "--out", filepath.Join(t.TempDir(), "b.zip")}, `WS: "\xff" is not UTF-8`},
		{[]string{"people", "create", "b\xff", "--role", "viewer"}, `NAME: "b\xff" is not UTF-8`},
	} {
		got := call(t, c.args...).wants(t, 2)
		if !strings.Contains(got.err, c.want) || strings.Contains(got.err, "internal") ||
			strings.Contains(got.err, "retry after") {
			t.Errorf("%q: %s, want %s", c.args, got.err, c.want)
		}
	}
	if n := len(sent[*readmodelv1.ChangeNodeIdentityRequest](f)); n != 0 {
		t.Errorf("%d requests were sent", n)
	}
}
