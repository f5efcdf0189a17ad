package actions_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const expired = commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED

type kit struct {
	t   *testing.T
	ctx context.Context
	db  *testkit.Database
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	return &kit{t: t, ctx: testkit.Context(t), db: testkit.DB(t)}
}

func (k *kit) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

// in runs fn in a transaction of recovery.
func (k *kit) in(fn func(ctx context.Context, tx pgx.Tx) error) {
	k.t.Helper()
	k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), fn))
}

func (k *kit) begin(from actions.Beginning) string {
	k.t.Helper()
	var out string
	k.in(func(ctx context.Context, tx pgx.Tx) error {
		var err error
		out, err = actions.Begin(ctx, tx, from)
		return err
	})
	return out
}

// list returns the actions of a node, or all, the newest first.
func (k *kit) list(nodeID string, state actions.State) []*recoveryv1.RecoveryAction {
	k.t.Helper()
	answer, err := actions.NewServer(k.db.Pool(pg.RoleRecovery)).ListActions(k.ctx,
		&recoveryv1.ListActionsRequest{NodeId: nodeID, State: state})
	k.must(err)
	return answer.GetItems()
}

func (k *kit) only(nodeID string) *recoveryv1.RecoveryAction {
	k.t.Helper()
	list := k.list(nodeID, 0)
	if len(list) != 1 {
		k.t.Fatalf("%d actions: %v", len(list), list)
	}
	return list[0]
}

