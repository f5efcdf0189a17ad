package operation

import (
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/secretenv"
)

// secretKeys makes a key set of lines of a key file.
func secretKeys(tb testing.TB, lines ...string) *secretenv.Keys {
	tb.Helper()
	keys, err := secretenv.Parse(strings.Join(lines, "\n"))
	if err != nil {
		tb.Fatal(err)
	}
	return keys
}
