package drill

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/drill/certificates"
	"github.com/gpuaas/mesh/drill/hosts"
	"github.com/gpuaas/mesh/drill/identities"
	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/outages"
	"github.com/gpuaas/mesh/drill/unheard"
	"github.com/gpuaas/mesh/drill/work"
)

// Drills returns every drill, in the order of the matrix.
func Drills() []kit.Drill {
	return []kit.Drill{
		outages.ShortOutage(),
		certificates.LongOutage(),
		certificates.StaleChain(),
		outages.NodeAPIOutage(),
		certificates.AuthorityReplaced(),
		certificates.IngressSwapped(),
		unheard.EndpointDrift(),
		unheard.HostTrust(),
		unheard.BothTrusts(),
		unheard.BlindSpot(),
		unheard.EdgeLimit(),
		certificates.TokenMissing(),
		identities.Fenced(),
		identities.Cloned(),
		hosts.RouteDrift(),
		work.BacklogStale(),
		work.ResultLost(),
		hosts.VersionDrift(),
		hosts.ClockSkew(),
		work.DoubleProvision(),
		identities.Register(),
		work.Wedged(),
		work.ReleaseFailed(),
		hosts.HostRuntime(),
		outages.NodesAhead(),
		outages.RestoreReusesNothing(),
		outages.OldInstance(),
		hosts.DiskFull(),
	}
}

// Find returns the drills of these names in the order of the matrix; an unknown name is an error that lists the known
// ones.
func Find(names ...string) ([]kit.Drill, error) {
	all := Drills()
	known := make([]string, 0, len(all))
	for _, d := range all {
		known = append(known, d.Name)
	}
	unknown := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return slices.Contains(known, n) })
	if len(unknown) > 0 {
		return nil, fmt.Errorf("there is no drill %s; there are %s", strings.Join(unknown, ", "), strings.Join(known, ", "))
	}
	return slices.DeleteFunc(all, func(d kit.Drill) bool { return !slices.Contains(names, d.Name) }), nil
}
