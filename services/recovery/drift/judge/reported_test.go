package judge_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/shown"
	"github.com/gpuaas/mesh/internal/tasktypes"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
)

// reporting returns a node whose first session has told the facts of its host.
func (k *kit) reporting() *machine {
	k.t.Helper()
	n := k.made()
	n.session.NodeInstanceId, n.session.Host, n.session.RemoteAddress = ids.New(), facts(), "192.0.2.1:4000"
	n.session.TaskTypes = tasktypes.Queued()
	k.put(n.identity, n.session, n.gate)
	if changed := k.round(); changed != 0 {
		k.t.Fatalf("%d verdicts on a node that tells its facts for the first time: %v", changed, k.verdicts(n.id()))
	}
	if topics := k.topics(n); topics != 0 {
		k.t.Fatalf("%d rows of evidence beside those of parts", topics)
	}
	return n
}

func (k *kit) topics(n *machine) int {
	return k.count(`SELECT count(*) FROM recovery.evidence WHERE node_id = $1 AND part LIKE '%/%'`, n.id())
}

// report appends the session of a node as it is now.
func (k *kit) report(n *machine) {
	k.t.Helper()
	k.put(n.session)
	k.round()
}

// again opens another session of the node, of the same instance, as an agent that was started again does.
func (k *kit) again(n *machine, host *commonv1.HostFacts) {
	k.t.Helper()
	instance, remote, types := n.session.GetNodeInstanceId(), n.session.GetRemoteAddress(), n.session.GetTaskTypes()
	n.session.State = closedState
	k.put(n.session)
	k.back(n)
	n.session.NodeInstanceId, n.session.RemoteAddress, n.session.TaskTypes, n.session.Host = instance, remote, types, host
	k.report(n)
}

// used returns the details of the evidence of a verdict.
func used(v *recoveryv1.NodeVerdict, reason commonv1.DriftReason) string {
	for _, e := range v.GetEvidence() {
		if e.GetReason() == reason {
			return e.GetDetail()
		}
	}
	return "no evidence of " + names.Of(reason)
}

// TestAClockThatIsOff: the evidence begins, lasts without a row, and ends with what the session tells.
func TestAClockThatIsOff(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	n.session.Host, n.session.TaskTypes = nil, nil
	n.session.ClockOffset = durationpb.New(-24 * time.Hour)
	k.report(n)
	v := k.wantReasons(n.id(), clockSkew)
	if v.GetUserState() != operator || !strings.Contains(used(v, clockSkew), "24h0m0s behind") {
		t.Errorf("the verdict is %v", v)
	}
	was := k.count(`SELECT count(*) FROM events.event WHERE kind = 'verdict.changed'`)
	k.report(n) // as of another fact
	if now := k.count(`SELECT count(*) FROM events.event WHERE kind = 'verdict.changed'`); now != was {
		t.Errorf("%d verdicts more", now-was)
	}
	n.session.ClockOffset = nil
	k.report(n)
	k.wantReasons(n.id(), clockSkew, unspecified)
}

// TestAClockIsJudgedByTheNewestSession: a session that ends tells nothing of the clock, and the next one tells anew.
func TestAClockIsJudgedByTheNewestSession(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	n.session.ClockOffset = durationpb.New(2 * time.Hour)
	k.report(n)
	k.wantReasons(n.id(), clockSkew)
	n.session.ClockOffset = nil
	k.lose(n)
	k.round()
	k.wantReasons(n.id(), clockSkew)
	k.back(n)
	k.round()
	k.wantReasons(n.id(), clockSkew, unspecified)
}

// TestARuntimeThatChanged: a difference from the accepted facts lasts over sessions, and ends when the facts are back.
func TestARuntimeThatChanged(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	changed := facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" })
	n.session.Host = changed
	k.report(n)
	v := k.wantReasons(n.id(), hostRuntime)
	if v.GetUserState() != operator || used(v, hostRuntime) != "kernel is 6.9.0, accepted is 6.1.0" {
		t.Errorf("the verdict is %v", v)
	}
	k.again(n, changed)
	k.wantReasons(n.id(), hostRuntime)
	k.again(n, facts())
	k.wantReasons(n.id(), hostRuntime, unspecified)
	if k.count(`SELECT count(*) FROM recovery.host_facts WHERE node_id = $1 AND present IS NULL`, n.id()) != 1 {
		t.Error("the facts count as different")
	}
}

