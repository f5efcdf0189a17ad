package watchdog_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/rpc"
)

// fleet is n active workspaces, each in its own instance.
func (k *kit) fleet(n int) []*instance {
	k.t.Helper()
	out := make([]*instance, n)
	for i := range out {
		out[i] = k.up("acme", fmt.Sprintf("w%d", i), byProcess, ids.New())
	}
	return out
}

// detectAll ends the sessions of instances and runs the rounds that detect this and act on it.
func (k *kit) detectAll(instances []*instance) {
	k.t.Helper()
	for _, b := range instances {
		k.lose(b)
	}
	k.listen(130 * time.Second)
	k.detect()
}

// Above two in a small fleet and above a fifth in a larger one the brake stops everything; up to that it does not.
func TestBrakeLimit(t *testing.T) {
	for _, tt := range []struct {
		fleet, lost int
		engaged     bool
	}{
		{3, 2, false}, {3, 3, true}, {15, 3, false}, {15, 4, true},
	} {
		t.Run(fmt.Sprintf("%d of %d", tt.lost, tt.fleet), func(t *testing.T) {
			k := newKit(t)
			k.policySet("churn.recreates_per_hour", "60")
			instances := k.fleet(tt.fleet)
			k.detectAll(instances[:tt.lost])
			if !tt.engaged {
				k.wantAsked(tt.lost)
				if list := k.incidents(brakeKind); len(list) != 0 {
					t.Fatalf("%v", list)
				}
				return
			}
			k.wantAsked(0)
			b := k.brake()
			if !b.GetEngaged() || int(b.GetAffected()) != tt.lost || int(b.GetFleet()) != tt.fleet || b.GetReason() == "" ||
				b.GetSince() == nil {
				t.Fatalf("%v", b)
			}
			list := k.incidents(brakeKind)
			if len(list) != 1 || list[0].GetIncidentId() != b.GetIncidentId() || len(list[0].GetWorkspaceIds()) != tt.lost ||
				list[0].GetNextAction() == "" {
				t.Fatalf("%v", list)
			}
			// The record still shows the recovery that is withheld.
			rec := k.record(instances[0])
			k.wantOutcome(rec, withheld)
			if !strings.Contains(rec.GetWithheldBecause(), "brake") || !strings.Contains(rec.GetWithheldBecause(), "recreate") {
				t.Fatalf("%v", rec)
			}
		})
	}
}

// TestTheShareThatEngagesTheBrakeIsThePolicys: four of fifteen are more than a fifth, and less than half.
func TestTheShareThatEngagesTheBrakeIsThePolicys(t *testing.T) {
	for value, asked := range map[string]int{"": 0, "0.5": 4} {
		k := newKit(t)
		k.policySet("churn.recreates_per_hour", "60")
		if value != "" {
			k.policySet(policy.BrakeFleetFraction, value)
		}
		k.detectAll(k.fleet(15)[:4])
		k.wantAsked(asked)
		if list := k.incidents(brakeKind); (len(list) == 0) != (asked > 0) {
			t.Errorf("with %q: %v", value, list)
		}
	}
}

func TestBrakeCountsWhatFailsWithinItsWindowAlone(t *testing.T) {
	k := newKit(t)
	instances := k.fleet(4)
	k.detectAll(instances[:2])
	k.wantAsked(2)
	k.listen(6 * time.Minute)
	k.round()
	k.detectAll(instances[2:3])
	k.wantAsked(3)
}

