package notify_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/notify"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

const (
	normal    = commonv1.UserState_USER_STATE_NORMAL
	temporary = commonv1.UserState_USER_STATE_TEMPORARY
	byPeople  = commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
	started   = readmodelv1.ImpactEvent_IMPACT_EVENT_BEGAN
)

// Scenario: 100 workspaces of two tenants are on one machine. A drift that touches none of them makes rows for none,
// and the workload of one fails: it alone has a row. Then the machine's runtime differs from what they were placed on:
// each has a row of its own, with its allocation. When that is over only the failing one is left.
func TestAVerdictReachesEachWorkspaceThatItTouches(t *testing.T) {
	k := newKit(t)
	node, other := k.node("rack1"), k.node("rack2")
	tenants := []projecttest.Tenant{k.A, k.B}
	var all []*lifecyclev1.Workspace
	for n := range 100 {
		all = append(all, k.workspace(tenants[n%2], node, named("ws", n)))
		k.report(all[n], true)
	}
	elsewhere := k.workspace(k.A, other, "elsewhere")
	k.report(elsewhere, true)
	k.follow()

	failing := all[7]
	k.judge(node, skewed)
	if r := k.follow(); r.Began+r.Changed+r.Ended != 0 || r.Workspaces != len(all) {
		t.Errorf("a drift that touches nothing: %+v", r)
	}
	k.report(failing, false)
	if r := k.follow(); r.Began != 1 || r.Workspaces != 1 {
		t.Errorf("one workload failed: %+v", r)
	}
	got := k.open()
	if got.GetWorkspaceId() != failing.GetWorkspaceId() || got.GetTenantId() != k.B.ID || got.GetAllocationId() == "" ||
		got.GetLayer() != readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME || got.GetUserState() != temporary ||
		got.GetOperatorReason() != "workload_crash_loop" || got.GetEvent() != started ||
		!strings.Contains(got.GetText(), "main, 7 restarts") || len(got.GetEvidence()) != 1 || got.GetNodeName() != "rack1" {
		t.Errorf("%v", got)
	}
	if first, second := k.userState(all[0]), k.userState(failing); first != normal || second != temporary {
		t.Errorf("their users see %s and %s", first, second)
	}

	k.judge(node, drifted, &recoveryv1.Evidence{
		Part: commonv1.DriftPart_DRIFT_PART_HOST, Reason: drifted, Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_HOST,
		ObservedAt: timestamppb.New(k.Now()), Detail: "kernel 6.2 in place of 6.1",
	})
	if r := k.follow(); r.Began != 99 || r.Changed != 1 || r.Workspaces != 100 {
		t.Errorf("the machine's runtime differs: %+v", r)
	}
	open := k.list(list.All(), view.NotificationFilter{Open: true})
	seen, allocations := map[string]bool{}, map[string]bool{}
	for _, n := range open {
		seen[n.GetWorkspaceId()], allocations[n.GetAllocationId()] = true, true
		if n.GetUserState() != byPeople || n.GetOperatorReason() != "host_runtime_drift" ||
			n.GetCorrelationId() != "corr-"+node || n.GetCount() != 1 || len(n.GetEvidence()) != 2 ||
			!strings.Contains(n.GetEvidence()[1], "kernel 6.2 in place of 6.1") {
			t.Fatalf("%v", n)
		}
	}
	if len(open) != 100 || len(seen) != 100 || len(allocations) != 100 || seen[elsewhere.GetWorkspaceId()] {
		t.Errorf("%d rows for %d workspaces with %d allocations", len(open), len(seen), len(allocations))
	}
	if n := len(k.list(k.scope(k.A.ID), view.NotificationFilter{})); n != 50 {
		t.Errorf("tenant A is shown %d", n)
	}

	k.judge(node, none)
	if r := k.follow(); r.Ended != 99 || r.Changed != 1 {
		t.Errorf("the verdict is over: %+v", r)
	}
	if got = k.open(); got.GetWorkspaceId() != failing.GetWorkspaceId() || got.GetUserState() != temporary {
		t.Errorf("%v", got)
	}
	k.report(failing, true)
	if r := k.follow(); r.Ended != 1 || r.Workspaces != 1 {
		t.Errorf("the workload runs again: %+v", r)
	}
	// The same events again, and what changes nothing, write nothing.
	before := k.dump()
	for _, w := range all[:10] {
		k.report(w, true)
	}
	k.judge(node, none)
	if r := k.follow(); r.Began+r.Changed+r.Ended != 0 || k.dump() != before {
		t.Errorf("nothing changed: %+v", r)
	}
}