// TestANewInstanceBringsItsFacts checks that the facts which a machine reports after it was enrolled anew become the
// expected ones.
func TestANewInstanceBringsItsFacts(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	changed := facts(func(f *commonv1.HostFacts) { f.Gpus = f.GetGpus()[:1] })
	n.session.Host = changed
	k.report(n)
	k.wantReasons(n.id(), hostRuntime)
	n.session.NodeInstanceId = ids.New()
	k.again(n, changed)
	k.wantReasons(n.id(), hostRuntime, unspecified)
	k.again(n, facts())
	k.wantReasons(n.id(), hostRuntime, unspecified, hostRuntime)
}

// TestFactsThatWereNotKnownAreNoDifference: an agent that learns to report a fact does not make its host another one.
func TestFactsThatWereNotKnownAreNoDifference(t *testing.T) {
	k := newKit(t)
	n := k.made()
	n.session.NodeInstanceId = ids.New()
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.ContainerRuntime, f.GetGpus()[0].DeviceId = "", "gpu-0" })
	k.put(n.identity, n.session, n.gate)
	n.session.Host = facts()
	k.report(n)
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.ContainerRuntime = "" })
	k.report(n)
	k.wantReasons(n.id())
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.ContainerRuntime = "containerd 2.0.0" })
	k.report(n)
	k.wantReasons(n.id(), hostRuntime)
}

// TestAWorseReasonKeepsTheEvidenceOfTheRuntime: lifecycle reads in the verdict that the host still differs.
func TestAWorseReasonKeepsTheEvidenceOfTheRuntime(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" })
	k.report(n)
	k.enter(n, quarantinedState, "")
	k.round()
	v := k.wantReasons(n.id(), hostRuntime, revoked)
	if used(v, hostRuntime) != "kernel is 6.9.0, accepted is 6.1.0" {
		t.Errorf("the verdict is %v", v)
	}
}

// TestARuntimeThatChangesUnderAWorseReason checks that the verdict changes each time that the host begins to differ,
// differs otherwise, or differs no more, though a worse reason stays.
func TestARuntimeThatChangesUnderAWorseReason(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	n.full()
	k.put(n.gate)
	k.listen(10 * time.Second)
	k.round()
	k.wantReasons(n.id(), diskFull)
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" })
	k.report(n)
	v := k.wantReasons(n.id(), diskFull, diskFull)
	if used(v, hostRuntime) != "kernel is 6.9.0, accepted is 6.1.0" {
		t.Errorf("the verdict is %v", v)
	}
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Kernel = "6.10.0" })
	k.report(n)
	if v = k.wantReasons(n.id(), diskFull, diskFull, diskFull); used(v, hostRuntime) !=
		"kernel is 6.10.0, accepted is 6.1.0" {
		t.Errorf("the verdict is %v", v)
	}
	k.report(n)
	n.session.Host = facts()
	k.report(n)
	v = k.wantReasons(n.id(), diskFull, diskFull, diskFull, diskFull)
	if used(v, hostRuntime) != "no evidence of host_runtime_drift" {
		t.Errorf("the verdict is %v", v)
	}
}

// TestAcceptedFactsEndTheDrift: a person's word makes the present facts the accepted ones.
func TestAcceptedFactsEndTheDrift(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	server := judge.NewHostFacts(k.judge, nil)
	accept := func() *recoveryv1.AcceptHostFactsResponse {
		t.Helper()
		answer, err := server.AcceptHostFacts(k.ctx, &recoveryv1.AcceptHostFactsRequest{NodeId: n.id(), Reason: "meant"})
		k.must(err)
		return answer
	}
	if answer := accept(); answer.GetAccepted() != "" || answer.GetPos() != "" {
		t.Errorf("something was accepted: %v", answer)
	}
	changed := facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" })
	n.session.Host = changed
	k.report(n)
	if answer := accept(); !strings.Contains(answer.GetAccepted(), "6.9.0") || answer.GetPos() == "" {
		t.Errorf("the answer is %v", answer)
	}
	k.round()
	k.wantReasons(n.id(), hostRuntime, unspecified)
	k.again(n, changed)
	k.wantReasons(n.id(), hostRuntime, unspecified)
	k.again(n, facts())
	k.wantReasons(n.id(), hostRuntime, unspecified, hostRuntime)
	_, err := server.AcceptHostFacts(k.ctx, &recoveryv1.AcceptHostFactsRequest{NodeId: ids.New(), Reason: "meant"})
	if err == nil {
		t.Error("facts of a node that does not exist were accepted")
	}
}

