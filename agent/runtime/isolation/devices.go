package isolation

import (
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

const nvidiaMajor = 195

// DeniedDevices returns the device control group's rules that keep a workload from the real GPUs it was not given.
func DeniedDevices(host []*commonv1.Gpu, given []string) []string {
	var rules []string
	for _, g := range host {
		if !g.GetSimulated() && !slices.Contains(given, g.GetDeviceId()) {
			rules = append(rules, fmt.Sprintf("c %d:%d rwm", nvidiaMajor, g.GetIndex()))
		}
	}
	return rules
}