func TestPersonReleasesTheBrake(t *testing.T) {
	k := newKit(t)
	k.policySet("churn.recreates_per_hour", "60")
	instances := k.fleet(5)
	ada := rpc.WithPerson(k.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	if _, err := k.all.ReleaseBrake(ada, &recoveryv1.ReleaseBrakeRequest{Reason: "why not"}); !fault.Has(err,
		commonv1.Reason_REASON_PRECONDITION_FAILED) {
		t.Fatalf("a brake that is not engaged: %v", err)
	}
	k.detectAll(instances[:3])
	k.wantAsked(0)
	out, err := k.all.ReleaseBrake(ada, &recoveryv1.ReleaseBrakeRequest{Reason: "the switch was replaced"})
	k.must(err)
	if b := out.GetBrake(); b.GetEngaged() || b.GetReleasedBy() != "ada" ||
		b.GetReleaseReason() != "the switch was replaced" || out.GetPos() == "" {
		t.Fatalf("%v", out)
	}
	if list := k.incidents(brakeKind); len(list) != 1 || list[0].GetClosedAt() == nil || list[0].GetClosedBy() != "ada" {
		t.Fatalf("%v", list)
	}
	k.round()
	k.wantAsked(3) // and it does not engage again for failures from before its release
	if n := k.count(`SELECT count(*) FROM events.event
		WHERE kind = 'audit.recorded' AND payload->>'action' = 'brake.release' AND payload->>'actor' = 'ada'`); n != 1 {
		t.Fatalf("%d entries of the release", n)
	}
	// A second wave of failures engages it.
	for _, b := range instances[:3] {
		k.start(b, kRecreate, k.record(b).GetOperationId(), asked, recreating)
		k.back(b)
		k.succeed(b)
	}
	k.round()
	k.detectAll(instances[2:])
	if !k.brake().GetEngaged() || len(k.incidents(brakeKind)) != 2 {
		t.Fatalf("%v", k.brake())
	}
}

func TestBrakeLetsGoWhenTheCauseHasGone(t *testing.T) {
	k := newKit(t)
	instances := k.fleet(4)
	k.detectAll(instances[:3])
	k.wantAsked(0)
	k.listen(20 * time.Minute)
	k.round()
	if !k.brake().GetEngaged() {
		t.Fatal("it let go while the cause was there")
	}
	for _, b := range instances[:3] {
		k.back(b)
	}
	k.round()
	if b := k.brake(); !b.GetEngaged() || b.GetAffected() != 3 {
		t.Fatalf("%v", b) // counted before this round's ends
	}
	k.listen(10 * time.Second)
	k.round()
	k.listen(4 * time.Minute)
	k.round()
	if !k.brake().GetEngaged() {
		t.Fatal("it let go before its dwell was over")
	}
	k.listen(70 * time.Second)
	k.round()
	b := k.brake()
	if b.GetEngaged() || b.GetReleasedBy() != "watchdog" || b.GetReleaseReason() == "" {
		t.Fatalf("%v", b)
	}
	if list := k.incidents(brakeKind); len(list) != 1 || list[0].GetClosedAt() == nil {
		t.Fatalf("%v", list)
	}
	k.wantAsked(0)
}

func TestBudgetIsExhaustedAndRefills(t *testing.T) {
	k := newKit(t)
	k.policySet("churn.recreates_per_hour", "2")
	b := k.up("acme", "one", byProcess, ids.New())
	for n := 1; n <= 2; n++ {
		k.detectAll([]*instance{b})
		k.wantAsked(n)
		k.start(b, kRecreate, k.record(b).GetOperationId(), asked, recreating)
		k.back(b)
		k.succeed(b)
		k.round()
		k.wantOutcome(k.record(b), recovered)
	}
	began := k.now()
	k.detectAll([]*instance{b})
	k.wantAsked(2)
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "budget") || rec.GetNextAt() == nil ||
		!rec.GetNextAt().AsTime().After(began) {
		t.Fatalf("%v", rec)
	}
	list := k.incidents(churnKind)
	if len(list) != 1 || list[0].GetClosedAt() != nil ||
		!slices.Contains(list[0].GetWorkspaceIds(), b.ws.GetWorkspaceId()) {
		t.Fatalf("%v", list)
	}
	version := rec.GetVersion()
	k.round()
	if again := k.record(b); again.GetVersion() != version {
		t.Fatalf("a round without news wrote %v over %v", again, rec)
	}
	k.listenUntil(rec.GetNextAt().AsTime().Add(-2 * time.Minute))
	k.round()
	k.wantAsked(2)
	k.listenUntil(rec.GetNextAt().AsTime().Add(10 * time.Second))
	k.round()
	k.wantAsked(3)
	if list = k.incidents(churnKind); len(list) != 1 || list[0].GetClosedAt() == nil {
		t.Fatalf("%v", list)
	}
}