// TestFactsOtherThanWereSeenAreNotAccepted checks that facts are not accepted if the host changed again between the
// time at which a person saw them and the acceptance.
func TestFactsOtherThanWereSeenAreNotAccepted(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	server := judge.NewHostFacts(k.judge, nil)
	accept := func(saw string) (*recoveryv1.AcceptHostFactsResponse, error) {
		return server.AcceptHostFacts(k.ctx,
			&recoveryv1.AcceptHostFactsRequest{NodeId: n.id(), Reason: "meant", Seen: shown.Fingerprint(saw)})
	}
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" })
	k.report(n)
	first := used(k.wantReasons(n.id(), hostRuntime), hostRuntime)
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.1" })
	k.report(n)
	before := k.digest()
	for _, saw := range []string{first, ""} {
		if answer, err := accept(saw); fault.ReasonOf(err) != commonv1.Reason_REASON_CONFLICT ||
			!strings.Contains(err.Error(), "6.9.1") {
			t.Errorf("with what was shown before: %v, %v", answer, err)
		}
	}
	if k.digest() != before {
		t.Error("the refusal has changed something")
	}
	answer, err := accept(used(k.last(n), hostRuntime))
	if err != nil || !strings.Contains(answer.GetAccepted(), "6.9.1") {
		t.Errorf("with what is shown now: %v, %v", answer, err)
	}
	if answer, err := accept(first); err != nil || answer.GetPos() != "" {
		t.Errorf("without a difference: %v, %v", answer, err)
	}
}

// TestEachDifferenceHasATextOfItsOwn checks that each difference has a text of its own, also that of a device that is
// not written out, and one beyond the bound.
func TestEachDifferenceHasATextOfItsOwn(t *testing.T) {
	many := func(last string) collect.Runtime {
		return collect.RuntimeOf(facts(func(f *commonv1.HostFacts) {
			for i := range 6 {
				f.Gpus = append(f.Gpus, &commonv1.Gpu{DeviceId: fmt.Sprint("GPU-", i), Index: int32(i + 2), DriverVersion: "1"})
			}
			f.Gpus = append(f.Gpus, &commonv1.Gpu{DeviceId: last, Index: 9})
			f.ContainerRuntime = strings.Repeat("c", 120) + last
			f.Kernel = strings.Repeat("k", 128)
		}))
	}
	accepted := collect.RuntimeOf(facts(func(f *commonv1.HostFacts) { f.ContainerRuntime = strings.Repeat("w", 128) }))
	one, other := many("GPU-y").Differences(accepted), many("GPU-z").Differences(accepted)
	if one == other || len(one) > 512 || len(other) > 512 {
		t.Errorf("the texts are %q and %q", one, other)
	}
}

// TestAddressesThatChanged: they are recorded at once, and are evidence until the next sweep; the identity stays.
func TestAddressesThatChanged(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Addresses = []string{"10.0.0.5", "fd00::4", "no address"} })
	k.report(n)
	v := k.wantReasons(n.id(), networkFacts)
	if v.GetUserState() != normal || used(v, networkFacts) != "it has 10.0.0.5 now; it has 10.0.0.4 no more" {
		t.Errorf("the verdict is %v", v)
	}
	rows := k.digest()
	k.report(n) // the same once more
	got := k.count(`SELECT count(*) FROM recovery.evidence WHERE node_id = $1 AND part = 'host/addresses'`, n.id())
	if got != 1 {
		t.Errorf("%d rows, before:\n%s", got, rows)
	}
	k.listen(time.Minute + time.Second)
	k.round()
	k.wantReasons(n.id(), networkFacts, unspecified)
}

// TestChangedAddressesAreEvidenceForAsLongAsIsSet: five seconds in place of a minute.
func TestChangedAddressesAreEvidenceForAsLongAsIsSet(t *testing.T) {
	k := newKit(t)
	k.evidence.AddressesFresh = 5 * time.Second
	k.judge = k.another()
	n := k.reporting()
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Addresses = []string{"10.0.0.5"} })
	k.report(n)
	k.wantReasons(n.id(), networkFacts)
	k.listen(6 * time.Second)
	k.round()
	k.wantReasons(n.id(), networkFacts, unspecified)
}

