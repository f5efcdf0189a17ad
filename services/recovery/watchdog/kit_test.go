package watchdog_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/fleet"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// owner is a fake of lifecycle: it answers repetitions of a key with the same operation, and may refuse, join or fail.
type owner struct {
	mu     sync.Mutex
	calls  []*lifecyclev1.RequestOperationRequest
	byKey  map[string]*lifecyclev1.Operation
	answer func(*lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) // nil: starts an operation
	after  func() error                                                               // the answer is lost
}

func (o *owner) RequestOperation(_ context.Context,
	req *lifecyclev1.RequestOperationRequest,
) (*lifecyclev1.RequestOperationResponse, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.calls = append(o.calls, req)
	op := o.byKey[req.GetIdempotencyKey()]
	if op == nil {
		var err error
		op = &lifecyclev1.Operation{OperationId: ids.New(), WorkspaceId: req.GetWorkspaceId(), Kind: req.GetKind(), Epoch: 2}
		if o.answer != nil {
			if op, err = o.answer(req); err != nil {
				return nil, err
			}
		}
		o.byKey[req.GetIdempotencyKey()] = op
	}
	if o.after != nil {
		if err := o.after(); err != nil {
			return nil, err
		}
	}
	return &lifecyclev1.RequestOperationResponse{Operation: op}, nil
}

func (o *owner) asked() []*lifecyclev1.RequestOperationRequest {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]*lifecyclev1.RequestOperationRequest(nil), o.calls...)
}

func (o *owner) set(fn func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	fn()
}

type kit struct {
	behind    bool // rounds are made before the appended events have been read
	t         *testing.T
	ctx       context.Context
	db        *testkit.Database
	sequencer *events.Sequencer
	owner     *owner
	w         *watchdog.Watchdog
	all       *fleet.Fleet // of the watchdog that was made last
	cfg       watchdog.Config
	metrics   *obs.Registry // of the watchdog that was made last
	policy    policy.Set
	versions  map[string]int64
	replica   string
	ahead     time.Duration
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{
		t: t, ctx: testkit.Context(t), db: testkit.DB(t), owner: &owner{byKey: map[string]*lifecyclev1.Operation{}},
		versions: map[string]int64{}, replica: ids.New(), policy: policy.Defaults(),
	}
	var err error
	k.sequencer, err = events.NewSequencer(events.SequencerDeps{
		Pool:   k.db.Pool(pg.RoleSequencer),
		Logger: testkit.Logger(t),
	}, events.SequencerConfig{})
	k.must(err)
	k.w = k.watchdog("")
	return k
}

// watchdog returns the watchdog of another replica.
func (k *kit) watchdog(replica string) *watchdog.Watchdog {
	k.t.Helper()
	registry, err := obs.NewRegistry()
	k.must(err)
	k.metrics = registry
	pool, registerer := k.db.Pool(pg.RoleRecovery), registry.ForService("recovery")
	k.all, err = fleet.New(fleet.Deps{
		Logger: testkit.Logger(k.t), Registerer: registerer, Pool: pool, Policy: policy.Fixed{Set: k.policy},
	}, fleet.Config{})
	k.must(err)
	w, err := watchdog.New(watchdog.Deps{
		Logger: testkit.Logger(k.t), Registerer: registerer, Pool: pool, Lifecycle: k.owner, Fleet: k.all,
		Policy: policy.Fixed{Set: k.policy}, Replica: replica,
	}, k.cfg)
	k.must(err)
	return w
}

func (k *kit) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

// pass moves the mesh's clock on.
func (k *kit) pass(d time.Duration) {
	k.t.Helper()
	k.ahead += d
	testkit.SetClockOffset(k.db, k.ahead)
}

