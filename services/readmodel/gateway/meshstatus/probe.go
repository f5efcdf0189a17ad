package meshstatus

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

const (
	// probeEvery bounds how often requests for the status reach other services.
	probeEvery = 2 * time.Second
	probeLimit = time.Second
	// lagLimit is the age of the oldest unprojected event from which on the event log is reported as not ok.
	lagLimit = 10 * time.Second
)

// Probe asks a service for its health and for the health of the parts that it uses.
type Probe struct {
	Name  string
	Parts []string // those whose health this service alone reports
	Ask   func(ctx context.Context) (*commonv1.GetHealthResponse, error)
}

// probes are the last answers of Deps.Probes.
type probes struct {
	mu   sync.Mutex
	at   time.Time
	last []*readmodelv1.ComponentStatus
}

// probe returns the answers of all probes. It asks them concurrently, at most once every probeEvery.
func (r *Reporter) probe(ctx context.Context) []*readmodelv1.ComponentStatus {
	r.probed.mu.Lock()
	defer r.probed.mu.Unlock()
	if r.probed.last != nil && time.Since(r.probed.at) < probeEvery {
		return r.probed.last
	}
	// Other callers get the answer too, so it must not fail because this caller left.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
	defer cancel()
	found := make([][]*readmodelv1.ComponentStatus, len(r.deps.Probes))
	var wait sync.WaitGroup
	for i, p := range r.deps.Probes {
		wait.Go(func() {
			said, err := p.Ask(ctx)
			found[i] = reported(p, said, err, time.Now())
		})
	}
	wait.Wait()
	r.probed.last, r.probed.at = slices.Concat(found...), time.Now()
	return r.probed.last
}

// reported returns the components for a service's health report: the service itself, and the parts whose health it
// alone reports. A service that does not answer is down; the state of its parts is then unknown, because that a service
// does not answer says nothing about its parts.
func reported(p Probe, said *commonv1.GetHealthResponse, err error, now time.Time) []*readmodelv1.ComponentStatus {
	if err != nil {
		// The cause in err is for logs and is not shown to people.
		own := component(p.Name, false, "cannot be reached, or does not prove to be what it should", now)
		own.Reason = names.Of(commonv1.Reason_REASON_UNAVAILABLE)
		own.NextAction = "start " + p.Name + ", or look at its log and at the way there"
		out := []*readmodelv1.ComponentStatus{own}
		for _, name := range p.Parts {
			out = append(out, &readmodelv1.ComponentStatus{
				Name: name, State: commonv1.PartState_PART_STATE_UNKNOWN, Detail: p.Name + ", which speaks for it, cannot be asked",
				ObservedAt: timestamppb.New(now), Reason: own.GetReason(), NextAction: own.GetNextAction(),
			})
		}
		return out
	}
	own := component(p.Name, true, "ready", now)
	if said.GetDraining() != "" {
		own.Detail = "answers; " + said.GetDraining()
	}
	parts := map[string]*commonv1.Part{}
	for _, part := range said.GetParts() {
		parts[part.GetName()] = part
		if !part.GetRequired() {
			continue
		}
		if own.GetSince() == nil || part.GetSince().AsTime().After(own.GetSince().AsTime()) {
			own.Since = part.GetSince() // the service is ready since the last of its required parts became ready
		}
		if part.GetState() == commonv1.PartState_PART_STATE_DOWN && own.GetOk() {
			own.Ok, own.State, own.Since = false, part.GetState(), part.GetSince()
			own.Detail, own.Reason, own.NextAction = part.GetName()+": "+part.GetDetail(), names.Of(part.GetReason()),
				part.GetNextAction()
		}
	}
	out := []*readmodelv1.ComponentStatus{own}
	for _, name := range p.Parts {
		out = append(out, partStatus(p.Name, name, parts[name], now))
	}
	return out
}

func partStatus(service, name string, part *commonv1.Part, now time.Time) *readmodelv1.ComponentStatus {
	if part == nil {
		return &readmodelv1.ComponentStatus{
			Name: name, State: commonv1.PartState_PART_STATE_UNKNOWN, Detail: service + " has not looked yet",
			ObservedAt: timestamppb.New(now),
			NextAction: "ask again in a few seconds; if it stays, update " + service,
		}
	}
	c := &readmodelv1.ComponentStatus{
		Name: name, State: part.GetState(), Detail: part.GetDetail(), ObservedAt: part.GetObservedAt(),
		Since: part.GetSince(), NextAction: part.GetNextAction(),
		Ok: part.GetState() == commonv1.PartState_PART_STATE_OK || part.GetState() == commonv1.PartState_PART_STATE_OFF,
	}
	if !c.GetOk() {
		c.Reason = names.Of(part.GetReason())
	}
	if c.GetDetail() == "" {
		c.Detail = "as " + service + " finds it"
	}
	return c
}
