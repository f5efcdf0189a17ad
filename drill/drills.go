package drill

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// Drills returns every drill, in the order of the matrix.
func Drills() []kit.Drill {
	return []kit.Drill{
		shortOutage(), longOutage(), staleChain(), nodeAPIOutage(), authorityReplaced(), ingressSwapped(), endpointDrift(),
		hostTrust(), bothTrusts(), blindSpot(), edgeLimit(), tokenMissing(), fenced(), cloned(), routeDrift(), backlogStale(),
		resultLost(),
		versionDrift(), clockSkew(), doubleProvision(), register(), wedged(), releaseFailed(),
		hostRuntime(), nodesAhead(), restoreReusesNothing(), oldInstance(), diskFull(),
	}
}

// restarted returns a mutation that starts replicas of a service anew with settings in their environment; its undo
// starts them anew without.
func restarted(of func(*cluster.Cluster) []*cluster.Process, env ...string) func(context.Context, *kit.Run) (
	func(context.Context) error, error,
) {
	return func(ctx context.Context, r *kit.Run) (func(context.Context) error, error) {
		c, err := r.Mesh.Cluster()
		if err != nil {
			return nil, err
		}
		back := func(ctx context.Context) error { return r.Mesh.Restart(ctx, of(c)) }
		return back, r.Mesh.Restart(ctx, of(c), env...)
	}
}

func recovery(c *cluster.Cluster) []*cluster.Process { return c.Recovery }

func nodeapi(c *cluster.Cluster) []*cluster.Process { return c.NodeAPI }

func lifecycle(c *cluster.Cluster) []*cluster.Process { return c.Lifecycle }

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
