package secretenv

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// ShowNamesIn returns the payload of a workspace's event with the names of environment variables in place of their
// values. Events of this build have no values; those that were appended before values were secrets have, and stay in
// the log. The result is the same as that of migration 67 for stored payloads.
func ShowNamesIn(payload []byte) ([]byte, error) {
	if !bytes.Contains(payload, []byte(`"env"`)) && !bytes.Contains(payload, []byte(`"sealed_env"`)) {
		return payload, nil
	}
	reader := json.NewDecoder(bytes.NewReader(payload))
	reader.UseNumber()
	var body map[string]any
	if err := reader.Decode(&body); err != nil {
		return nil, fmt.Errorf("read event: %w", err)
	}
	spec, _ := body["spec"].(map[string]any)
	workloads, _ := spec["workloads"].([]any)
	for _, w := range workloads {
		workload, ok := w.(map[string]any)
		if !ok {
			continue
		}
		seen := map[string]bool{}
		for _, field := range []string{"env", "sealed_env"} {
			values, _ := workload[field].(map[string]any)
			for name := range values {
				seen[name] = true
			}
			delete(workload, field)
		}
		if len(seen) > 0 {
			workload["env_names"] = slices.Sorted(maps.Keys(seen))
		}
	}
	out, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("spell event: %w", err)
	}
	return out, nil
}
