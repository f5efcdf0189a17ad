package process

import (
	"maps"
	"net/url"
	"slices"
	"strconv"

	"github.com/gpuaas/mesh/internal/showable"
)

// secretsOf returns the values of a workload's environment that are hidden in its output: all but those of names that
// are public, and those that the agent has set itself. The password of a URL is masked on its own as well.
func secretsOf(sp spec) []string {
	public := publicVariables(sp)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(sp.Env)) {
		value := sp.Env[name]
		if known, ok := public[name]; ok && (known == "" || known == value) || len(value) < len(showable.Masked) {
			continue
		}
		out = append(out, value)
		if u, err := url.Parse(value); err == nil && u.User != nil {
			if password, ok := u.User.Password(); ok {
				out = append(out, password, url.QueryEscape(password))
			}
		}
	}
	return out
}

// publicVariables returns the variables that are not secret, with the value that the agent gives them, or with an empty
// one if any value is public.
func publicVariables(sp spec) map[string]string {
	out := map[string]string{
		"PATH": "", "HOME": "", "LANG": "", "TMPDIR": "", "CUDA_VISIBLE_DEVICES": "", "PGSCHEMA": "",
		"GPUAAS_WORKSPACE_ID": sp.WorkspaceID, "GPUAAS_WORKLOAD": sp.Name, "GPUAAS_EPOCH": strconv.FormatInt(sp.Epoch, 10),
	}
	maps.Copy(out, portVariables(sp.Ports))
	return out
}
