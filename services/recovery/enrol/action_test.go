package enrol_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	beats "github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

const soon = 30 * time.Second

// probes is lifecycle's service of probes, whose tasks succeed as soon as they are asked for.
type probes struct {
	now func() *timestamppb.Timestamp

	mu         sync.Mutex
	generation int64
}

func (p *probes) ProbeNodes(_ context.Context, req *lifecyclev1.ProbeNodesRequest,
) (*lifecyclev1.ProbeNodesResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := &lifecyclev1.ProbeNodesResponse{CheckedAt: p.now()}
	for _, n := range req.GetNodes() {
		out.Nodes = append(out.Nodes, &lifecyclev1.NodeProbed{NodeId: n.GetNodeId(), Task: &lifecyclev1.Task{
			NodeId: n.GetNodeId(), State: commonv1.TaskState_TASK_STATE_SUCCEEDED, SessionEpoch: p.generation,
			StateAt: p.now(),
		}})
	}
	return out, nil
}

// withJudge is a judge over the kit's database, and a replica of nodeapi.
type withJudge struct {
	*kit
	judge    *judge.Judge
	probes   *probes
	replica  string
	number   func()
	versions map[string]int64
}

func (k *kit) withJudge() *withJudge {
	k.t.Helper()
	j := &withJudge{kit: k, probes: &probes{now: k.now}, replica: ids.New(), versions: map[string]int64{}}
	numbered := &events.Signal{}
	sequencer, err := events.NewSequencer(events.SequencerDeps{
		Pool: k.db.Pool(pg.RoleSequencer), Logger: testkit.Logger(k.t),
	}, events.SequencerConfig{})
	k.must(err)
	j.number = func() {
		k.must(sequencer.Drain(k.ctx))
		numbered.Notify()
	}
	j.judge, err = judge.New(judge.Deps{
		Logger: testkit.Logger(k.t), Pool: k.pool, Policy: policy.Fixed{}, Numbered: numbered, Probes: j.probes,
	})
	k.must(err)
	_, err = beats.Write(k.ctx, k.db.Pool(pg.RoleNodeAPI), beats.Beat{ReplicaID: j.replica})
	k.must(err)
	ctx, cancel := context.WithCancel(k.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = j.judge.Consume(ctx)
	}()
	k.t.Cleanup(func() { cancel(); <-done })
	return j
}

// now returns the database's time.
func (k *kit) now() *timestamppb.Timestamp {
	k.t.Helper()
	var at time.Time
	k.must(k.pool.QueryRow(k.ctx, `SELECT mesh.clock()`).Scan(&at))
	return timestamppb.New(at)
}

func (k *kit) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

// report appends an event of nodeapi.
func (j *withJudge) report(e events.Event) {
	j.t.Helper()
	j.versions[e.AggregateID]++
	e.AggregateVersion, e.Unnamed = j.versions[e.AggregateID], true
	j.must(pg.InTx(j.ctx, j.db.Pool(pg.RoleNodeAPI), func(ctx context.Context, tx pgx.Tx) error {
		_, err := events.Append(ctx, tx, e)
		return err
	}))
	j.number()
}

// serves reports the session of a machine, in a state.
func (j *withJudge) serves(m *machine, state commonv1.SessionState) {
	j.t.Helper()
	r := j.record(m.node)
	j.probes.mu.Lock()
	j.probes.generation = r.Confirmed
	j.probes.mu.Unlock()
	s := &nodev1.SessionChanged{
		SessionId: m.session, NodeId: m.node, ReplicaId: j.replica, Generation: r.Confirmed, State: state, Serial: m.serial,
	}
	if state == commonv1.SessionState_SESSION_STATE_CLOSED {
		s.ClosedAt = j.now()
	}
	j.report(events.Event{Kind: "session.changed", AggregateType: "session", AggregateID: m.session, Payload: s})
}

// refuses reports that the ingress refused the certificate of a machine as expired, and returns the correlation id.
func (j *withJudge) refuses(m *machine) string {
	j.t.Helper()
	id, now := ids.New(), j.now()
	j.report(events.Event{
		Kind: "ingress.rejected", AggregateType: "ingress_rejection", AggregateID: id,
		Payload: &nodev1.IngressRejected{
			RejectionId: id, ReplicaId: j.replica, ClaimedNodeId: m.node, Serial: m.serial, FirstSeenAt: now, LastSeenAt: now,
			Reason: commonv1.Reason_REASON_CERTIFICATE_EXPIRED, Count: 1,
		},
		Correlation: events.Correlation{CorrelationID: id, NodeID: m.node},
	})
	return id
}

