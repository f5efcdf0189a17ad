package notify_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/notify"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.CheckLeaks()) }

// Reasons of verdicts: one that touches no workspace, and two that do.
const (
	skewed   = commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW
	drifted  = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	diskFull = commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL
	silence  = commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN
	outage   = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE
	none     = commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED
)

// kit is a world whose projector and notifier run by hand.
type kit struct {
	*projecttest.World

	t         *testing.T
	ctx       context.Context
	projector *project.Projector
	reader    *view.Reader
	notifier  *notify.Notifier
	window    time.Duration
	sessions  map[string]string // by node
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{
		World: projecttest.NewWorld(t), t: t, ctx: testkit.Context(t), window: 5 * time.Minute,
		sessions: map[string]string{},
	}
	k.projector, k.reader = k.Projector(), view.NewReader(k.DB.Pool(pg.RoleReadmodel))
	k.notifier = k.newNotifier()
	return k
}

func (k *kit) newNotifier() *notify.Notifier {
	k.t.Helper()
	n, err := notify.New(notify.Deps{
		Logger: testkit.Logger(k.t), DB: k.DB.Pool(pg.RoleReadmodel), Reader: k.reader,
		Queued: k.projector.Queued, Window: func() time.Duration { return k.window },
	})
	k.must(err)
	return n
}

func (k *kit) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

// sync projects all that was appended.
func (k *kit) sync() {
	k.t.Helper()
	k.Number()
	k.must(k.projector.Drain(k.ctx))
}

// follow projects all that was appended and runs the notifier until the queue is empty. It returns what the rounds did.
func (k *kit) follow() notify.Result {
	k.t.Helper()
	k.sync()
	var sum notify.Result
	for {
		r, err := k.notifier.RunOnce(k.ctx)
		k.must(err)
		if r.Subjects == 0 {
			return sum
		}
		sum.Subjects, sum.Workspaces = sum.Subjects+r.Subjects, sum.Workspaces+r.Workspaces
		sum.Began, sum.Changed, sum.Ended = sum.Began+r.Began, sum.Changed+r.Changed, sum.Ended+r.Ended
	}
}

// node adds a connected node.
func (k *kit) node(name string) string {
	k.t.Helper()
	id := ids.New()
	k.Append(&recoveryv1.NodeIdentity{
		NodeId: id, Name: name, State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
	})
	k.Append(&lifecyclev1.NodeGate{NodeId: id, Name: name, Admitted: true, FenceEpoch: 1, SessionEpoch: 1})
	k.sessions[id] = ids.New()
	k.connect(id, true)
	return id
}

// connect opens or closes the session of a node.
func (k *kit) connect(node string, on bool) {
	k.t.Helper()
	state := commonv1.SessionState_SESSION_STATE_ADMITTED
	if !on {
		state = commonv1.SessionState_SESSION_STATE_CLOSED
	}
	now := timestamppb.New(k.Now())
	m := &nodev1.SessionChanged{
		SessionId: k.sessions[node], NodeId: node, ReplicaId: k.Replica, Generation: 1, State: state, OpenedAt: now,
		LastSeenAt: now,
	}
	if !on {
		m.ClosedAt = now
	}
	k.Append(m)
}

// workspace adds an active workspace with an allocation on a node.
func (k *kit) workspace(of projecttest.Tenant, node, name string) *lifecyclev1.Workspace {
	k.t.Helper()
	at := timestamppb.New(k.Now().Add(-time.Minute))
	w := &lifecyclev1.Workspace{
		WorkspaceId: ids.New(), TenantId: of.ID, Tenant: of.Name, Name: name, Epoch: 1, NodeId: node, CreatedAt: at,
		StateAt: at, State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		Spec: &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{Name: "main"}}},
	}
	k.Append(w)
	k.Append(&lifecyclev1.Allocation{
		AllocationId: ids.New(), WorkspaceId: w.GetWorkspaceId(), TenantId: of.ID, NodeId: node,
		State: commonv1.AllocationState_ALLOCATION_STATE_ACTIVE,
	})
	return w
}

// report appends what the agent of a workspace's node reports: that its workload runs, or exits again and again.
func (k *kit) report(w *lifecyclev1.Workspace, runs bool) {
	k.t.Helper()
	st := &nodev1.WorkloadStatus{Name: "main", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, Ready: true}
	if !runs {
		st = &nodev1.WorkloadStatus{
			Name: "main", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF, CrashLoop: true, Restarts: 7, ExitCode: 3,
		}
	}
	k.Observe(w.GetNodeId(), &nodev1.Observation{
		WorkspaceId: w.GetWorkspaceId(), Epoch: w.GetEpoch(), ObservedAt: timestamppb.New(k.Now()),
		Workloads: []*nodev1.WorkloadStatus{st},
	})
}

