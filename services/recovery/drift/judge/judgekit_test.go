package judge_test

import (
	"context"
	"crypto/x509"
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
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	beats "github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	admittedState = commonv1.SessionState_SESSION_STATE_ADMITTED
	closedState   = commonv1.SessionState_SESSION_STATE_CLOSED

	pendingState     = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING
	activeState      = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
	heldState        = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD
	quarantinedState = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED
	fencedState      = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED
	retiredState     = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
)

// theFleet is the id of the verdict on the control plane.
const theFleet = "00000000-0000-0000-0000-000000000000"

// kit is a judge over a database whose clock stands still.
type kit struct {
	t         *testing.T
	ctx       context.Context
	db        *testkit.Database
	sequencer *events.Sequencer
	judge     *judge.Judge
	versions  map[string]int64
	replica   string
	ahead     time.Duration
	root      *x509.Certificate // of the issuer of nodes' certificates
	lifecycle *fakeLifecycle
	policy    policy.Set

	evidence    collect.Settings // of the judges
	outageAfter time.Duration    // of the judges; zero: the default
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{
		t: t, ctx: testkit.Context(t), db: testkit.DB(t), versions: map[string]int64{}, replica: ids.New(),
		root: newRoot(t), lifecycle: &fakeLifecycle{},
	}
	k.lifecycle.clock = k.now
	testkit.StopClock(k.db)
	var err error
	k.sequencer, err = events.NewSequencer(events.SequencerDeps{
		Pool: k.db.Pool(pg.RoleSequencer), Logger: testkit.Logger(t),
	}, events.SequencerConfig{})
	k.must(err)
	k.judge = k.another()
	k.beat()
	k.preflight("ok", "", "")
	k.publish(k.replica, pki.Fingerprint(k.root))
	return k
}

// another returns the judge of another replica of recovery.
func (k *kit) another() *judge.Judge {
	k.t.Helper()
	judge, err := judge.New(judge.Deps{
		Logger: testkit.Logger(k.t), Pool: k.db.Pool(pg.RoleRecovery), Policy: policy.Fixed{Set: k.policy},
		Roots:  func(context.Context) ([]*x509.Certificate, error) { return []*x509.Certificate{k.root}, nil },
		Probes: k.lifecycle, Evidence: k.evidence, OutageAfter: k.outageAfter,
	})
	k.must(err)
	judge.ReadRoots(k.ctx)
	return judge
}