func (k *kit) now() time.Time {
	k.t.Helper()
	var now time.Time
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT mesh.clock()`).Scan(&now))
	return now
}

// put appends an entity's next version as its owner and has the watchdog read it.
func (k *kit) put(messages ...proto.Message) {
	k.t.Helper()
	for _, m := range messages {
		k.append(m)
	}
	k.must(k.sequencer.Drain(k.ctx))
	k.must(k.w.Drain(k.ctx))
	if n := k.count(`SELECT count(*) FROM recovery.parked_event`); n != 0 {
		k.t.Fatalf("%d events were parked", n)
	}
}

func (k *kit) append(m proto.Message) {
	k.t.Helper()
	role, e := pg.RoleLifecycle, events.Event{Payload: m}
	switch x := m.(type) {
	case *lifecyclev1.Workspace:
		e.Kind, e.AggregateType, e.AggregateID = "workspace.changed", "workspace", x.GetWorkspaceId()
	case *lifecyclev1.Run:
		e.Kind, e.AggregateType, e.AggregateID = "run.changed", "run", x.GetRunId()
	case *lifecyclev1.StepAttempt:
		e.Kind, e.AggregateType, e.AggregateID = "step.changed", "step", x.GetRunId()+"/step"
	case *lifecyclev1.Instance:
		e.Kind, e.AggregateType, e.AggregateID = "instance.changed", "instance", x.GetInstanceId()
	case *nodev1.SessionChanged:
		role, e.Kind, e.AggregateType, e.AggregateID = pg.RoleNodeAPI, "session.changed", "session", x.GetSessionId()
	case *lifecyclev1.Finding:
		e.Kind, e.AggregateType, e.AggregateID = "finding.changed", "finding", x.GetFindingId()
	default:
		k.t.Fatalf("no event of %T", m)
	}
	k.versions[e.AggregateID]++
	e.AggregateVersion = k.versions[e.AggregateID]
	k.must(pg.InTx(k.ctx, k.db.Pool(role), func(ctx context.Context, tx pgx.Tx) error {
		_, err := events.Append(ctx, tx, e)
		return err
	}))
}

// beat writes a beat of a replica of nodeapi, which counts as listening.
func (k *kit) beat() {
	k.t.Helper()
	_, err := replicas.Write(k.ctx, k.db.Pool(pg.RoleNodeAPI), replicas.Beat{ReplicaID: k.replica})
	k.must(err)
}

// listen lets time pass while nodeapi beats.
func (k *kit) listen(d time.Duration) {
	k.t.Helper()
	for ; d > 0; d -= 5 * time.Second { // of the 15 s that a replica may be silent ten are left to a busy machine
		k.pass(min(d, 5*time.Second))
		k.beat()
	}
}

// listenUntil is listen until a moment of the mesh's clock, which goes on by itself as well.
func (k *kit) listenUntil(at time.Time) {
	k.t.Helper()
	for left := at.Sub(k.now()); left > 0; left = at.Sub(k.now()) {
		k.listen(min(left, 10*time.Second))
	}
}

func (k *kit) round() watchdog.Round {
	k.t.Helper()
	if !k.behind {
		k.must(k.sequencer.Drain(k.ctx))
		k.must(k.w.Drain(k.ctx))
	}
	out, err := k.w.RunOnce(k.ctx)
	k.must(err)
	return out
}

// instance is a workspace with its instance, node and operation.
type instance struct {
	ws      *lifecyclev1.Workspace
	run     *lifecyclev1.Run
	session *nodev1.SessionChanged
}

const (
	provisioning = commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING
	active       = commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	failed       = commonv1.WorkspaceState_WORKSPACE_STATE_FAILED
	recreating   = commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING
	byProcess    = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS
	byStatic     = commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC
)

var steps = []string{
	"Validate request", "Allocate storage", "Allocate workflow handle", "Apply per-tenant schema",
	"Deploy tenant workloads", "Wait for workloads ready", "Mark active",
}

func tenantID(name string) string {
	return fmt.Sprintf("00000000-0000-7000-8000-%012x", []byte(name)[:min(len(name), 6)])
}

// provision returns a workspace of a tenant that is being provisioned.
func (k *kit) provision(tenant, name string, where commonv1.PlacementDriver) *instance {
	k.t.Helper()
	b := &instance{ws: &lifecyclev1.Workspace{
		WorkspaceId: ids.New(), TenantId: tenantID(tenant), Tenant: tenant, Name: name, State: provisioning, Epoch: 1,
		Spec: &lifecyclev1.WorkspaceSpec{Placement: where}, StateAt: timestamppb.New(k.now()),
	}}
	k.start(b, commonv1.OperationKind_OPERATION_KIND_CREATE, ids.New(), "user:ada", provisioning)
	return b
}

// start begins an operation on the instance.
func (k *kit) start(b *instance, kind commonv1.OperationKind, runID, requester string, state commonv1.WorkspaceState) {
	k.t.Helper()
	b.run = &lifecyclev1.Run{
		RunId: runID, WorkspaceId: b.ws.GetWorkspaceId(), TenantId: b.ws.GetTenantId(), Kind: kind,
		State: commonv1.RunState_RUN_STATE_RUNNING, Phase: "do", StepNames: steps, Requester: requester,
		Epoch: b.ws.GetEpoch(), CreatedAt: timestamppb.New(k.now()),
	}
	b.ws.RunId, b.ws.State, b.ws.StateAt = runID, state, timestamppb.New(k.now())
	k.put(b.run, b.ws)
}

// succeed ends the instance's operation with success.
func (k *kit) succeed(b *instance) {
	k.t.Helper()
	b.run.State, b.run.FinishedAt, b.run.StuckReason, b.run.ChangedSteps = commonv1.RunState_RUN_STATE_SUCCEEDED,
		timestamppb.New(k.now()), "", nil
	b.ws.State, b.ws.StateAt, b.ws.RegisterFailures = active, timestamppb.New(k.now()), 0
	k.put(b.run, b.ws)
}

// fail ends the instance's operation as failed at a step, and undone.
func (k *kit) fail(b *instance, step int32, code string) {
	k.t.Helper()
	k.undo(b, step, code)
	b.run.State, b.run.FinishedAt, b.run.ChangedSteps = commonv1.RunState_RUN_STATE_FAILED, timestamppb.New(k.now()), nil
	b.ws.State, b.ws.StateAt, b.ws.LastErrorCode = failed, timestamppb.New(k.now()), code
	k.put(b.run, b.ws)
}

// undo makes the instance's operation go back from a step.
func (k *kit) undo(b *instance, step int32, code string) {
	k.t.Helper()
	b.run.State, b.run.Phase, b.run.Step, b.run.ErrorCode, b.run.Error = commonv1.RunState_RUN_STATE_COMPENSATING, "undo",
		step, code, "it said "+code
	b.run.StuckReason = ""
	b.run.ChangedSteps = []*lifecyclev1.StepAttempt{{
		RunId: b.run.GetRunId(), Step: step, Name: steps[step], Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
		Version: 9, State: commonv1.AttemptState_ATTEMPT_STATE_FAILED, ErrorCode: code,
		ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_DATABASE,
	}}
	k.put(b.run)
}

// stall flags the instance's operation at a step.
func (k *kit) stall(b *instance, step int32) {
	k.t.Helper()
	b.run.Step, b.run.StuckReason = step, `step_stalled: no progress at "`+steps[step]+`" for 00:05:00`
	b.run.ChangedSteps = []*lifecyclev1.StepAttempt{{
		RunId: b.run.GetRunId(), Step: step, Name: steps[step], Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
		Stalled: true, Version: 5,
		State: commonv1.AttemptState_ATTEMPT_STATE_RUNNING,
	}}
	k.put(b.run)
	b.run.ChangedSteps = nil
}

// up returns an active workspace whose instance has a session.
func (k *kit) up(tenant, name string, where commonv1.PlacementDriver, node string) *instance {
	k.t.Helper()
	b := k.provision(tenant, name, where)
	b.ws.NodeId = node
	b.session = &nodev1.SessionChanged{
		SessionId: ids.New(), NodeId: node, ReplicaId: k.replica, Generation: 1,
		State: commonv1.SessionState_SESSION_STATE_ADMITTED,
	}
	k.beat()
	k.put(b.session, &lifecyclev1.Instance{
		InstanceId: ids.New(), WorkspaceId: b.ws.GetWorkspaceId(), Epoch: 1,
		State: commonv1.InstanceState_INSTANCE_STATE_LIVE, Placement: where, NodeId: node,
		StartedAt: timestamppb.New(k.now()),
	})
	k.succeed(b)
	return b
}

// lose ends the session of the instance.
func (k *kit) lose(b *instance) {
	k.t.Helper()
	b.session.State, b.session.CloseReason = commonv1.SessionState_SESSION_STATE_CLOSED,
		commonv1.Reason_REASON_SESSION_SUPERSEDED
	k.put(b.session)
}

// back opens another session of the instance's node.
func (k *kit) back(b *instance) {
	k.t.Helper()
	b.session = &nodev1.SessionChanged{
		SessionId: ids.New(), NodeId: b.session.GetNodeId(), ReplicaId: k.replica, Generation: b.session.GetGeneration() + 1,
		State: commonv1.SessionState_SESSION_STATE_ADMITTED,
	}
	k.put(b.session)
}

// latest reads the newest event of a kind about an aggregate; an empty id means any.
func latest[M proto.Message](k *kit, kind, id string, m M) M {
	k.t.Helper()
	k.must(k.sequencer.Drain(k.ctx))
	after, found := int64(0), false
	for {
		list, next, err := events.Read(k.ctx, k.db.Pool(pg.RoleRecovery), after, []string{kind}, 1000)
		k.must(err)
		for _, r := range list {
			if id == "" || r.AggregateID == id || r.WorkspaceID == id {
				proto.Reset(m)
				k.must(r.Decode(m))
				found = true
			}
		}
		if next <= after {
			break
		}
		after = next
	}
	if !found {
		k.t.Fatalf("no %s about %q", kind, id)
	}
	return m
}

func (k *kit) record(b *instance) *recoveryv1.RecoveryRecord {
	k.t.Helper()
	return latest(k, "recovery_record.changed", b.ws.GetWorkspaceId(), &recoveryv1.RecoveryRecord{})
}

func (k *kit) brake() *recoveryv1.Brake {
	k.t.Helper()
	return latest(k, "brake.changed", "fleet", &recoveryv1.Brake{})
}

// incidents returns all incidents of a kind, by the newest event of each.
func (k *kit) incidents(kind commonv1.IncidentKind) []*recoveryv1.Incident {
	k.t.Helper()
	k.must(k.sequencer.Drain(k.ctx))
	byID, order := map[string]*recoveryv1.Incident{}, []string{}
	list, _, err := events.Read(k.ctx, k.db.Pool(pg.RoleRecovery), 0, []string{"incident.changed"}, 1000)
	k.must(err)
	for _, r := range list {
		i := &recoveryv1.Incident{}
		k.must(r.Decode(i))
		if i.GetKind() != kind {
			continue
		}
		if byID[i.GetIncidentId()] == nil {
			order = append(order, i.GetIncidentId())
		}
		byID[i.GetIncidentId()] = i
	}
	out := make([]*recoveryv1.Incident, 0, len(order))
	for _, id := range order {
		out = append(out, byID[id])
	}
	return out
}

func (k *kit) count(sql string, args ...any) int {
	k.t.Helper()
	var n int
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, sql, args...).Scan(&n))
	return n
}

func (k *kit) wantAsked(n int) {
	k.t.Helper()
	if got := len(k.owner.asked()); got != n {
		k.t.Fatalf("lifecycle was asked %d times, not %d", got, n)
	}
}

func (k *kit) wantOutcome(r *recoveryv1.RecoveryRecord, outcome commonv1.RecoveryOutcome) {
	k.t.Helper()
	if r.GetOutcome() != outcome {
		k.t.Fatalf("outcome %v, not %v: %v", r.GetOutcome(), outcome, r)
	}
}

// policySet changes a key for the watchdogs made from now on, the kit's own among them.
func (k *kit) policySet(key, value string) {
	k.t.Helper()
	given := k.policy.Given()
	if given == nil {
		given = map[string]string{}
	}
	given[key] = value
	var err error
	k.policy, err = policy.NewSet(given)
	k.must(err)
	k.w = k.watchdog("")
}

// digest returns, as text, all rows of the watchdog but its lease.
func (k *kit) digest() string {
	k.t.Helper()
	var out string
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT concat_ws(E'\n',
		(SELECT jsonb_agg(to_jsonb(x) ORDER BY x.workspace_id) FROM recovery.watch_workspace x),
		(SELECT jsonb_agg(to_jsonb(x) - 'seen_at' ORDER BY x.run_id) FROM recovery.watch_run x),
		(SELECT jsonb_agg(to_jsonb(x) ORDER BY x.workspace_id, x.epoch) FROM recovery.watch_instance x),
		(SELECT jsonb_agg(to_jsonb(x) ORDER BY x.session_id) FROM recovery.watch_session x),
		(SELECT jsonb_agg(to_jsonb(x) ORDER BY x.finding_id) FROM recovery.watch_emptied x),
		(SELECT jsonb_agg(to_jsonb(x) ORDER BY x.record_id) FROM recovery.recovery_record x),
		(SELECT jsonb_agg(to_jsonb(x) ORDER BY x.run_id, x.step, x.error_code) FROM recovery.class_sighting x))`).Scan(&out))
	return out
}
