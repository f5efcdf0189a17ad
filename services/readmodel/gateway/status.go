package gateway

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	// probeEvery bounds how often people's questions reach other services.
	probeEvery = 2 * time.Second
	probeLimit = time.Second
	// lagLimit is the age of an unprojected event from which on the event log is not well.
	lagLimit = 10 * time.Second
)

// probes are the last answers of Deps.Probes.
type probes struct {
	mu   sync.Mutex
	at   time.Time
	last []*readmodelv1.ComponentStatus
}

// GetStatus tells how the mesh's parts are. Counts are of what the person may see.
func (q *Query) GetStatus(ctx context.Context, _ *readmodelv1.GetStatusRequest) (*readmodelv1.GetStatusResponse, error) {
	lag, err := q.deps.Projector.Lag(ctx)
	if err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	out := &readmodelv1.GetStatusResponse{EventsBehind: lag.Events + lag.Unnumbered, ParkedEvents: int32(lag.Parked)}
	out.Version, _ = obs.Build()
	err = q.read(ctx, "", func(ctx context.Context, s *view.Snapshot) error {
		counts, err := s.Counts(ctx)
		if err != nil {
			return err //nolint:wrapcheck // it says what
		}
		out.Nodes, out.NodesConnected, out.Workspaces = counts.Nodes, counts.Connected, counts.Workspaces
		out.WorkspacesActive, out.LiveRuns, out.Position = counts.Active, counts.LiveRuns, s.Position
		replicas, err := s.Replicas(ctx)
		if err != nil {
			return err //nolint:wrapcheck // it says what
		}
		if out.Era, err = s.Era(ctx); err != nil {
			return err //nolint:wrapcheck // it says what
		}
		out.Components = append(out.Components,
			component("database", true, fmt.Sprintf("era %d", out.GetEra()), s.Now),
			component("event_log", lag.Oldest < lagLimit, fmt.Sprintf("%d behind, %d parked", out.GetEventsBehind(), lag.Parked), s.Now),
			nodeAPI(replicas, s.Now))
		return nil
	})
	if err != nil {
		return nil, err
	}
	out.Components = append(out.Components, q.probe(ctx)...)
	return out, nil
}

func component(name string, ok bool, detail string, at time.Time) *readmodelv1.ComponentStatus {
	return &readmodelv1.ComponentStatus{Name: name, Ok: ok, Detail: detail, ObservedAt: timestamppb.New(at)}
}

func nodeAPI(replicas []view.Replica, now time.Time) *readmodelv1.ComponentStatus {
	fresh, at := 0, now
	for _, r := range replicas {
		if r.Fresh {
			if fresh == 0 || r.BeatAt.Before(at) {
				at = r.BeatAt
			}
			fresh++
		}
	}
	return component("nodeapi", fresh > 0, fmt.Sprintf("%d replicas beat", fresh), at)
}

// probe asks all probes at once, at most every probeEvery.
func (q *Query) probe(ctx context.Context) []*readmodelv1.ComponentStatus {
	q.probed.mu.Lock()
	defer q.probed.mu.Unlock()
	if q.probed.last != nil && time.Since(q.probed.at) < probeEvery {
		return q.probed.last
	}
	// The answer is kept for others: it is not to fail because this caller left.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
	defer cancel()
	found := make([]*readmodelv1.ComponentStatus, len(q.deps.Probes))
	var wait sync.WaitGroup
	for i, p := range q.deps.Probes {
		wait.Go(func() {
			c := component(p.Name, true, "reachable", time.Now())
			if err := p.Check(ctx); err != nil {
				c.Ok, c.Detail = false, "cannot be reached, or does not prove to be what it should" // causes are for logs
			}
			found[i] = c
		})
	}
	wait.Wait()
	q.probed.last, q.probed.at = found, time.Now()
	return found
}
