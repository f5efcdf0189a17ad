package gateway

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	// probeEvery bounds how often requests for the status reach other services.
	probeEvery = 2 * time.Second
	probeLimit = time.Second
	// lagLimit is the age of the oldest unprojected event from which on the event log is reported as not ok.
	lagLimit = 10 * time.Second
)

// probes are the last answers of Deps.Probes.
type probes struct {
	mu   sync.Mutex
	at   time.Time
	last []*readmodelv1.ComponentStatus
}

// GetStatus returns the status of the mesh's parts. The counts cover what the person may see.
func (q *Query) GetStatus(ctx context.Context, _ *readmodelv1.GetStatusRequest) (*readmodelv1.GetStatusResponse,
	error,
) {
	lag, err := q.deps.Projector.Lag(ctx)
	if err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	out := &readmodelv1.GetStatusResponse{EventsBehind: lag.Events + lag.Unnumbered, ParkedEvents: int32(lag.Parked)}
	out.Version, _ = obs.Build()
	err = q.read(ctx, "", func(ctx context.Context, s *view.Snapshot) error {
		counts, err := s.Counts(ctx)
		if err != nil {
			return err
		}
		out.Nodes, out.NodesConnected, out.Workspaces = counts.Nodes, counts.Connected, counts.Workspaces
		out.WorkspacesActive, out.LiveRuns, out.Position = counts.Active, counts.LiveRuns, s.Position
		findings, err := s.FindingCounts(ctx)
		if err != nil {
			return err
		}
		out.FindingsP0, out.FindingsP1, out.FindingsP2 = findings.P0, findings.P1, findings.P2
		replicas, err := s.Replicas(ctx)
		if err != nil {
			return err
		}
		if out.Era, err = s.Era(ctx); err != nil {
			return err
		}
		rolledBack, err := s.RolledBack(ctx)
		if err != nil {
			return err
		}
		if rolledBack {
			out.Components = append(out.Components, rollbackMode(s.Now))
		}
		out.Components = append(out.Components,
			q.database(ctx, fmt.Sprintf("era %d", out.GetEra()), s.Now), q.eventLog(ctx, lag, s.Now), nodeAPI(replicas, s.Now))
		return nil
	})
	if err != nil {
		return nil, err
	}
	if q.deps.DB != nil && operatorsOnly(ctx) == nil {
		history, components, err := q.history(ctx)
		if err != nil {
			return nil, err
		}
		out.History, out.Components = history, append(out.Components, components...)
	}
	out.Components = withRoom(append(out.Components, q.probe(ctx)...))
	return out, nil
}

// database returns the component of the database, as this replica finds it.
func (q *Query) database(ctx context.Context, detail string, now time.Time) *readmodelv1.ComponentStatus {
	c := component("database", true, detail, now)
	if q.deps.Room == nil {
		return c
	}
	if f, ok := fault.As(q.deps.Room(ctx)); ok {
		full(c, f.Public, names.Of(f.Reason), f.Remedy)
	}
	return c
}

// full marks the component of the database as one that refuses writes.
func full(c *readmodelv1.ComponentStatus, detail, reason, next string) {
	c.Ok, c.State, c.Severity = false, commonv1.PartState_PART_STATE_DOWN, commonv1.Severity_SEVERITY_P0
	c.Detail, c.Reason, c.NextAction = detail, reason, next
}

// withRoom merges the services' reports about the database's storage into the component of the database, because a
// service that writes learns first that it is full.
func withRoom(components []*readmodelv1.ComponentStatus) []*readmodelv1.ComponentStatus {
	var database *readmodelv1.ComponentStatus
	var out []*readmodelv1.ComponentStatus
	for _, c := range components {
		switch {
		case c.GetName() != service.PartDatabaseRoom:
			if c.GetName() == "database" {
				database = c
			}
			out = append(out, c)
		case c.GetState() == commonv1.PartState_PART_STATE_DOWN && database.GetOk():
			full(database, c.GetDetail(), c.GetReason(), c.GetNextAction())
			database.Since, database.ObservedAt = c.GetSince(), c.GetObservedAt()
		}
	}
	return out
}

// eventLog returns the component of the event log. If the log is behind, the component names the database sessions that
// numbering waits for.
func (q *Query) eventLog(ctx context.Context, lag events.Lag, now time.Time) *readmodelv1.ComponentStatus {
	c := component("event_log", lag.Oldest < lagLimit,
		fmt.Sprintf("%d behind, %d parked", lag.Events+lag.Unnumbered, lag.Parked), now)
	if c.GetOk() {
		return c
	}
	c.Reason, c.Severity = names.Of(commonv1.Reason_REASON_POSITION_NOT_REACHED), commonv1.Severity_SEVERITY_P1
	c.NextAction = "look at the logs of the services for the sequencer and the projection"
	blockers, err := q.deps.Projector.Blockers(ctx)
	if err != nil {
		q.deps.Logger.WarnContext(ctx, "sessions that numbering waits for not read", obs.Err(err))
	}
	if len(blockers) > 0 {
		c.Detail += "; numbering waits for a transaction of " + strings.Join(blockers, ", ")
		c.NextAction = "end that transaction, or its session: SELECT pg_terminate_backend(pid)"
	}
	return c
}

// rollbackMode returns the component that the status shows first while rollback mode is active: every part may be
// healthy although the mesh does nothing.
func rollbackMode(at time.Time) *readmodelv1.ComponentStatus {
	row := fault.RowOf(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK)
	c := component("control_plane", false, "rollback mode: "+row.Public+"; "+row.Impact, at)
	c.Reason, c.NextAction = names.Of(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK), row.Remedy
	c.Severity = commonv1.Severity_SEVERITY_P0
	return c
}

func component(name string, ok bool, detail string, at time.Time) *readmodelv1.ComponentStatus {
	state := commonv1.PartState_PART_STATE_OK
	if !ok {
		state = commonv1.PartState_PART_STATE_DOWN
	}
	return &readmodelv1.ComponentStatus{Name: name, Ok: ok, State: state, Detail: detail, ObservedAt: timestamppb.New(at)}
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
	return component("nodeapi", fresh > 0, beating(fresh), at)
}

// beating returns the text for the number of replicas of nodeapi that beat.
func beating(replicas int) string {
	if replicas == 1 {
		return "1 replica beats"
	}
	return fmt.Sprintf("%d replicas beat", replicas)
}

// probe returns the answers of all probes. It asks them concurrently, at most once every probeEvery.
func (q *Query) probe(ctx context.Context) []*readmodelv1.ComponentStatus {
	q.probed.mu.Lock()
	defer q.probed.mu.Unlock()
	if q.probed.last != nil && time.Since(q.probed.at) < probeEvery {
		return q.probed.last
	}
	// Other callers get the answer too, so it must not fail because this caller left.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
	defer cancel()
	found := make([][]*readmodelv1.ComponentStatus, len(q.deps.Probes))
	var wait sync.WaitGroup
	for i, p := range q.deps.Probes {
		wait.Go(func() {
			said, err := p.Ask(ctx)
			found[i] = reported(p, said, err, time.Now())
		})
	}
	wait.Wait()
	q.probed.last, q.probed.at = slices.Concat(found...), time.Now()
	return q.probed.last
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