// Scenario: the control plane is out, and many machines drift at once, which is one incident. Only the workspace whose
// own workload fails has a row, and the incident counts it alone.
func TestAnIncidentOfTheFleetTouchesOnlyWhatHasEvidence(t *testing.T) {
	k := newKit(t)
	var nodes []string
	var all []*lifecyclev1.Workspace
	for n := range 6 {
		nodes = append(nodes, k.node(named("rack", n)))
		all = append(all, k.workspace(k.A, nodes[n], named("a", n)), k.workspace(k.B, nodes[n], named("b", n)))
	}
	for _, w := range all {
		k.report(w, true)
	}
	k.follow()
	k.judge("", outage)
	for n, node := range nodes {
		if n > 2 {
			k.connect(node, false)
			k.judge(node, silence)
		} else {
			k.judge(node, skewed)
		}
	}
	id := k.incident(nodes...)
	if r := k.follow(); r.Began+r.Changed+r.Ended != 0 {
		t.Fatalf("%+v", r)
	}
	k.report(all[2], false)
	k.follow()
	got := k.open()
	if got.GetWorkspaceId() != all[2].GetWorkspaceId() || got.GetIncidentId() != id {
		t.Errorf("%v", got)
	}
	touched := func() int32 {
		var n int32
		k.must(k.reader.Read(k.ctx, list.All(), func(ctx context.Context, s *view.Snapshot) error {
			var err error
			n, err = s.WorkspacesTouched(ctx, id)
			return err
		}))
		return n
	}
	if n := touched(); n != 1 {
		t.Errorf("the incident touches %d workspaces", n)
	}
	if found := k.list(list.All(), view.NotificationFilter{IncidentID: id}); len(found) != 1 {
		t.Errorf("%v", found)
	}
	for _, w := range all {
		if state := k.userState(w); (state != normal) != (w == all[2]) {
			t.Errorf("the user of %s sees %s", w.GetName(), state)
		}
	}
	// An impact that began before the incident is covered by it, without another notification.
	lone := k.workspace(k.A, k.node("late"), "lone")
	k.report(lone, false)
	k.follow()
	second := k.incident(lone.GetNodeId())
	if r := k.follow(); r.Subjects != 1 || r.Began+r.Changed+r.Ended != 0 {
		t.Errorf("%+v", r)
	}
	if found := k.list(list.All(), view.NotificationFilter{IncidentID: second}); len(found) != 1 ||
		found[0].GetWorkspaceId() != lone.GetWorkspaceId() || found[0].GetEvent() != started {
		t.Errorf("%v", found)
	}
}

// Missing evidence ends nothing: a workload that failed before its agent fell silent is notified of until the agent
// reports that it runs. What returns soon is the same impact again, and what returns later another one.
func TestAnImpactEndsOnEvidence(t *testing.T) {
	k := newKit(t)
	node := k.node("rack1")
	w := k.workspace(k.A, node, "ws")
	k.report(w, false)
	k.follow()
	first := k.open()

	k.connect(node, false)
	k.judge(node, silence)
	k.follow()
	k.judge("", outage)
	k.follow()
	if got := k.open(); !cmp.Equal(got.GetVersion(), first.GetVersion()) {
		t.Errorf("silence changed it: %v", got)
	}
	k.judge("", none)
	k.connect(node, true)
	k.judge(node, none)
	k.follow()
	k.open()
	k.report(w, true)
	if r := k.follow(); r.Ended != 1 {
		t.Fatalf("%+v", r)
	}
	last := k.list(list.All(), view.NotificationFilter{})
	if len(last) != 1 || last[0].GetEndedAt() == nil || last[0].GetEvent() != readmodelv1.ImpactEvent_IMPACT_EVENT_ENDED {
		t.Fatalf("%v", last)
	}
	if mine := k.list(k.scope(k.A.ID), view.NotificationFilter{}); mine[0].GetText() != "What disturbed it is over." {
		t.Errorf("%v", mine)
	}

	k.report(w, false)
	k.follow()
	again := k.open()
	if again.GetImpactId() != first.GetImpactId() || again.GetCount() != 2 ||
		again.GetEvent() != started || again.GetBeganAt().AsTime() != first.GetBeganAt().AsTime() {
		t.Errorf("it returned soon: %v", again)
	}
	k.report(w, true)
	k.follow()
	testkit.SetClockOffset(k.DB, k.window+time.Minute)
	k.Beat(false)
	k.report(w, false)
	k.follow()
	if later := k.open(); later.GetImpactId() == first.GetImpactId() || later.GetCount() != 1 {
		t.Errorf("it returned late: %v", later)
	}
	// An operation explains what its user sees from then on.
	k.Append(withState(w, commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, k.Now()))
	if r := k.follow(); r.Ended != 1 {
		t.Errorf("%+v", r)
	}
	mine := k.list(k.scope(k.A.ID), view.NotificationFilter{})
	if len(mine) != 2 || !strings.HasPrefix(mine[0].GetText(), "It is recreating: ") {
		t.Errorf("%v", mine)
	}
}