// Instances of one placement share a budget as well, since the load on a provider is that of all its workspaces.
func TestPlacementHasItsBudget(t *testing.T) {
	k := newKit(t)
	k.policySet("churn.recreates_per_hour", "1")
	instances := k.fleet(2)
	k.detectAll(instances)
	k.wantAsked(1)
	rec := k.record(instances[1])
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "placement process") || rec.GetNextAt() == nil {
		t.Fatalf("%v", rec)
	}
	if list := k.incidents(churnKind); len(list) != 1 || !strings.Contains(list[0].GetSummary(), "placement process") {
		t.Fatalf("%v", list)
	}
}

func TestUnreachableMachineIsReportedAndItsWorkspacesKept(t *testing.T) {
	k := newKit(t)
	node := ids.New()
	first := k.up("acme", "one", byStatic, node)
	second := k.up("beta", "two", byStatic, node)
	k.lose(first)
	k.lose(second)
	k.listen(130 * time.Second)
	k.detect()
	k.wantAsked(0)
	list := k.incidents(machine)
	if len(list) != 1 || !slices.Equal(list[0].GetNodeIds(), []string{node}) || len(list[0].GetWorkspaceIds()) != 2 ||
		len(list[0].GetTenantIds()) != 2 ||
		list[0].GetClosedAt() != nil {
		t.Fatalf("%v", list)
	}
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record`); n != 0 {
		t.Fatalf("%d recoveries of kept workspaces", n)
	}
	k.replica = ids.New() // no replica listens for a while, so nodes count as neither back nor away
	k.pass(time.Minute)
	k.round()
	if list = k.incidents(machine); list[0].GetClosedAt() != nil {
		t.Fatalf("closed without evidence: %v", list)
	}
	k.beat()
	k.back(first)
	k.round()
	if list = k.incidents(machine); len(list) != 1 || list[0].GetClosedAt() == nil {
		t.Fatalf("%v", list)
	}
}

// A stalled operation on a machine that is away fails in the end: also then nothing is recreated there.
func TestStaticWorkspaceIsNotRecreatedWhileItsMachineIsAway(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byStatic, ids.New())
	k.start(b, kRecreate, ids.New(), asked, recreating)
	k.owner.set(func() {
		k.owner.answer = func(r *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			return &lifecyclev1.Operation{OperationId: b.run.GetRunId(), WorkspaceId: r.GetWorkspaceId(), Joined: true}, nil
		}
	})
	k.stall(b, 1)
	k.detect()
	k.wantAsked(1)
	k.lose(b)
	k.listen(130 * time.Second)
	k.fail(b, 1, "deadline_of_step_exceeded")
	k.round()
	k.wantAsked(1)
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "machine") {
		t.Fatalf("%v", rec)
	}
}

// A node that is held, quarantined or fenced has lost its session by decision.
func TestHeldIdentityIsNoReasonToRecreate(t *testing.T) {
	k := newKit(t)
	node := ids.New()
	b := k.up("acme", "one", byProcess, node)
	if _, err := k.db.Pool("recovery").Exec(k.ctx,
		`INSERT INTO recovery.identity (node_id, name, node_instance_id, state) VALUES ($1, 'box', $2, 'quarantined')`, node,
		ids.New()); err != nil {
		t.Fatal(err)
	}
	k.detectAll([]*instance{b})
	k.wantAsked(0)
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "quarantined") {
		t.Fatalf("%v", rec)
	}
}

// Scenario: security keeps four of fifteen nodes out, which is above the limit of the brake. Nothing has failed: the
// brake does not engage, and a failure beside them is recovered from.
func TestNodesThatPeopleKeepOutDoNotEngageTheBrake(t *testing.T) {
	k := newKit(t)
	k.policySet("churn.recreates_per_hour", "60")
	instances := k.fleet(15)
	for n, state := range []string{"quarantined", "fenced", "quarantined", "fenced"} {
		_, err := k.db.Pool("recovery").Exec(k.ctx,
			`INSERT INTO recovery.identity (node_id, name, node_instance_id, state) VALUES ($1, $2, $3, $4)`,
			instances[n].ws.GetNodeId(), fmt.Sprintf("box-%d", n), ids.New(), state)
		k.must(err)
	}
	k.detectAll(instances[:4])
	if list := k.incidents(brakeKind); len(list) != 0 {
		t.Fatalf("%v", list)
	}
	for _, b := range instances[:4] {
		rec := k.record(b)
		k.wantOutcome(rec, withheld)
		if !strings.Contains(rec.GetWithheldBecause(), "identity") {
			t.Fatalf("%v", rec)
		}
	}
	k.detectAll(instances[4:5])
	k.wantAsked(1)
}

func TestSameErrorAtManyTenantsIsOneIncident(t *testing.T) {
	for _, tt := range []struct {
		name    string
		tenants []string
		class   bool
	}{
		{"three tenants", []string{"a", "b", "c"}, true},
		{"two tenants, five workspaces", []string{"a", "b", "a", "b", "a"}, true},
		{"two tenants, four workspaces", []string{"a", "b", "a", "b"}, false},
		{"one tenant, six workspaces", []string{"a", "a", "a", "a", "a", "a"}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKit(t)
			for i, tenant := range tt.tenants {
				k.fail(k.provision(tenant, fmt.Sprintf("w%d", i), byProcess), 3, "schema_failed")
			}
			k.round()
			list := k.incidents(classKind)
			if !tt.class {
				if len(list) != 0 {
					t.Fatalf("%v", list)
				}
				return
			}
			if len(list) != 1 {
				t.Fatalf("%v", list)
			}
			i := list[0]
			if i.GetStep() != steps[3] || i.GetErrorCode() != "schema_failed" || len(i.GetWorkspaceIds()) != len(tt.tenants) ||
				i.GetOwnerLayer() != commonv1.OwnerLayer_OWNER_LAYER_DATABASE || i.GetNextAction() == "" {
				t.Fatalf("%v", i)
			}
			// One more workspace is added, and there is still one incident.
			k.pass(40 * time.Minute)
			k.fail(k.provision("d", "late", byProcess), 3, "schema_failed")
			k.round()
			k.round()
			if list = k.incidents(classKind); len(list) != 1 || !slices.Contains(list[0].GetTenantIds(), tenantID("d")) {
				t.Fatalf("%v", list)
			}
			k.pass(40 * time.Minute)
			k.round()
			if list = k.incidents(classKind); list[0].GetClosedAt() != nil {
				t.Fatalf("closed while it was seen within the hour: %v", list)
			}
			k.pass(30 * time.Minute)
			k.round()
			if list = k.incidents(classKind); len(list) != 1 || list[0].GetClosedAt() == nil {
				t.Fatalf("%v", list)
			}
		})
	}
}

// A cancel is a request, not a failure; a stall at the same step is one.
func TestWhatCountsAsAClass(t *testing.T) {
	k := newKit(t)
	for _, tenant := range []string{"a", "b", "c"} {
		b := k.provision(tenant, "cancelled", byProcess)
		b.run.CancelBy, b.run.CancelRequestedAt = "user:ada", b.run.GetCreatedAt()
		k.fail(b, 2, "cancel_requested")
	}
	k.round()
	if list := k.incidents(classKind); len(list) != 0 {
		t.Fatalf("%v", list)
	}
	for _, tenant := range []string{"a", "b", "c"} {
		k.stall(k.provision(tenant, "stalled", byProcess), 5)
	}
	k.round()
	if list := k.incidents(classKind); len(list) != 1 || list[0].GetErrorCode() != "step_stalled" ||
		list[0].GetStep() != steps[5] {
		t.Fatalf("%v", list)
	}
}

func TestInstanceThatCannotRegister(t *testing.T) {
	k := newKit(t)
	b := k.provision("acme", "one", byProcess)
	b.ws.RegisterFailures, b.ws.LastErrorCode, b.ws.LastError = 2, "register_failing", "token_consumed"
	k.put(b.ws)
	k.pass(2 * time.Minute)
	if out := k.round(); out.Opened != 0 {
		t.Fatal("two refusals are fewer than the mints of a box")
	}
	b.ws.RegisterFailures = 3
	k.put(b.ws)
	k.round()
	rec := k.record(b)
	if rec.GetTrigger() != commonv1.RecoveryTrigger_RECOVERY_TRIGGER_REGISTER_FAILING ||
		!strings.Contains(rec.GetCause(), "token_consumed") {
		t.Fatalf("%v", rec)
	}
	k.succeed(b)
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "by itself" {
		t.Fatalf("%v", rec)
	}
	k.wantAsked(0)
}
