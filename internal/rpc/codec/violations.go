package codec

import (
	"errors"
	"strings"

	"buf.build/go/protovalidate"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// ValidationFault turns the violations that protovalidate found into the fault of a bad request.
func ValidationFault(err error) error {
	if _, ok := fault.As(err); ok {
		return err
	}
	var violations *protovalidate.ValidationError
	if !errors.As(err, &violations) {
		return err
	}
	unmet := make([]string, 0, len(violations.Violations))
	for _, v := range violations.Violations {
		unmet = append(unmet, protovalidate.FieldPathString(v.Proto.GetField())+": "+plainly(v))
	}
	return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "", fault.Unmet(unmet...), fault.Cause(err))
}

// patterns describes the patterns of the contract in words that a person can act on.
var patterns = map[string]string{
	`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`: "must be lower case letters, digits and dashes, and begin and " +
		"end with a letter or a digit",
	`^(nodeapi|lifecycle|recovery|readmodel)/[!-~]+$`: "must be a service, a slash and the name of its consumer, such " +
		"as recovery/watchdog",
	`^((nodeapi|lifecycle|recovery|readmodel)/[!-~]+)?$`: "must be empty, or a service, a slash and the " +
		"name of its consumer, such as recovery/watchdog",
	`^([a-z_]+\.[a-z_]+)?$`: "must be two words of lower case letters and underscores with a " +
		"dot between them, such as run.changed",
}

// plainly returns in words what is wrong with a field.
func plainly(v *protovalidate.Violation) string {
	if v.Proto.GetRuleId() == "string.pattern" && v.RuleValue.IsValid() {
		if text, known := patterns[v.RuleValue.String()]; known {
			return text
		}
	}
	text := v.Proto.GetMessage()
	return strings.TrimPrefix(strings.ReplaceAll(text, "value length", "length"), "value ")
}