// A verdict that is named after another reason touches by its evidence, until that is over: no event says so.
func TestAnImpactEndsWithItsEvidence(t *testing.T) {
	k := newKit(t)
	node := k.node("rack1")
	w := k.workspace(k.A, node, "ws")
	k.report(w, true)
	k.judge(node, skewed, &recoveryv1.Evidence{
		Reason: diskFull, Detail: "3 bytes are left", FreshUntil: timestamppb.New(k.Now().Add(time.Minute)),
	})
	k.follow()
	if got := k.open(); got.GetOperatorReason() != "node_disk_full" || got.GetUserState() != byPeople {
		t.Errorf("%v", got)
	}
	if r := k.follow(); r.Subjects != 0 {
		t.Errorf("nothing is due: %+v", r)
	}
	testkit.SetClockOffset(k.DB, 2*time.Minute)
	k.Beat(false)
	if r := k.follow(); r.Ended != 1 || r.Workspaces != 1 || k.userState(w) != normal {
		t.Errorf("the evidence is over: %+v", r)
	}
	if r := k.follow(); r.Subjects != 0 {
		t.Errorf("it is due again: %+v", r)
	}
}

// Two sources observe the same, and the observation of one is over: nothing changes, however much time passes.
func TestEvidenceThatIsOverBesideSomeThatLastsChangesNothing(t *testing.T) {
	for name, last := range map[string]time.Duration{"without an end": 0, "later": 10 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			node := k.node("rack1")
			w := k.workspace(k.A, node, "ws")
			k.report(w, true)
			until := timestamppb.New(k.Now().Add(last))
			if last == 0 {
				until = nil
			}
			k.judge(node, skewed, &recoveryv1.Evidence{Reason: diskFull, FreshUntil: until},
				&recoveryv1.Evidence{Reason: diskFull, FreshUntil: timestamppb.New(k.Now().Add(time.Minute))})
			k.follow()
			first := k.open()
			testkit.SetClockOffset(k.DB, 2*time.Minute)
			k.Beat(false)
			for range 3 {
				if r, err := k.notifier.RunOnce(k.ctx); err != nil || r.Subjects != 0 {
					t.Errorf("something is due: %+v, %v", r, err)
				}
			}
			if got := k.open(); got.GetVersion() != first.GetVersion() {
				t.Errorf("the row has changed: version %d, then %d", first.GetVersion(), got.GetVersion())
			}
		})
	}
}

// Scenario: the evidence that touches the workspaces of a machine is over for all of them at once. A round queues a
// page of them, and the rounds after it the others.
func TestEvidenceThatIsOverForManyIsQueuedInPages(t *testing.T) {
	const workspaces, page = 150, 64
	k := newKit(t)
	node := k.node("rack1")
	for n := range workspaces {
		k.report(k.workspace(k.A, node, named("ws", n)), true)
	}
	k.judge(node, skewed, &recoveryv1.Evidence{
		Reason: diskFull, FreshUntil: timestamppb.New(k.Now().Add(time.Minute)),
	})
	if r := k.follow(); r.Began != workspaces {
		t.Fatalf("%+v", r)
	}
	testkit.SetClockOffset(k.DB, 2*time.Minute)
	k.Beat(false)
	for left := workspaces; left > 0; left -= page {
		r, err := k.notifier.RunOnce(k.ctx)
		k.must(err)
		if r.Ended != min(left, page) {
			t.Fatalf("%d of %d that were left have ended in a round, want at most %d", r.Ended, left, page)
		}
	}
	if open := k.list(list.All(), view.NotificationFilter{Open: true}); len(open) != 0 {
		t.Errorf("%d last", len(open))
	}
}

