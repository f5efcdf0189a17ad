package finding

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/obs"
)

// HideSecrets returns a copy of evidence as people may see it: values that a tenant gives its own workloads are hidden
// whatever they are named, and so are values elsewhere that look like secrets. The names of fields stay.
func HideSecrets(m map[string]any) (map[string]any, error) {
	given, _ := hideGiven(m, false).(map[string]any)
	s, err := asStruct(given)
	if err != nil {
		return nil, err
	}
	return audit.Clean(&commonv1.AuditEntry{Details: s}).GetDetails().AsMap(), nil
}

// hideGiven hides the values of environments and the arguments and commands of workloads, in the form of specs.
func hideGiven(v any, hidden bool) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, x := range v {
			out[k] = hideGiven(x, hidden || k == "env" || k == "args" || k == "command")
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, x := range v {
			out[i] = hideGiven(x, hidden)
		}
		return out
	case string:
		if hidden && v != "" {
			return obs.Redacted
		}
	}
	return v
}