// judge appends a verdict about a node, or about the control plane if the node is empty.
func (k *kit) judge(node string, reason commonv1.DriftReason, evidence ...*recoveryv1.Evidence) {
	k.t.Helper()
	k.Append(&recoveryv1.NodeVerdict{
		NodeId: node, Reason: reason, DetectedAt: timestamppb.New(k.Now()), CorrelationId: "corr-" + node,
		Evidence: evidence,
	})
}

// incident appends an incident of the fleet that names nodes.
func (k *kit) incident(nodes ...string) string {
	k.t.Helper()
	return k.incidentOf("", nodes...)
}

// incidentOf appends an incident of the verdicts with a reason.
func (k *kit) incidentOf(reason string, nodes ...string) string {
	k.t.Helper()
	id := ids.New()
	k.AppendRaw(pg.RoleRecovery, events.Event{
		Kind: project.KindIncident, AggregateType: "incident", AggregateID: id, AggregateVersion: 1,
		Payload: &recoveryv1.Incident{
			IncidentId: id, Kind: commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT, NodeIds: nodes, Version: 1,
			ErrorCode: reason,
			OpenedAt:  timestamppb.New(k.Now()),
		},
	})
	return id
}

// endIncident ends an incident that incidentOf began.
func (k *kit) endIncident(id, reason string) {
	k.t.Helper()
	now := timestamppb.New(k.Now())
	k.AppendRaw(pg.RoleRecovery, events.Event{
		Kind: project.KindIncident, AggregateType: "incident", AggregateID: id, AggregateVersion: 2,
		Payload: &recoveryv1.Incident{
			IncidentId: id, Kind: commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT, Version: 2, ErrorCode: reason,
			OpenedAt: now, ClosedAt: now,
		},
	})
}

// scope returns the scope of a tenant's person, or that of an operator without a tenant.
func (k *kit) scope(tenantID string) list.Scope {
	k.t.Helper()
	p := rpc.Person{TenantID: tenantID, Roles: []string{"tenant"}}
	if tenantID == "" {
		p.Roles = []string{"operator"}
	}
	scope, err := list.ScopeOf(p)
	k.must(err)
	return scope
}

// list returns the notifications for a scope.
func (k *kit) list(scope list.Scope, f view.NotificationFilter) []*readmodelv1.Notification {
	k.t.Helper()
	var items []*readmodelv1.Notification
	k.must(k.reader.Read(k.ctx, scope, func(ctx context.Context, s *view.Snapshot) error {
		var err error
		items, _, err = s.Notifications(ctx, f, list.Page{Size: list.MaxSize})
		return err
	}))
	return items
}

// open returns the only open notification for operators.
func (k *kit) open() *readmodelv1.Notification {
	k.t.Helper()
	items := k.list(list.All(), view.NotificationFilter{Open: true})
	if len(items) != 1 {
		k.t.Fatalf("%d are open: %v", len(items), items)
	}
	return items[0]
}

// userState returns the state that the user of a workspace is shown.
func (k *kit) userState(w *lifecyclev1.Workspace) commonv1.UserState {
	k.t.Helper()
	items, _, err := k.reader.Workspaces(k.ctx, list.All(), view.WorkspaceFilter{ID: w.GetWorkspaceId()}, list.Page{})
	k.must(err)
	if len(items) != 1 {
		k.t.Fatalf("%d workspaces", len(items))
	}
	return items[0].GetUserState()
}

// dump returns all impacts and notifications as text.
func (k *kit) dump() string {
	k.t.Helper()
	var out string
	k.must(k.DB.Pool(pg.RoleReadmodel).QueryRow(k.ctx, `
		SELECT coalesce((SELECT string_agg(i::text, E'\n' ORDER BY i.impact_id) FROM readmodel.impact i), '') || E'\n' ||
			coalesce((SELECT string_agg(n::text, E'\n' ORDER BY n.impact_id, n.audience) FROM readmodel.notification n), '')`,
	).Scan(&out))
	return out
}

func (k *kit) exec(role, sql string, args ...any) {
	k.t.Helper()
	_, err := k.DB.Pool(role).Exec(k.ctx, sql, args...)
	k.must(err)
}

func named(prefix string, n int) string { return fmt.Sprintf("%s-%03d", prefix, n) }

func withState(w *lifecyclev1.Workspace, state commonv1.WorkspaceState, at time.Time) *lifecyclev1.Workspace {
	w = proto.CloneOf(w)
	w.State, w.StateAt = state, timestamppb.New(at)
	return w
}