// Scenario: two machines are suspected to be copied, then so many that it is one incident of the fleet. No workspace of
// them has a row for it then, but the one whose own workload fails; their users see them as normal, and when the
// incident is over those that are still suspected are touched again.
func TestASuspicionOfTheWholeFleetTouchesNothingByItself(t *testing.T) {
	k := newKit(t)
	const reason = commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED
	bySecurity := commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
	var nodes []string
	var all []*lifecyclev1.Workspace
	for n := range 5 {
		nodes = append(nodes, k.node(named("rack", n)))
		all = append(all, k.workspace([]projecttest.Tenant{k.A, k.B}[n%2], nodes[n], named("ws", n)))
		k.report(all[n], true)
	}
	for _, node := range nodes[:2] {
		k.judge(node, reason)
	}
	if r := k.follow(); r.Began != 2 || k.userState(all[0]) != bySecurity {
		t.Errorf("two machines: %+v, %s", r, k.userState(all[0]))
	}
	for _, node := range nodes[2:] {
		k.judge(node, reason)
	}
	id := k.incidentOf("cloned_identity_detected", nodes[0])
	if r := k.follow(); r.Began != 0 || r.Ended != 2 {
		t.Errorf("all machines: %+v", r)
	}
	for _, n := range k.list(list.All(), view.NotificationFilter{}) {
		if !strings.Contains(n.GetText(), "an incident of many machines") {
			t.Errorf("%v", n)
		}
	}
	for _, n := range k.list(k.scope(k.A.ID), view.NotificationFilter{}) {
		if !strings.Contains(n.GetText(), "a fault of the platform") {
			t.Errorf("%v", n)
		}
	}
	for _, w := range all {
		if got := k.userState(w); got != normal {
			t.Errorf("its user sees %s", got)
		}
	}
	k.report(all[3], false)
	if r := k.follow(); r.Began != 1 {
		t.Errorf("a workload fails: %+v", r)
	}
	if got := k.open(); got.GetWorkspaceId() != all[3].GetWorkspaceId() || got.GetIncidentId() != id {
		t.Errorf("%v", got)
	}
	// Evidence of the runtime on one of them touches its workspace.
	k.judge(nodes[4], reason, &recoveryv1.Evidence{Reason: diskFull, ObservedAt: timestamppb.New(k.Now())})
	if r := k.follow(); r.Began != 1 || k.userState(all[4]) != byPeople {
		t.Errorf("a disk is full: %+v, %s", r, k.userState(all[4]))
	}
	k.judge(nodes[0], none)
	k.endIncident(id, "cloned_identity_detected")
	if r := k.follow(); r.Began != 2 || r.Changed != 2 || k.userState(all[0]) != normal ||
		k.userState(all[1]) != bySecurity {
		t.Errorf("the incident is over: %+v", r)
	}
}

// Scenario: a new kernel is rolled over the fleet, and the first two machines drift before it is known as one incident.
// Then no workspace has a row, and no user waits for a repair, but that of the one whose own workload fails. When the
// incident is over the workspaces on machines that drift still are touched.
func TestADriftOfTheWholeFleetTouchesOnlyWhatHasEvidence(t *testing.T) {
	k := newKit(t)
	var nodes []string
	var all []*lifecyclev1.Workspace
	for n := range 5 {
		nodes = append(nodes, k.node(named("rack", n)))
		all = append(all, k.workspace([]projecttest.Tenant{k.A, k.B}[n%2], nodes[n], named("ws", n)))
		k.report(all[n], true)
	}
	waits := func(w *lifecyclev1.Workspace) bool {
		var target view.Target
		k.must(k.reader.Read(k.ctx, k.scope(w.GetTenantId()), func(ctx context.Context, s *view.Snapshot) (err error) {
			target, err = s.Target(ctx, w.GetWorkspaceId())
			return err
		}))
		return target.Repair.AskAgain > 0
	}
	for _, node := range nodes[:2] {
		k.judge(node, drifted)
	}
	if r := k.follow(); r.Began != 2 || k.userState(all[0]) != byPeople || !waits(all[0]) {
		t.Errorf("two machines: %+v, %s", r, k.userState(all[0]))
	}
	for _, node := range nodes[2:] {
		k.judge(node, drifted)
	}
	id := k.incidentOf("host_runtime_drift", nodes[0])
	if r := k.follow(); r.Began+r.Changed != 0 || r.Ended != 2 {
		t.Errorf("all machines: %+v", r)
	}
	for _, w := range all {
		if got := k.userState(w); got != normal || waits(w) {
			t.Errorf("its user sees %s, and waits: %t", got, waits(w))
		}
	}
	k.report(all[3], false)
	if r := k.follow(); r.Began != 1 || k.userState(all[3]) != temporary {
		t.Errorf("a workload fails: %+v, %s", r, k.userState(all[3]))
	}
	if got := k.open(); got.GetWorkspaceId() != all[3].GetWorkspaceId() || got.GetIncidentId() != id ||
		got.GetOperatorReason() != "workload_crash_loop" {
		t.Errorf("%v", got)
	}
	k.judge(nodes[0], none)
	k.endIncident(id, "host_runtime_drift")
	if r := k.follow(); r.Began != 3 || r.Changed != 1 || k.userState(all[0]) != normal ||
		k.userState(all[1]) != byPeople || !waits(all[1]) {
		t.Errorf("the incident is over: %+v", r)
	}
}

