package shown_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/shown"
)

func TestTextsThatDifferHaveOtherFingerprints(t *testing.T) {
	known := map[string]string{}
	for _, text := range []string{"", " ", "kernel is 6.9.0", "kernel is 6.9.1"} {
		got := shown.Fingerprint(text)
		if other, ok := known[got]; ok || len(got) != 16 || got != shown.Fingerprint(text) {
			t.Errorf("the fingerprint of %q is %q, that of %q too", text, got, other)
		}
		known[got] = text
	}
}