// until judges and probes until a check succeeds.
func (j *withJudge) until(check func() error) {
	j.t.Helper()
	testkit.Eventually(j.t, soon, func() error {
		j.number()
		if _, err := beats.Write(j.ctx, j.db.Pool(pg.RoleNodeAPI), beats.Beat{ReplicaID: j.replica}); err != nil {
			return err
		}
		if _, _, err := j.judge.ProbeOnce(j.ctx); err != nil {
			return err
		}
		if _, err := j.judge.RunOnce(j.ctx); err != nil {
			return err
		}
		return check()
	})
}

// trusts has the preflight see that the ingress trusts the issuer of a machine's certificate.
func (j *withJudge) trusts(m *machine) {
	j.t.Helper()
	_, err := j.db.OwnerPool().Exec(j.ctx, `UPDATE recovery.ca_preflight SET state = 'ok', since = mesh.clock(),
		trusted_issuer = $1, version = version + 1`, j.record(m.node).IssuerFingerprint)
	j.must(err)
}

func (k *kit) actions(nodeID string) []*recoveryv1.RecoveryAction {
	k.t.Helper()
	answer, err := actions.NewServer(k.pool).ListActions(k.ctx, &recoveryv1.ListActionsRequest{NodeId: nodeID})
	k.must(err)
	return answer.GetItems()
}

// is returns an error unless the newest action of a node is of a kind and in a state.
func (k *kit) is(nodeID string, kind actions.Kind, state actions.State) error {
	list := k.actions(nodeID)
	if len(list) == 0 || list[0].GetKind() != kind || list[0].GetState() != state {
		return fmt.Errorf("the actions are %v", list)
	}
	return nil
}

// Scenario: a node returns after its certificate has expired, is rejected, enrols again with its recovery token, and is
// proven healthy. That is one action, and all of it has the correlation id of the rejection.
func TestARecoveryIsOneActionFromTheRejectionToTheHealthyVerdict(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	testkit.SetClockOffset(k.db, 2*time.Minute) // the next enrolment is reported apart from the first one
	j := k.withJudge()
	j.trusts(m)
	j.serves(m, commonv1.SessionState_SESSION_STATE_ADMITTED)
	j.serves(m, commonv1.SessionState_SESSION_STATE_CLOSED)
	correlation := j.refuses(m)
	j.until(func() error { return k.is(m.node, actions.ReEnrolment, actions.StateOpen) })
	j.refuses(m) // the agent goes on
	j.until(func() error {
		if list := k.actions(m.node); len(list) != 1 || list[0].GetCorrelationId() != correlation {
			return fmt.Errorf("%v", list)
		}
		return nil
	})
	m.mustRecover(k.csr())
	j.until(func() error { return k.is(m.node, actions.ReEnrolment, actions.StateOpen) })
	for range 2 { // the second one before the node is proven healthy
		m.admit()
		if m.correlation != correlation {
			t.Errorf("the session on the new certificate has the correlation id %q, want %q", m.correlation, correlation)
		}
	}
	j.serves(m, commonv1.SessionState_SESSION_STATE_ADMITTED)
	j.until(func() error { return k.is(m.node, actions.ReEnrolment, actions.StateSucceeded) })
	if m.admit(); m.correlation != "" {
		t.Errorf("a session after the action has its correlation id %q", m.correlation)
	}
	list := k.actions(m.node)
	if len(list) != 1 {
		t.Fatalf("%d actions", len(list))
	}
	a := list[0]
	if a.GetCorrelationId() != correlation || a.GetAgentCorrelationId() != "attempt-0001" || a.GetAttempts() != 1 ||
		a.GetReason() != commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED || a.GetRequester() != actions.Automatic {
		t.Errorf("%v", a)
	}
	times := []*timestamppb.Timestamp{
		a.GetFirstRejectedAt(), a.GetBegunAt(), a.GetEffectAt(), a.GetHealthyAt(), a.GetEndedAt(),
	}
	if slices.Contains(times, nil) || !slices.IsSortedFunc(times, func(x, y *timestamppb.Timestamp) int {
		return x.AsTime().Compare(y.AsTime())
	}) {
		t.Errorf("times of the action: %v", times)
	}
	j.wantEvents(correlation,
		"ingress.rejected",
		"verdict.changed", "recovery_action.changed", // cert_expired, open
		"enrollment.attempted", "node_identity.changed", "recovery_action.changed", // its effect
		"node_identity.changed",                      // the first session on the new certificate
		"verdict.changed",                            // the reason has ended
		"verdict.changed", "recovery_action.changed", // healthy
	)
}

