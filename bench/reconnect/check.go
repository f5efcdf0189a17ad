package reconnect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// faults is what the API says of the nodes after all rounds.
type faults struct {
	away     []string       // nodes that are not connected
	inactive map[string]int // identities that are not active, by state
	present  map[string]int // present reasons of nodes
	periods  map[string]int // reasons that began after the first kill
	incident map[string]int // opened after the first kill, by kind
}

// wrong are the reasons that no node has because nodeapi was killed.
var wrong = []commonv1.DriftReason{
	commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD,
	commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST,
}

// none reports whether no node was called down or shut out, and all are connected.
func (f faults) none() bool {
	for _, reason := range wrong {
		if name := names.Of(reason); f.periods[name] > 0 || f.present[name] > 0 {
			return false
		}
	}
	return len(f.away) == 0 && len(f.inactive) == 0
}

func (f faults) describe(details map[string]any) {
	details["nodes_away"] = len(f.away)
	if len(f.away) > 0 {
		details["nodes_away_some"] = strings.Join(f.away[:min(len(f.away), 5)], " ")
	}
	for name, counts := range map[string]map[string]int{
		"identities_not_active": f.inactive, "reasons_present": f.present, "reasons_since_the_kill": f.periods,
		"incidents": f.incident,
	} {
		details[name] = counted(counts)
	}
}

// counted returns counts as text in the order of their names.
func counted(counts map[string]int) string {
	if len(counts) == 0 {
		return "none"
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, fmt.Sprintf("%s: %d", name, counts[name]))
	}
	return strings.Join(out, ", ")
}

// pageSize is how many nodes one read lists. On a machine that is busy a larger page takes longer than the API allows.
const pageSize = 200

// again repeats a read of the API that is told to wait, and returns its last error after readFor.
func again[T any](ctx context.Context, read func() (T, error)) (T, error) {
	const readFor = time.Minute
	until := time.Now().Add(readFor)
	for {
		got, err := read()
		if err == nil || fault.ActionOf(err) != commonv1.Action_ACTION_WAIT || time.Now().After(until) ||
			!app.Sleep(ctx, time.Second) {
			return got, err
		}
	}
}

// check reads from the API which nodes are connected, and what was concluded of each.
func (w *world) check(ctx context.Context) (faults, error) {
	f := faults{
		inactive: map[string]int{}, present: map[string]int{}, periods: map[string]int{}, incident: map[string]int{},
	}
	client := w.cluster.Client
	var nodes []string
	for token, first := "", true; first || token != ""; first = false {
		page, err := again(ctx, func() (*readmodelv1.ListNodesResponse, error) {
			return client.Query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: pageSize, PageToken: token})
		})
		if err != nil {
			return f, fmt.Errorf("list nodes: %w", err)
		}
		for _, n := range page.GetItems() {
			nodes = append(nodes, n.GetNodeId())
			if !n.GetConnected() {
				f.away = append(f.away, n.GetName())
			}
			if s := n.GetIdentity().GetState(); s != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
				f.inactive[names.Of(s)]++
			}
			if n.GetReason() != "" {
				f.present[n.GetReason()]++
			}
		}
		token = page.GetNextPageToken()
	}
	if len(nodes) != w.opts.Agents {
		return f, fmt.Errorf("the API lists %d nodes of %d", len(nodes), w.opts.Agents)
	}
	if err := w.periods(ctx, nodes, f.periods); err != nil {
		return f, err
	}
	incidents, err := again(ctx, func() (*readmodelv1.ListIncidentsResponse, error) {
		return client.Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{PageSize: 100})
	})
	if err != nil {
		return f, fmt.Errorf("list incidents: %w", err)
	}
	for _, i := range incidents.GetItems() {
		if i.GetOpenedAt().AsTime().After(w.faultAt) {
			f.incident[names.Of(i.GetKind())]++
		}
	}
	return f, nil
}

// periods counts the verdicts on each node that began after the first kill, by reason.
func (w *world) periods(ctx context.Context, nodes []string, into map[string]int) error {
	const atOnce = 8
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, id := range nodes {
		group.Go(func() error {
			list, err := again(ctx, func() (*readmodelv1.ListNodeVerdictsResponse, error) {
				return w.cluster.Client.Query.ListNodeVerdicts(ctx,
					&readmodelv1.ListNodeVerdictsRequest{Node: id, PageSize: 1000})
			})
			if err != nil {
				return fmt.Errorf("list verdicts of %s: %w", id, err)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, p := range list.GetItems() {
				if p.GetDetectedAt().AsTime().After(w.faultAt) {
					into[names.Of(p.GetReason())]++
				}
			}
			return nil
		})
	}
	return group.Wait()
}
