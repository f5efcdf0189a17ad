package slim_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events/slim"
)

// TestFieldsThatBodiesLeaveOutStay: a body records which columns were left out, and not of which fields. A field that
// is added to a message of events must not have the name of a column, and no such field may be removed: bodies that
// were written before would be read with values that no writer wrote. The entries of testdata/slim.golden for a message
// must never change; GPUAAS_UPDATE_GOLDEN=1 adds messages that are new.
func TestFieldsThatBodiesLeaveOutStay(t *testing.T) {
	t.Parallel()
	const golden = "testdata/slim.golden"
	now := map[string]string{}
	protoregistry.GlobalTypes.RangeMessages(func(m protoreflect.MessageType) bool {
		name := string(m.Descriptor().FullName())
		call := strings.HasSuffix(name, "Request") || strings.HasSuffix(name, "Response") // no event carries it
		if strings.HasPrefix(name, "gpuaas.") && !call {
			if fields := slim.LeftOut(m.Descriptor()); len(fields) > 0 {
				now[name] = name + ": " + strings.Join(fields, " ")
			}
		}
		return true
	})
	before := map[string]string{}
	raw, err := os.ReadFile(golden)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		line = strings.TrimSpace(line)
		name, _, _ := strings.Cut(line, ":")
		before[name] = line
		if now[name] != line {
			t.Errorf("bodies were written by\n%s\nand would be read by\n%s", line, now[name])
		}
	}
	if t.Failed() {
		return
	}
	if os.Getenv("GPUAAS_UPDATE_GOLDEN") != "" {
		if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, []byte(strings.Join(slices.Sorted(maps.Values(now)), "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	for name, line := range now {
		if before[name] == "" {
			t.Errorf("%s is new: run with GPUAAS_UPDATE_GOLDEN=1", line)
		}
	}
}