// TestAnotherRemoteAddressIsRecordedAlone: sessions that come through other balancers are no reason.
func TestAnotherRemoteAddressIsRecordedAlone(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	for _, remote := range []string{"[2001:db8::1]:9", "192.0.2.1:1", "[2001:db8::1]:2"} {
		n.session.RemoteAddress = remote
		k.again(n, facts())
	}
	k.wantReasons(n.id())
	if n := k.count(`SELECT cardinality(remotes) FROM recovery.host_facts WHERE node_id = $1`, n.id()); n != 2 {
		t.Errorf("%d remote addresses are recorded", n)
	}
}

// TestAnAgentThatLacksATaskType: it is version_drift until an agent that knows all types has a session. An agent of
// another version that knows them all is none.
func TestAnAgentThatLacksATaskType(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	n.session.AgentVersion, n.session.TaskTypes = "v9.9.9", append(tasktypes.Queued(), 999)
	k.again(n, facts())
	k.wantReasons(n.id())
	n.session.TaskTypes = tasktypes.Queued()[1:]
	k.again(n, facts())
	v := k.wantReasons(n.id(), version)
	if v.GetUserState() != normal || used(v, version) != "the agent does not know probe.noop" {
		t.Errorf("the verdict is %v", v)
	}
	n.session.TaskTypes = tasktypes.Queued()
	k.again(n, facts())
	k.wantReasons(n.id(), version, unspecified)
}

// TestAnOptionalTypeIsNotMissed: an agent may lack a type that is configured as optional, and no other.
func TestAnOptionalTypeIsNotMissed(t *testing.T) {
	k := newKit(t)
	k.evidence.OptionalTypes = tasktypes.Queued()[:1]
	k.judge = k.another()
	n := k.reporting()
	n.session.TaskTypes = tasktypes.Queued()[1:]
	k.again(n, facts())
	k.wantReasons(n.id())
	n.session.TaskTypes = tasktypes.Queued()[2:]
	k.again(n, facts())
	v := k.wantReasons(n.id(), version)
	if want := "the agent does not know " + names.Of(tasktypes.Queued()[1]); used(v, version) != want {
		t.Errorf("the evidence is %q, want %q", used(v, version), want)
	}
}

// TestRefusedWorkWantsAnOperator: that work was refused for the agent's version is more than that it would be, and ends
// with the next agent. A refusal that is read late, or of a type that the agent knows, is none.
func TestRefusedWorkWantsAnOperator(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	refused := func(kind commonv1.TaskType) *lifecyclev1.TaskTypeRefused {
		return &lifecyclev1.TaskTypeRefused{RefusedTaskId: ids.New(), RefusedByNodeId: n.id(), Type: kind}
	}
	probe := refused(tasktypes.Queued()[0])
	k.put(probe)
	k.round()
	k.wantReasons(n.id())
	n.session.TaskTypes = tasktypes.Queued()[1:]
	k.again(n, facts())
	k.wantReasons(n.id(), version)
	k.put(refused(tasktypes.Queued()[1]))
	k.round()
	k.wantReasons(n.id(), version)
	k.put(probe)
	k.round()
	if v := k.wantReasons(n.id(), version, version); v.GetUserState() != operator {
		t.Errorf("the verdict is %v", v)
	}
	n.session.TaskTypes = tasktypes.Queued()
	k.again(n, facts())
	k.put(probe)
	k.round()
	k.wantReasons(n.id(), version, version, unspecified)
}

// TestReasonsOfAHostHoldBesideEachOther: the end of the worse one leaves the other.
func TestReasonsOfAHostHoldBesideEachOther(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	n.session.ClockOffset = durationpb.New(time.Hour)
	n.session.Host = facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" })
	k.report(n)
	k.wantReasons(n.id(), hostRuntime)
	n.session.Host = facts()
	k.report(n)
	k.wantReasons(n.id(), hostRuntime, clockSkew)
	n.session.Host, n.session.ClockOffset = nil, nil
	k.report(n)
	k.wantReasons(n.id(), hostRuntime, clockSkew, unspecified)
}