// wantEvents checks which events have a correlation id, in any order. What the decision about an identity is recorded
// as in the audit log does not count.
func (j *withJudge) wantEvents(correlation string, want ...string) {
	j.t.Helper()
	var got []string
	for _, e := range testkit.Events(j.t, j.pool, "correlation_id = $1", correlation) {
		if !strings.HasPrefix(e.Kind, "audit") {
			got = append(got, e.Kind)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		j.t.Errorf("events of %s:\n%v, want\n%v", correlation, got, want)
	}
}

// Scenario: the agent enrols again before recovery has read of its rejection. The enrolment begins the action, and it
// ends with a probe though no reason was concluded.
func TestAnEnrolmentBeforeAnyVerdictBeginsItsAction(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	j := k.withJudge()
	j.trusts(m)
	m.mustRecover(k.csr())
	if err := k.is(m.node, actions.ReEnrolment, actions.StateOpen); err != nil {
		t.Fatal(err)
	}
	if a := k.actions(m.node)[0]; a.GetEffectAt() == nil || a.GetCorrelationId() != "attempt-0001" {
		t.Errorf("%v", a)
	}
	m.admit()
	j.serves(m, commonv1.SessionState_SESSION_STATE_ADMITTED)
	j.until(func() error { return k.is(m.node, actions.ReEnrolment, actions.StateSucceeded) })
	if len(k.actions(m.node)) != 1 {
		t.Errorf("%v", k.actions(m.node))
	}
}

// Scenario: a node is held for a copy and fenced by a person: the hold is an action whose place the fence takes. After
// the reactivation an operator's token brings the node back, which is another action.
func TestAPersonSupersedesAnAction(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	identities, err := identity.New(identity.Deps{Logger: testkit.Logger(t), Pool: k.pool, Keys: k.keys})
	k.must(err)
	change := func(verb recoveryv1.IdentityVerb) {
		t.Helper()
		_, _, err := identities.Change(k.ctx, m.node, verb, "because",
			identity.Actor{Subject: "ada", Roles: []string{"security"}})
		k.must(err)
	}
	m.mustRecover(k.csr()) // an action is open
	k.hold(m.node, identity.AlarmClone)
	k.must(k.is(m.node, actions.Fencing, actions.StateOpen))
	list := k.actions(m.node)
	if len(list) != 2 || list[1].GetState() != actions.StateSuperseded || list[0].GetEffectAt() == nil ||
		list[0].GetReason() != commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED {
		t.Fatalf("%v", list)
	}
	change(recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE)
	k.must(k.is(m.node, actions.Fencing, actions.StateSuperseded))
	if a := k.actions(m.node)[0]; a.GetOutcome() != "fenced by ada: because" || a.GetEndedAt() == nil {
		t.Errorf("%v", a)
	}
	change(recoveryv1.IdentityVerb_IDENTITY_VERB_REACTIVATE)
	change(recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD)
	if list := k.actions(m.node); len(list) != 2 {
		t.Errorf("a hold by a person begins nothing: %v", list)
	}
	m.took(m.mustEnroll(k.bootstrap("node-1").Token, k.csr()))
	k.must(k.is(m.node, actions.Rebootstrap, actions.StateOpen))
	if a := k.actions(m.node)[0]; a.GetRequester() != "ada" || a.GetEffectAt() == nil {
		t.Errorf("%v", a)
	}
}

// A machine that enrols for the first time recovers from nothing, and neither does a refused attempt while no action is
// open.
func TestWhatIsNoRecoveryIsNoAction(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	k.setPolicy(map[string]string{policy.AutoRecovery: "false"})
	if _, err := m.recover(k.csr()); err == nil {
		t.Fatal(errors.New("recovered against the policy"))
	}
	if list := k.actions(m.node); len(list) != 0 {
		t.Errorf("%v", list)
	}
}