func (k *kit) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) now() time.Time {
	k.t.Helper()
	var at time.Time
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT mesh.clock()`).Scan(&at))
	return at
}

// pass moves the mesh's clock on.
func (k *kit) pass(d time.Duration) {
	k.t.Helper()
	k.ahead += d
	testkit.SetClockOffset(k.db, k.ahead)
}

func (k *kit) beat() {
	k.t.Helper()
	_, err := beats.Write(k.ctx, k.db.Pool(pg.RoleNodeAPI), beats.Beat{ReplicaID: k.replica})
	k.must(err)
}

// listen lets time pass while the replica beats.
func (k *kit) listen(d time.Duration) {
	k.t.Helper()
	for ; d > 0; d -= 5 * time.Second {
		k.pass(min(d, 5*time.Second))
		k.beat()
	}
}

// put appends messages as their owners do, and has the judge keep them as evidence.
func (k *kit) put(messages ...proto.Message) {
	k.t.Helper()
	for _, m := range messages {
		k.append(m)
	}
	k.must(k.sequencer.Drain(k.ctx))
	k.must(k.judge.Drain(k.ctx))
	if n := k.count(`SELECT count(*) FROM recovery.parked_event`); n != 0 {
		k.t.Fatalf("%d events were parked", n)
	}
}

// append appends messages, those of one owner in their order.
func (k *kit) append(messages ...proto.Message) {
	k.t.Helper()
	byRole := map[string][]events.Event{}
	for _, m := range messages {
		role, e := pg.RoleRecovery, events.Event{Payload: m, Unnamed: true}
		switch x := m.(type) {
		case *recoveryv1.NodeIdentity:
			e.Kind, e.AggregateType, e.AggregateID = "node_identity.changed", "node_identity", x.GetNodeId()
			e.CorrelationID = "c-" + x.GetNodeId()
		case *lifecyclev1.NodeGate:
			role, e.Kind, e.AggregateType, e.AggregateID = pg.RoleLifecycle, "gate.changed", "gate", x.GetNodeId()
		case *nodev1.SessionChanged:
			role, e.Kind, e.AggregateType, e.AggregateID = pg.RoleNodeAPI, "session.changed", "session", x.GetSessionId()
		case *lifecyclev1.TaskTypeRefused:
			role, e.Kind, e.AggregateType = pg.RoleLifecycle, "task.type_refused", "task_refusal"
			e.AggregateID = x.GetRefusedTaskId()
		case *recoveryv1.Evidence:
			role, e.Kind, e.AggregateType, e.AggregateID = pg.RoleLifecycle, "task_backlog.changed", "task_backlog",
				x.GetNodeId()
		case *recoveryv1.ProfileVersion:
			e.Kind, e.AggregateType = "profile.changed", "profile"
			e.AggregateID = x.GetProfile().GetFingerprint()
		case *nodev1.IngressRejected:
			role, e.Kind, e.AggregateType, e.AggregateID = pg.RoleNodeAPI, "ingress.rejected", "ingress_rejection",
				x.GetRejectionId()
			e.CorrelationID = x.GetRejectionId()
		default:
			k.t.Fatalf("no event of %T", m)
		}
		k.versions[e.Kind+e.AggregateID]++
		e.AggregateVersion = k.versions[e.Kind+e.AggregateID]
		byRole[role] = append(byRole[role], e)
	}
	for _, role := range []string{pg.RoleRecovery, pg.RoleLifecycle, pg.RoleNodeAPI} {
		if len(byRole[role]) == 0 {
			continue
		}
		k.must(pg.InTx(k.ctx, k.db.Pool(role), func(ctx context.Context, tx pgx.Tx) error {
			_, err := events.Append(ctx, tx, byRole[role]...)
			return err
		}))
	}
}

// round makes rounds until there is nothing more to judge, and returns how many verdicts changed.
func (k *kit) round() int {
	k.t.Helper()
	for changed := 0; ; {
		out, err := k.judge.RunOnce(k.ctx)
		k.must(err)
		if changed += out.Changed; !out.More {
			return changed
		}
	}
}

// machine is a node with its identity, its session and its gate.
type machine struct {
	identity *recoveryv1.NodeIdentity
	session  *nodev1.SessionChanged
	gate     *lifecyclev1.NodeGate
}

func (n *machine) id() string { return n.identity.GetNodeId() }

// made returns a node of which nothing was appended yet.
func (k *kit) made() *machine {
	k.t.Helper()
	at := timestamppb.New(k.now())
	id := ids.New()
	return &machine{
		identity: &recoveryv1.NodeIdentity{
			NodeId: id, State: activeState, StateAt: at, CreatedAt: at, NodeInstanceId: ids.New(), CurrentSerial: "01",
			IssuerFingerprint: pki.Fingerprint(k.root),
		},
		session: &nodev1.SessionChanged{
			SessionId: ids.New(), NodeId: id, ReplicaId: k.replica, Generation: 1, State: admittedState, LastSeenAt: at,
			Serial: "01",
		},
		gate: &lifecyclev1.NodeGate{NodeId: id, Admitted: true},
	}
}

// up returns a node that is connected, and judged so.
func (k *kit) up() *machine {
	k.t.Helper()
	n := k.made()
	k.put(n.identity, n.session, n.gate)
	if changed := k.round(); changed != 0 {
		k.t.Fatalf("%d verdicts on a node that is well", changed)
	}
	return n
}

// enter moves the identity of a node into a state.
func (k *kit) enter(n *machine, state commonv1.NodeIdentityState, alarm string) {
	k.t.Helper()
	n.identity.State, n.identity.Alarm, n.identity.StateAt = state, alarm, timestamppb.New(k.now())
	n.identity.StateReason = "it was decided"
	k.put(n.identity)
}

// lose ends the session of a node, which was heard just before.
func (k *kit) lose(n *machine) {
	k.t.Helper()
	n.session.State, n.session.LastSeenAt = closedState, timestamppb.New(k.now())
	n.session.ClosedAt = n.session.GetLastSeenAt()
	k.put(n.session)
}

// back opens another session of a node.
func (k *kit) back(n *machine) {
	k.t.Helper()
	n.session = &nodev1.SessionChanged{
		SessionId: ids.New(), NodeId: n.id(), ReplicaId: k.replica, Generation: n.session.GetGeneration() + 1,
		State: admittedState, LastSeenAt: timestamppb.New(k.now()), Serial: n.identity.GetCurrentSerial(),
	}
	k.put(n.session)
}

// verdicts returns the verdicts on an id in their order, as the events have them; of all for an empty id.
func (k *kit) verdicts(id string) []*recoveryv1.NodeVerdict {
	k.t.Helper()
	k.must(k.sequencer.Drain(k.ctx))
	var out []*recoveryv1.NodeVerdict
	for after := int64(0); ; {
		list, next, err := events.Read(k.ctx, k.db.Pool(pg.RoleRecovery), after, []string{"verdict.changed"}, 1000)
		k.must(err)
		for _, r := range list {
			if id != "" && r.AggregateID != id {
				continue
			}
			v := &recoveryv1.NodeVerdict{}
			k.must(r.Decode(v))
			if r.AggregateVersion != v.GetVersion() {
				k.t.Fatalf("version %d of an event of %v", r.AggregateVersion, v)
			}
			out = append(out, v)
		}
		if next <= after {
			return out
		}
		after = next
	}
}

// wantReasons checks the reasons of all verdicts on an id, and returns the last verdict.
func (k *kit) wantReasons(id string, want ...commonv1.DriftReason) *recoveryv1.NodeVerdict {
	k.t.Helper()
	list := k.verdicts(id)
	for i, v := range list {
		if i >= len(want) || v.GetReason() != want[i] || v.GetVersion() != int64(i+1) {
			k.t.Fatalf("verdict %d of %s is %v, want %v", i+1, id, v, want)
		}
	}
	if len(list) != len(want) {
		k.t.Fatalf("%d verdicts on %s, want %v", len(list), id, want)
	}
	if len(list) == 0 {
		return nil
	}
	return list[len(list)-1]
}

func (k *kit) count(sql string, args ...any) int {
	k.t.Helper()
	var n int
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, sql, args...).Scan(&n))
	return n
}

// digest returns, as text, all rows of the judge and their places in the tables.
func (k *kit) digest() string {
	k.t.Helper()
	var out string
	k.must(k.db.Pool(pg.RoleRecovery).QueryRow(k.ctx, `SELECT concat_ws(E'\n',
		(SELECT jsonb_agg(to_jsonb(x) || jsonb_build_object('at', x.ctid::text) ORDER BY x.node_id)
			FROM recovery.judgement x),
		(SELECT jsonb_agg(to_jsonb(x) || jsonb_build_object('at', x.ctid::text) ORDER BY x.node_id, x.part, x.source)
			FROM recovery.evidence x),
		(SELECT jsonb_agg(to_jsonb(x) || jsonb_build_object('at', x.ctid::text) ORDER BY x.node_id)
			FROM recovery.verdict x),
		(SELECT count(*) FROM recovery.verdict_period),
		(SELECT count(*) FROM events.event))`).Scan(&out))
	return out
}