// Scenario: rejections that are seen at once by several replicas begin one action, under one correlation id.
func TestRejectionsAtOnceAreOneAction(t *testing.T) {
	k := newKit(t)
	node := ids.New()
	var all sync.WaitGroup
	got := make([]string, 16)
	for i := range got {
		all.Go(func() {
			err := pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
				var err error
				got[i], err = actions.Begin(ctx, tx, actions.Beginning{
					NodeID: node, Kind: actions.ReEnrolment, Reason: expired, Requester: actions.Automatic,
					CorrelationID: ids.New(),
				})
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	a := k.only(node)
	for _, correlation := range got {
		if correlation != a.GetCorrelationId() {
			t.Errorf("correlation %s, want that of the action, %s", correlation, a.GetCorrelationId())
		}
	}
	if n := len(testkit.Events(t, k.db.Pool(pg.RoleRecovery), "kind = 'recovery_action.changed'")); n != 1 {
		t.Errorf("%d events", n)
	}
}

// Scenario: an action that does not come to its end in the budget of its kind fails once, and says what was attempted.
// The next recovery of the node is another one.
func TestAnActionFailsAtItsTime(t *testing.T) {
	k := newKit(t)
	node, other := ids.New(), ids.New()
	from := actions.Beginning{NodeID: node, Kind: actions.ReEnrolment, Reason: expired, Requester: actions.Automatic}
	first := k.begin(from)
	k.begin(actions.Beginning{NodeID: other, Kind: actions.Bundle, Requester: "ada", Within: 24 * time.Hour})
	k.in(func(ctx context.Context, tx pgx.Tx) error {
		_, err := actions.Attempt(ctx, tx, node, actions.ReEnrolment, "refused: token_expired", false)
		return err
	})
	sweep := func() int {
		t.Helper()
		n, err := actions.Sweep(k.ctx, k.db.Pool(pg.RoleRecovery))
		k.must(err)
		return n
	}
	testkit.SetClockOffset(k.db, time.Hour-time.Minute)
	if n := sweep(); n != 0 {
		t.Fatalf("%d actions failed before their time", n)
	}
	testkit.SetClockOffset(k.db, time.Hour+time.Second)
	if n := sweep(); n != 1 {
		t.Fatalf("%d actions failed", n)
	}
	if n := sweep(); n != 0 {
		t.Errorf("%d actions failed again", n)
	}
	a := k.only(node)
	if a.GetState() != actions.StateFailed || !a.GetEndedAt().AsTime().Equal(a.GetFailsAt().AsTime()) ||
		a.GetAttempts() != 1 || !strings.Contains(a.GetOutcome(), "token_expired") || a.GetVersion() != 3 {
		t.Errorf("%v", a)
	}
	if len(k.list("", actions.StateOpen)) != 1 || len(k.list("", actions.StateFailed)) != 1 {
		t.Error("lists by state")
	}
	if again := k.begin(from); again == first || len(k.list(node, 0)) != 2 || len(k.list(node, actions.StateOpen)) != 1 {
		t.Errorf("the next one: %v", k.list(node, 0))
	}
}

// Scenario: during an update a newer build has written an action of a kind, and one for a reason, that this build does
// not know. They alone are set aside: they are listed as they are stored, and stay as they are.
func TestAnActionOfANewerBuildIsSetAsideAlone(t *testing.T) {
	k := newKit(t)
	node := ids.New()
	insert := func(kind, reason string) string {
		t.Helper()
		id := ids.New()
		_, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, `INSERT INTO recovery.recovery_action (action_id, node_id, kind,
			state, reason, requester, correlation_id, agent_correlation_id, begun_at, fails_at, attempts, outcome, version)
			VALUES ($1, $2, $3, 'open', $4, 'x', 'c', '', mesh.clock(), mesh.clock() - interval '1 minute', 0, '', 1)`,
			id, node, kind, reason)
		k.must(err)
		return id
	}
	insert("orbit", "cert_expired")
	insert("bundle", "sunspots")
	from := actions.Beginning{NodeID: node, Kind: actions.Bundle, Reason: expired, Requester: "ada"}
	if correlation := k.begin(from); correlation != "" {
		t.Errorf("joined an action that this build cannot read: %s", correlation)
	}
	from.Kind = actions.ReEnrolment
	k.begin(from)
	k.in(func(ctx context.Context, tx pgx.Tx) error {
		b, err := actions.Open(ctx, tx, node)
		if err != nil {
			return err
		}
		b.Decided(node, "fenced by ada: lost")
		return b.Save(ctx, tx)
	})
	unknown := map[string]bool{}
	for _, a := range k.list(node, 0) {
		switch {
		case a.GetUnknown() != "":
			unknown[a.GetUnknown()] = true
			if a.GetState() != actions.StateOpen || a.GetVersion() != 1 {
				t.Errorf("%v", a)
			}
		case a.GetState() != actions.StateSuperseded || a.GetOutcome() != "fenced by ada: lost":
			t.Errorf("%v", a)
		}
	}
	if len(unknown) != 2 || !unknown["orbit"] || !unknown["sunspots"] {
		t.Errorf("set aside: %v", unknown)
	}
	// That it fails in its time depends on no reason; of an unknown kind nothing is known.
	n, err := actions.Sweep(k.ctx, k.db.Pool(pg.RoleRecovery))
	k.must(err)
	if open := k.list(node, actions.StateOpen); n != 1 || len(open) != 1 || open[0].GetUnknown() != "orbit" {
		t.Errorf("%d failed; open: %v", n, open)
	}
}

// Scenario: a person's token takes the place of what was done for the node by itself, and goes on under its
// correlation id, from its first rejection.
func TestAPersonsTokenTakesThePlaceOfWhatWasDone(t *testing.T) {
	k := newKit(t)
	node, rejected := ids.New(), time.Now().Add(-time.Minute).UTC().Truncate(time.Millisecond)
	k.begin(actions.Beginning{
		NodeID: node, Kind: actions.ReEnrolment, Reason: expired, Requester: actions.Automatic, CorrelationID: "rejected-1",
		RejectedAt: rejected,
	})
	k.begin(actions.Beginning{NodeID: node, Kind: actions.StaleTaskSweep, Requester: "lifecycle"})
	var correlation string
	k.in(func(ctx context.Context, tx pgx.Tx) error {
		var err error
		correlation, err = actions.Enrolled(ctx, tx, actions.Beginning{
			NodeID: node, Kind: actions.Rebootstrap, Requester: "ada", AgentCorrelationID: "attempt-7",
		}, "certificate 01 was issued")
		return err
	})
	if correlation != "rejected-1" {
		t.Errorf("correlation %q", correlation)
	}
	states := map[actions.Kind]*recoveryv1.RecoveryAction{}
	for _, a := range k.list(node, 0) {
		states[a.GetKind()] = a
	}
	if a := states[actions.ReEnrolment]; a.GetState() != actions.StateSuperseded ||
		a.GetOutcome() != "rebootstrap by ada" {
		t.Errorf("%v", a)
	}
	if a := states[actions.StaleTaskSweep]; a.GetState() != actions.StateOpen {
		t.Errorf("%v", a)
	}
	a := states[actions.Rebootstrap]
	if a.GetState() != actions.StateOpen || a.GetEffectAt() == nil || a.GetRequester() != "ada" ||
		a.GetAgentCorrelationId() != "attempt-7" || !a.GetFirstRejectedAt().AsTime().Equal(rejected) ||
		a.GetReason() != expired || a.GetAttempts() != 1 {
		t.Errorf("%v", a)
	}
}

// Scenario: the authority and the ingress differ, a person repairs them, and they are the same again.
func TestARepairOfTheControlPlane(t *testing.T) {
	k := newKit(t)
	k.begin(actions.Beginning{
		Kind: actions.CARepair, Reason: commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS,
		Requester: "recovery", CorrelationID: "incident-1",
	})
	k.in(func(ctx context.Context, tx pgx.Tx) error {
		_, err := actions.Attempt(ctx, tx, "", actions.CARepair, "the root was published, by ada", true)
		return err
	})
	open := k.list("", actions.StateOpen)
	if len(open) != 1 || open[0].GetNodeId() != "" || open[0].GetEffectAt() == nil || open[0].GetAttempts() != 1 ||
		open[0].GetFailsAt().AsTime().Sub(open[0].GetBegunAt().AsTime()) != 15*time.Minute {
		t.Fatalf("%v", open)
	}
	over := func() {
		t.Helper()
		k.in(func(ctx context.Context, tx pgx.Tx) error {
			return actions.Over(ctx, tx, "", actions.CARepair, "", "they are the same")
		})
	}
	over()
	over() // nothing is open any more
	list := k.list("", 0)
	if len(list) != 1 || list[0].GetState() != actions.StateSucceeded || list[0].GetHealthyAt() == nil ||
		list[0].GetVersion() != 3 || list[0].GetCorrelationId() != "incident-1" {
		t.Errorf("%v", list)
	}
}

// A page ends where it was told to, and the next one goes on there.
func TestPagesOfActions(t *testing.T) {
	k := newKit(t)
	want := map[string]bool{}
	for range 5 {
		want[k.begin(actions.Beginning{NodeID: ids.New(), Kind: actions.Bundle, Requester: "ada"})] = true
	}
	server := actions.NewServer(k.db.Pool(pg.RoleRecovery))
	req, last := &recoveryv1.ListActionsRequest{PageSize: 2}, ""
	for {
		answer, err := server.ListActions(k.ctx, req)
		k.must(err)
		for _, a := range answer.GetItems() {
			if last != "" && a.GetActionId() >= last {
				t.Errorf("%s after %s", a.GetActionId(), last)
			}
			last = a.GetActionId()
			delete(want, a.GetCorrelationId())
		}
		if req.PageToken = answer.GetNextPageToken(); req.GetPageToken() == "" {
			break
		}
	}
	if len(want) != 0 {
		t.Errorf("not listed: %v", want)
	}
	for _, bad := range []*recoveryv1.ListActionsRequest{{PageToken: "soon"}, {NodeId: "node-1"}} {
		if _, err := server.ListActions(k.ctx, bad); err == nil {
			t.Errorf("accepted %v", bad)
		}
	}
}
