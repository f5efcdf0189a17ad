package meshstatus

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// Deps are the dependencies of Reporter.
type Deps struct {
	Logger *slog.Logger
	Reads  caller.Reads
	Probes []Probe
	// DB reads how much space history takes; nil: the status does not show it.
	DB pg.Querier
	// Room returns the fault of a database that refuses writes for lack of a resource; nil: the status does not check
	// that.
	Room func(context.Context) error
}

// Reporter reads the status of the mesh, and keeps the last answers of the probes.
type Reporter struct {
	deps   Deps
	probed probes
}

// NewReporter returns a Reporter.
func NewReporter(deps Deps) *Reporter { return &Reporter{deps: deps} }

// Get returns the status of the mesh's parts. The counts cover what the person behind the call may see.
func (r *Reporter) Get(ctx context.Context) (*readmodelv1.GetStatusResponse, error) {
	lag, err := r.deps.Reads.Projector.Lag(ctx)
	if err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	out := &readmodelv1.GetStatusResponse{EventsBehind: lag.Events + lag.Unnumbered, ParkedEvents: int32(lag.Parked)}
	out.Version, _ = obs.Build()
	err = r.deps.Reads.Read(ctx, "", func(ctx context.Context, s *view.Snapshot) error {
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
			r.database(ctx, fmt.Sprintf("era %d", out.GetEra()), s.Now), r.eventLog(ctx, lag, s.Now), nodeAPI(replicas, s.Now))
		return nil
	})
	if err != nil {
		return nil, err
	}
	operator := caller.OperatorsOnly(ctx) == nil
	if r.deps.DB != nil && operator {
		history, components, err := r.history(ctx)
		if err != nil {
			return nil, err
		}
		out.History, out.Components = history, append(out.Components, components...)
	}
	out.Components = withRoom(append(out.Components, r.probe(ctx)...))
	if !operator {
		return forTenant(out), nil
	}
	return out, nil
}

// forTenant returns the status as a person of a tenant sees it: the tenant's own counts, and which parts are well,
// without what is known of why not, and what is to be done about it.
func forTenant(s *readmodelv1.GetStatusResponse) *readmodelv1.GetStatusResponse {
	out := &readmodelv1.GetStatusResponse{
		Workspaces: s.GetWorkspaces(), WorkspacesActive: s.GetWorkspacesActive(), LiveRuns: s.GetLiveRuns(),
		Version: s.GetVersion(),
	}
	for _, c := range s.GetComponents() {
		out.Components = append(out.Components, &readmodelv1.ComponentStatus{
			Name: c.GetName(), Ok: c.GetOk(), State: c.GetState(), Since: c.GetSince(), ObservedAt: c.GetObservedAt(),
		})
	}
	return out
}

// database returns the component of the database, as this replica finds it.
func (r *Reporter) database(ctx context.Context, detail string, now time.Time) *readmodelv1.ComponentStatus {
	c := component("database", true, detail, now)
	if r.deps.Room == nil {
		return c
	}
	if f, ok := fault.As(r.deps.Room(ctx)); ok {
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
func (r *Reporter) eventLog(ctx context.Context, lag events.Lag, now time.Time) *readmodelv1.ComponentStatus {
	c := component("event_log", lag.Oldest < lagLimit,
		fmt.Sprintf("%d behind, %d parked", lag.Events+lag.Unnumbered, lag.Parked), now)
	if c.GetOk() {
		return c
	}
	c.Reason, c.Severity = names.Of(commonv1.Reason_REASON_POSITION_NOT_REACHED), commonv1.Severity_SEVERITY_P1
	c.NextAction = "look at the logs of the services for the sequencer and the projection"
	blockers, err := r.deps.Reads.Projector.Blockers(ctx)
	if err != nil {
		r.deps.Logger.WarnContext(ctx, "sessions that numbering waits for not read", obs.Err(err))
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
	for _, replica := range replicas {
		if replica.Fresh {
			if fresh == 0 || replica.BeatAt.Before(at) {
				at = replica.BeatAt
			}
			fresh++
		}
	}
	c := component("nodeapi", fresh > 0, beating(fresh), at)
	if fresh == 0 {
		c.Reason, c.Severity = names.Of(commonv1.Reason_REASON_UNAVAILABLE), commonv1.Severity_SEVERITY_P1
		c.NextAction = "start nodeapi, or look at the logs of its replicas and at their way to the database; agents " +
			"connect again by themselves, and workloads run on"
	}
	return c
}

// beating returns the text for the number of replicas of nodeapi that beat.
func beating(replicas int) string {
	if replicas == 1 {
		return "1 replica beats"
	}
	return fmt.Sprintf("%d replicas beat", replicas)
}