// An incident of equal verdicts names a few nodes, and covers all whose verdict has its reason: those that are touched
// before it is known, and those after.
func TestAnIncidentCoversNodesThatItDoesNotName(t *testing.T) {
	k := newKit(t)
	nodes := []string{k.node("rack1"), k.node("rack2"), k.node("rack3"), k.node("rack4")}
	for n, node := range nodes {
		k.report(k.workspace(k.A, node, named("ws", n)), true)
	}
	for _, node := range nodes[:2] {
		k.judge(node, diskFull)
	}
	k.judge(nodes[3], drifted) // for another reason
	k.follow()
	id := k.incidentOf("node_disk_full", nodes[0])
	if r := k.follow(); r.Subjects != 2 || r.Began+r.Changed+r.Ended != 0 {
		t.Errorf("the incident opens: %+v", r)
	}
	k.judge(nodes[2], diskFull)
	k.follow()
	covered := map[string]bool{}
	for _, n := range k.list(list.All(), view.NotificationFilter{IncidentID: id}) {
		covered[n.GetNodeId()] = true
	}
	if !covered[nodes[0]] || !covered[nodes[1]] || !covered[nodes[2]] || covered[nodes[3]] {
		t.Errorf("it covers %v", covered)
	}
}

// The outage of the control plane hides what a silent machine's own verdict said. Nothing begins meanwhile, and what
// was hidden begins when the outage is over.
func TestWhatAnOutageHidBeginsAfterIt(t *testing.T) {
	k := newKit(t)
	node := k.node("rack1")
	w := k.workspace(k.A, node, "ws")
	k.report(w, true)
	k.connect(node, false)
	k.judge("", outage)
	k.judge(node, diskFull)
	if r := k.follow(); r.Began != 0 {
		t.Errorf("%+v", r)
	}
	k.judge("", none)
	if r := k.follow(); r.Began != 1 {
		t.Errorf("%+v", r)
	}
	k.judge("", outage)
	if r := k.follow(); r.Ended != 0 {
		t.Errorf("an outage is no evidence: %+v", r)
	}
}

// Rebuilt projections leave the rows as they are, in each column; and rows that are lost are made again from the
// present state, those of a verdict with the same ids.
func TestRebuiltProjectionsMakeTheSameRows(t *testing.T) {
	k := newKit(t)
	nodes := []string{k.node("rack1"), k.node("rack2")}
	var failing []*lifecyclev1.Workspace
	for n := range 5 {
		w := k.workspace(k.A, nodes[0], named("a", n))
		if k.report(w, n%2 == 0); n%2 != 0 {
			failing = append(failing, w)
		}
		k.report(k.workspace(k.B, nodes[1], named("b", n)), true)
	}
	k.follow()
	k.report(failing[0], true)
	k.follow()
	k.report(failing[0], false)
	k.judge(nodes[1], diskFull)
	k.incident(nodes...)
	k.follow()
	before := k.dump()
	if !strings.Contains(before, "node_disk_full") || !strings.Contains(before, "workload_crash_loop") {
		t.Fatal(before)
	}
	_, err := k.projector.Rebuild(k.ctx)
	k.must(err)
	if r := k.follow(); r.Subjects == 0 || r.Began+r.Changed+r.Ended != 0 {
		t.Errorf("%+v", r)
	}
	if diff := cmp.Diff(before, k.dump()); diff != "" {
		t.Errorf("the rebuild changed rows:\n%s", diff)
	}
	read := func() map[string]string {
		rows := map[string]string{}
		for _, n := range k.list(list.All(), view.NotificationFilter{Open: true}) {
			text := n.GetOperatorReason() + " " + n.GetUserState().String() + " " + n.GetAllocationId() + n.GetIncidentId()
			if n.GetOperatorReason() == "node_disk_full" {
				text += n.GetImpactId() + n.GetBeganAt().String() + strings.Join(n.GetEvidence(), "\n")
			}
			rows[n.GetWorkspaceId()] = text
		}
		return rows
	}
	want := read()
	k.exec(pg.RoleReadmodel, `DELETE FROM readmodel.impact`)
	for _, w := range failing {
		k.report(w, false)
	}
	_, err = k.projector.Rebuild(k.ctx)
	k.must(err)
	k.follow()
	if diff := cmp.Diff(want, read()); diff != "" || len(want) != 7 {
		t.Errorf("%d rows were there; made again:\n%s", len(want), diff)
	}
}

