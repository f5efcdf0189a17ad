package rpc

import (
	"strings"

	"buf.build/go/protovalidate"
)

// patterns describes the patterns of the contract in words that a person can act on.
var patterns = map[string]string{
	`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`:                 "must be lower case letters, digits and dashes, and begin and end with a letter or a digit",
	`^(nodeapi|lifecycle|recovery|readmodel)/[!-~]+$`: "must be a service, a slash and the name of its consumer, such as recovery/watchdog",
	`^([a-z_]+\.[a-z_]+)?$`:                           "must be two words of lower case letters and underscores with a dot between them, such as run.changed",
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
