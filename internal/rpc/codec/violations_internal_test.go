package codec

import (
	"maps"
	"strings"
	"testing"
	"time"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1" // for its descriptors
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1" // as above
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestPatternsAreSaidInWords checks that no refusal shows a regular expression.
func TestPatternsAreSaidInWords(t *testing.T) {
	known, used := maps.Clone(patterns), map[string]string{}
	var walk func(messages protoreflect.MessageDescriptors)
	walk = func(messages protoreflect.MessageDescriptors) {
		for i := range messages.Len() {
			message := messages.Get(i)
			for j := range message.Fields().Len() {
				field := message.Fields().Get(j)
				rules, _ := proto.GetExtension(field.Options(), validate.E_Field).(*validate.FieldRules)
				for _, text := range []*validate.StringRules{
					rules.GetString(), rules.GetRepeated().GetItems().GetString(), rules.GetMap().GetKeys().GetString(),
					rules.GetMap().GetValues().GetString(),
				} {
					if text.GetPattern() != "" {
						used[text.GetPattern()] = string(field.FullName())
					}
				}
			}
			walk(message.Messages())
		}
	}
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		if strings.HasPrefix(string(file.Package()), "gpuaas.") {
			walk(file.Messages())
		}
		return true
	})
	if len(used) == 0 {
		t.Fatal("no pattern is found in the contract")
	}
	for pattern, field := range used {
		if known[pattern] == "" {
			t.Errorf("the pattern %s of %s is not said in words", pattern, field)
		}
		delete(known, pattern)
	}
	for pattern := range maps.Keys(known) {
		t.Errorf("no field has the pattern %s", pattern)
	}
}

// TestNamesAreRefusedInWords: a name of the wrong form is answered with the form in words.
func TestNamesAreRefusedInWords(t *testing.T) {
	err := ValidationFault(protovalidate.Validate(&recoveryv1.IssueBootstrapRequest{Name: "Rack_7"}))
	f, ok := fault.As(err)
	if !ok || f.Reason != commonv1.Reason_REASON_INVALID_ARGUMENT {
		t.Fatalf("refused with %v", err)
	}
	text := strings.Join(f.Unmet, "\n")
	if !strings.Contains(text, "name: must be lower case letters, digits and dashes") || strings.Contains(text, "regex") ||
		strings.Contains(text, "^[") {
		t.Errorf("it says %q", text)
	}
}

// TestALeastUptimeIsRefusedByName: a duration out of its range is refused with the field and the range.
func TestALeastUptimeIsRefusedByName(t *testing.T) {
	for _, asked := range []time.Duration{-time.Second, 301 * time.Second} {
		err := ValidationFault(protovalidate.Validate(&nodev1.Readiness{MinUptime: durationpb.New(asked)}))
		f, ok := fault.As(err)
		if !ok || f.Reason != commonv1.Reason_REASON_INVALID_ARGUMENT {
			t.Fatalf("%s is refused with %v", asked, err)
		}
		if text := strings.Join(f.Unmet, "\n"); !strings.Contains(text, "min_uptime: must be") ||
			!strings.Contains(text, "300s") && !strings.Contains(text, "5m") {
			t.Errorf("%s: it says %q", asked, text)
		}
	}
	if err := protovalidate.Validate(&nodev1.Readiness{MinUptime: durationpb.New(5 * time.Minute)}); err != nil {
		t.Error(err)
	}
}