// A machine of which something cannot be read keeps no other one waiting: it is tried again after the others, and is
// worked on once it can be read.
func TestWhatCannotBeReadKeepsNothingElseWaiting(t *testing.T) {
	k := newKit(t)
	bad, good := k.node("rack1"), k.node("rack2")
	for n, node := range []string{bad, good} {
		k.report(k.workspace(k.A, node, named("ws", n)), true)
	}
	k.follow()
	k.judge(bad, diskFull)
	k.judge(good, diskFull)
	k.sync()
	k.exec(pg.RoleReadmodel, `UPDATE readmodel.verdict SET body = jsonb_set(body, '{evidence}', '3')
		WHERE node_id = $1`, bad)
	if r, err := k.notifier.RunOnce(k.ctx); err == nil || r.Began != 1 {
		t.Errorf("one of two can be read: %+v, %v", r, err)
	}
	if got := k.open(); got.GetNodeId() != good {
		t.Errorf("%v", got)
	}
	k.exec(pg.RoleReadmodel, `UPDATE readmodel.verdict SET body = body - 'evidence' WHERE node_id = $1`, bad)
	if r := k.follow(); r.Began != 1 || r.Subjects != 1 {
		t.Errorf("it can be read again: %+v", r)
	}
}

// Two replicas work on one queue: one of them does, and a change that comes while it works is worked on afterwards.
func TestReplicasShareTheQueue(t *testing.T) {
	k := newKit(t)
	node := k.node("rack1")
	for n := range 20 {
		k.report(k.workspace(k.A, node, named("ws", n)), n%4 != 0)
	}
	k.sync()
	other := k.newNotifier()
	errs := make(chan error, 2)
	for _, n := range []interface {
		RunOnce(context.Context) (notify.Result, error)
	}{k.notifier, other} {
		go func() {
			_, err := n.RunOnce(k.ctx)
			errs <- err
		}()
	}
	for range 2 {
		k.must(<-errs)
	}
	k.follow()
	if open := k.list(list.All(), view.NotificationFilter{Open: true}); len(open) != 5 {
		t.Errorf("%d are open", len(open))
	}
}

// Impacts that have ended are kept for their term; those that last stay, unless their workspace is gone.
func TestRetention(t *testing.T) {
	k := newKit(t)
	node := k.node("rack1")
	lasts, over := k.workspace(k.A, node, "lasts"), k.workspace(k.A, node, "over")
	k.report(lasts, false)
	k.report(over, false)
	k.follow()
	k.report(over, true)
	k.follow()
	cut := func() (n int) {
		k.must(k.DB.Pool(pg.RoleReadmodel).QueryRow(k.ctx, `SELECT cut FROM readmodel.cut_impacts('1 day',
			'00000000-0000-0000-0000-000000000000', 100)`).Scan(&n))
		return n
	}
	if n := cut(); n != 0 {
		t.Errorf("%d were cut in their term", n)
	}
	testkit.SetClockOffset(k.DB, 25*time.Hour)
	if n := cut(); n != 1 {
		t.Errorf("%d were cut", n)
	}
	if got := k.open(); got.GetWorkspaceId() != lasts.GetWorkspaceId() {
		t.Errorf("%v", got)
	}
	k.exec(pg.RoleReadmodel, `DELETE FROM readmodel.workspace WHERE workspace_id = $1`, lasts.GetWorkspaceId())
	if n := cut(); n != 1 || strings.TrimSpace(k.dump()) != "" {
		t.Errorf("%d were cut, and there is %s", n, k.dump())
	}
}
