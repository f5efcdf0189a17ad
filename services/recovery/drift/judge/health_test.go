package judge_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
)

const (
	probeCheck = recoveryv1.HealthCheck_HEALTH_CHECK_PROBE_COMPLETED
	tasksCheck = recoveryv1.HealthCheck_HEALTH_CHECK_NO_EXPIRED_TASK_CURRENT
)

// proven is all that proves a node healthy.
func proven() judge.Proof {
	return judge.Proof{
		Evidence: []drift.Evidence{isHeard, active}, Beats: true, Instance: "i1", Serial: "01", Trusted: true,
		Generation: 3, SessionSerial: "01", Issuer: "its issuer is trusted", ProbeInstance: "i1",
		ProbeGeneration: 3, ProbedAt: now, TasksAt: now,
	}
}

// TestEachItemIsNeeded checks that each thing that is taken away leaves its own item absent, and the node not healthy.
func TestEachItemIsNeeded(t *testing.T) {
	well := drift.Verdict{}
	if items := judge.Checklist(proven(), now); !judge.Healthy(well, items) {
		t.Fatalf("not healthy: %v", items)
	}
	for name, tt := range map[string]struct {
		lose func(*judge.Proof)
		want []recoveryv1.HealthCheck
	}{
		"not heard": {
			func(p *judge.Proof) { p.Evidence = []drift.Evidence{isLost, active} },
			[]recoveryv1.HealthCheck{1, 3},
		},
		"nothing known": {func(p *judge.Proof) { p.Evidence = nil }, []recoveryv1.HealthCheck{1, 3}},
		"stale": {
			func(p *judge.Proof) { p.Evidence = []drift.Evidence{stale(isHeard)} },
			[]recoveryv1.HealthCheck{1, 3},
		},
		"no beat":     {func(p *judge.Proof) { p.Beats = false }, []recoveryv1.HealthCheck{1}},
		"untrusted":   {func(p *judge.Proof) { p.Trusted = false }, []recoveryv1.HealthCheck{2}},
		"old serial":  {func(p *judge.Proof) { p.SessionSerial = "00" }, []recoveryv1.HealthCheck{3}},
		"no serial":   {func(p *judge.Proof) { p.SessionSerial = "" }, []recoveryv1.HealthCheck{3}},
		"no probe":    {func(p *judge.Proof) { p.ProbedAt = time.Time{} }, []recoveryv1.HealthCheck{4}},
		"reimaged":    {func(p *judge.Proof) { p.Instance = "i2" }, []recoveryv1.HealthCheck{4, 5}},
		"not counted": {func(p *judge.Proof) { p.TasksAt = time.Time{} }, []recoveryv1.HealthCheck{5}},
		"backlog": {func(p *judge.Proof) {
			p.Evidence = append(p.Evidence, saw(drift.FromTasks, tasks, backlog))
		}, []recoveryv1.HealthCheck{5}},
	} {
		t.Run(name, func(t *testing.T) {
			p := proven()
			tt.lose(&p)
			items := judge.Checklist(p, now)
			var got []recoveryv1.HealthCheck
			for _, item := range items {
				if item.Detail == "" && name != "backlog" {
					t.Errorf("%s has no detail", item.Check)
				}
				if !item.Present {
					got = append(got, item.Check)
				}
			}
			if !slices.Equal(got, tt.want) || judge.Healthy(well, items) {
				t.Errorf("absent %v, want %v", got, tt.want)
			}
		})
	}
	for reason := range commonv1.DriftReason_name {
		if reason != 0 && judge.Healthy(drift.Verdict{Reason: commonv1.DriftReason(reason)}, judge.Checklist(proven(), now)) {
			t.Errorf("healthy with reason %d", reason)
		}
	}
}

// TestAnAbsentProbeSaysWhy checks the text of a probe that is missing: a no-op that was made and counts no more is not
// told as one that never was.
func TestAnAbsentProbeSaysWhy(t *testing.T) {
	for name, tt := range map[string]struct {
		lose func(*judge.Proof)
		want string
	}{
		"over":   {func(p *judge.Proof) { p.ProbedAt = time.Time{} }, "its last no-op does not count since"},
		"none":   {func(p *judge.Proof) { p.Instance = "i2" }, "no no-op has completed since it enrolled"},
		"failed": {func(p *judge.Proof) { p.Instance, p.Note = "i2", "no-op is failed" }, "no-op is failed; "},
		"wanted": {func(p *judge.Proof) { p.ProbedAt, p.Wanted = time.Time{}, true }, "recovery asks lifecycle for a no-op"},
	} {
		p := proven()
		tt.lose(&p)
		for _, item := range judge.Checklist(p, now) {
			if item.Check == probeCheck && (item.Present || !strings.HasPrefix(item.Detail, tt.want)) {
				t.Errorf("%s: %v", name, item)
			}
		}
	}
}

// TestATopicOfTheProcessIsNotTheSession checks that what a session tells of its agent beside, later, does not move the
// time since when the agent is heard.
func TestATopicOfTheProcessIsNotTheSession(t *testing.T) {
	p := proven()
	lacks := saw(session, process, version)
	lacks.ObservedAt = isHeard.ObservedAt.Add(time.Minute)
	p.Evidence = append(p.Evidence, lacks)
	for _, item := range judge.Checklist(p, now)[:3:3] {
		if item.Check != recoveryv1.HealthCheck_HEALTH_CHECK_ISSUER_TRUSTED &&
			!item.ObservedAt.Equal(isHeard.ObservedAt) {
			t.Errorf("%s since %s, heard since %s", item.Check, item.ObservedAt, isHeard.ObservedAt)
		}
	}
}

// TestHealthyFollowsFromFiveItems checks, for evidence and proofs drawn at random, that a healthy node has no reason
// and all five items, and that what hosts or refused connections report makes none healthy that was not.
func TestHealthyFollowsFromFiveItems(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 10))
	text := func(of ...string) string { return of[random.IntN(len(of))] }
	healthy := 0
	for range 20000 {
		p := proven()
		for range random.IntN(3) {
			p.Evidence = append(p.Evidence, saw(commonv1.EvidenceSource(random.IntN(10)),
				commonv1.DriftPart(random.IntN(8)), commonv1.DriftReason(random.IntN(27))))
		}
		if random.IntN(3) == 0 {
			p.Evidence = p.Evidence[1:]
		}
		p.Beats, p.Trusted, p.SessionSerial = random.IntN(4) > 0, random.IntN(4) > 0, text("01", "01", "01", "02", "")
		p.Instance, p.Generation = text("i1", "i1", "i2", ""), int64(3+random.IntN(2))
		v, items := drift.Classify(p.Evidence, now), judge.Checklist(p, now)
		if !judge.Healthy(v, items) {
			unproven := p
			unproven.Evidence = append(slices.Clone(p.Evidence), saw(host, process, unspecified), saw(ingress, process, 0))
			if judge.Healthy(drift.Classify(unproven.Evidence, now), judge.Checklist(unproven, now)) {
				t.Fatalf("what a host reports makes it healthy: %+v", p)
			}
			continue
		}
		healthy++
		if v.Reason != 0 || len(items) != 5 || !p.Beats || !p.Trusted || p.SessionSerial != p.Serial || p.Instance != "i1" {
			t.Fatalf("healthy: %+v, %v", p, v)
		}
	}
	if healthy < 500 {
		t.Fatalf("only %d were healthy", healthy)
	}
}

// TestAProbeFollowsAReason checks the way back to healthy: the end of a reason leaves the probe missing, lifecycle is
// asked for one once, and its success is one event.
func TestAProbeFollowsAReason(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.enter(n, heldState, "")
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil || len(v.GetChecklist()) != 5 || k.probe() != 0 {
		t.Fatalf("a held node: %v", v)
	}
	k.enter(n, activeState, "")
	k.round()
	v := k.wantReasons(n.id(), held, unspecified)
	got := absent(v)
	if !slices.Equal(got, []recoveryv1.HealthCheck{probeCheck, tasksCheck}) || v.GetHealthySince() != nil {
		t.Fatalf("absent %v of %v", got, v)
	}
	if asked := k.probe(); asked != 1 {
		t.Fatalf("asked for %d nodes", asked)
	}
	if asked := k.probe(); asked != 0 { // a moment later it is asked again what became of it
		t.Fatalf("asked for %d nodes at once", asked)
	}
	k.pass(time.Second)
	k.beat()
	if k.probe() != 1 || k.lifecycle.queued() != 1 || k.round() != 0 {
		t.Fatalf("%d probes", k.lifecycle.queued())
	}
	k.lifecycle.end(t, n, succeededTask)
	k.pass(time.Second)
	k.beat()
	if k.probe() != 1 || k.round() != 1 {
		t.Fatal("its success changes no verdict")
	}
	v = k.wantReasons(n.id(), held, unspecified, unspecified)
	if len(absent(v)) != 0 || !v.GetHealthySince().AsTime().Equal(k.now()) || v.GetEnded() != nil ||
		v.GetUserState() != normal {
		t.Fatalf("healthy: %v", v)
	}
	k.pass(time.Hour)
	k.beat()
	before := k.digest()
	if k.probe() != 0 || k.round() != 0 || k.digest() != before {
		t.Error("a healthy node costs something as time passes")
	}
	k.enter(n, heldState, "")
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil {
		t.Errorf("a held node is healthy: %v", v)
	}
}

// TestAnEnrolmentIsProbedOnce checks that a node of which nothing was wrong is probed in its first session: by one task
// of each session, until one has succeeded.
func TestAnEnrolmentIsProbedOnce(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.lifecycle.refuses = commonv1.Reason_REASON_NODE_NOT_CONNECTED // costs no task
	if k.probe() != 1 || k.lifecycle.queued() != 0 {
		t.Fatalf("%d probes of %d requests", k.lifecycle.queued(), k.lifecycle.asked)
	}
	k.lifecycle.refuses = 0
	k.listen(5 * time.Second)
	k.round()
	if k.probe() != 1 || k.lifecycle.queued() != 1 {
		t.Fatalf("%d probes of %d requests", k.lifecycle.queued(), k.lifecycle.asked)
	}
	k.lifecycle.end(t, n, expiredTask)
	k.pass(time.Second)
	k.beat()
	k.probe()
	for range 3 { // nothing is made again as time passes
		k.pass(time.Hour)
		k.beat()
		if k.round() != 0 || k.probe() != 0 {
			t.Fatalf("%d probes in one session", k.lifecycle.queued())
		}
	}
	k.lose(n)
	k.round()
	k.back(n)
	k.round()
	k.recover(n)
	if v := k.wantReasons(n.id(), unspecified); k.lifecycle.queued() != 2 || len(absent(v)) != 0 {
		t.Errorf("%d probes, %v", k.lifecycle.queued(), v)
	}
}

// TestAPlainReconnectCostsNoProbe checks that nodes which connect again, and of which nothing was wrong, are neither
// probed nor announced, and that those that were healthy still are.
func TestAPlainReconnectCostsNoProbe(t *testing.T) {
	k := newKit(t)
	never := k.up()
	k.recover(never)
	once := k.up()
	k.fail(once)
	k.recover(once)
	since, first, asked := k.last(once), k.last(never), k.lifecycle.asked
	for range 3 {
		for _, n := range []*machine{never, once} {
			k.lose(n)
			k.round()
			k.pass(time.Second)
			k.beat()
			k.back(n)
			if changed := k.round(); changed != 0 {
				t.Fatalf("%d verdicts changed", changed)
			}
		}
	}
	if k.probe() != 0 || k.lifecycle.asked != asked {
		t.Error("a node was probed")
	}
	if last := k.last(once); !proto.Equal(last, since) {
		t.Errorf("%v, was %v", last, since)
	}
	if last := k.last(never); !proto.Equal(last, first) {
		t.Errorf("%v, was %v", last, first)
	}
}

// TestSilenceUnprovesANode checks that an outage of a node ends that it is healthy, and that it is probed in its new
// session.
func TestSilenceUnprovesANode(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.recover(n)
	k.lose(n)
	k.round()
	k.listen(staleAfter + 10*time.Second)
	k.round()
	if v := k.last(n); v.GetReason() != agentDown || v.GetHealthySince() != nil {
		t.Fatalf("verdict %v", v)
	}
	k.back(n)
	k.round()
	if v := k.last(n); v.GetReason() != 0 || !slices.Equal(absent(v), []recoveryv1.HealthCheck{probeCheck, tasksCheck}) {
		t.Fatalf("verdict %v", v)
	}
	k.recover(n)
	if k.lifecycle.queued() != 2 {
		t.Errorf("%d probes", k.lifecycle.queued())
	}
}

// TestAnotherEnrolmentIsProbed checks that what proved one enrolment of a node healthy proves nothing of the next one.
func TestAnotherEnrolmentIsProbed(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.recover(n)
	k.lose(n)
	n.identity.NodeInstanceId, n.identity.CurrentSerial = ids.New(), "02"
	k.put(n.identity)
	k.round()
	k.back(n)
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil {
		t.Fatalf("verdict %v", v)
	}
	k.recover(n)
}

// TestAnOldCertificateIsNotHealthy checks that a session on a certificate that is not the current one any more ends
// that a node is healthy, but not before the session on the next one had its chance; and that no probe is asked for.
func TestAnOldCertificateIsNotHealthy(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.recover(n)
	healthy := k.last(n)
	n.identity.CurrentSerial = "02"
	k.put(n.identity)
	if changed := k.round(); changed != 0 {
		t.Fatalf("%d verdicts changed at once", changed)
	}
	k.back(n)
	k.pass(10 * time.Second)
	k.beat()
	if changed := k.round(); changed != 0 || !proto.Equal(healthy, k.last(n)) {
		t.Fatalf("%d verdicts changed by a renewal", changed)
	}
	n.identity.CurrentSerial = "03"
	k.put(n.identity)
	k.pass(10 * time.Second)
	k.beat()
	if changed := k.round(); changed != 1 || k.last(n).GetHealthySince() != nil || k.probe() != 0 {
		t.Fatalf("verdict %v", k.last(n))
	}
	k.back(n)
	if k.round() != 1 || k.last(n).GetHealthySince() == nil {
		t.Fatalf("verdict %v", k.last(n))
	}
}

// TestAnIssuerThatTheIngressDoesNotTrust checks that no node with a certificate of it is healthy or probed.
func TestAnIssuerThatTheIngressDoesNotTrust(t *testing.T) {
	k := newKit(t)
	n := k.made()
	n.identity.IssuerFingerprint = strings.Repeat("ab", 32)
	k.put(n.identity, n.session, n.gate)
	k.fail(n)
	v := k.last(n)
	if !slices.Contains(absent(v), recoveryv1.HealthCheck_HEALTH_CHECK_ISSUER_TRUSTED) || k.probe() != 0 {
		t.Fatalf("verdict %v", v)
	}
}

// TestAProbeThatDoesNotSucceed checks that a probe that expired, was refused, or left expired tasks is made again, each
// time later, and that what is missing says so.
func TestAProbeThatDoesNotSucceed(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.probe()
	for i, wait := range []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second} {
		k.lifecycle.end(t, n, expiredTask)
		k.pass(time.Second)
		k.beat()
		k.probe()
		k.listen(wait - time.Millisecond)
		if asked := k.probe(); asked != 0 {
			t.Fatalf("attempt %d: asked before its time", i)
		}
		k.pass(time.Millisecond)
		k.beat()
		if asked := k.probe(); asked != 1 || k.lifecycle.queued() != i+2 {
			t.Fatalf("attempt %d: asked for %d, %d probes", i, asked, k.lifecycle.queued())
		}
	}
	k.lifecycle.end(t, n, succeededTask)
	k.lifecycle.expired = 2
	k.pass(time.Second)
	k.beat()
	k.probe()
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil {
		t.Fatalf("healthy with expired tasks: %v", v)
	}
	k.lifecycle.expired = 0
	k.listen(5 * time.Second)
	k.probe()
	k.round()
	if v := k.last(n); v.GetHealthySince() == nil || k.lifecycle.queued() != 5 {
		t.Fatalf("%d probes, verdict %v", k.lifecycle.queued(), v)
	}
}

// TestAnEarlierProbeProvesNothingOfTheNextReason checks that after two reasons in one session the no-op of the first
// one does not count: another is queued. An answer about the first, or one with a task that ended before the second
// reason did, is none.
func TestAnEarlierProbeProvesNothingOfTheNextReason(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.recover(n)
	k.pass(time.Second)
	k.beat()
	k.fail(n)
	k.probe()
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil || k.lifecycle.queued() != 2 {
		t.Fatalf("%d probes, verdict %v", k.lifecycle.queued(), v)
	}
	k.lifecycle.end(t, n, succeededTask)
	k.lifecycle.age(n, time.Second)
	k.pass(time.Second)
	k.beat()
	k.probe()
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil {
		t.Fatalf("a no-op from before the reason has ended proves it: %v", v)
	}
	k.listen(5 * time.Second)
	k.recover(n)
	if k.lifecycle.queued() != 3 {
		t.Errorf("%d probes", k.lifecycle.queued())
	}
}

// TestALostAnswerCostsNoSecondProbe checks that a replica which ends between its commit and the answer of lifecycle
// leaves the probe to another one, which asks with the same key; and that of two replicas one asks.
func TestALostAnswerCostsNoSecondProbe(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.lifecycle.lost = true
	if _, _, err := k.judge.ProbeOnce(k.ctx); err == nil {
		t.Fatal("the answer was not lost")
	}
	k.lifecycle.lost = false
	other := k.another()
	if asked, _, err := other.ProbeOnce(k.ctx); err != nil || asked != 0 {
		t.Fatalf("asked for %d at once: %v", asked, err)
	}
	k.listen(5 * time.Second)
	before := k.lifecycle.asked
	var all sync.WaitGroup
	for _, judge := range []*judge.Judge{k.judge, other} {
		all.Go(func() {
			if _, _, err := judge.ProbeOnce(k.ctx); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if k.lifecycle.asked != before+1 || k.lifecycle.queued() != 1 {
		t.Fatalf("asked %d times, %d probes", k.lifecycle.asked-before, k.lifecycle.queued())
	}
	k.lifecycle.end(t, n, succeededTask)
	k.pass(time.Second)
	k.beat()
	if _, _, err := other.ProbeOnce(k.ctx); err != nil {
		t.Fatal(err)
	}
	k.round()
	if k.last(n).GetHealthySince() == nil {
		t.Errorf("verdict %v", k.last(n))
	}
}

// TestAnAnswerAboutAnEarlierSession checks that a probe that completed in a session which has ended proves nothing, and
// that one is asked for in the next session.
func TestAnAnswerAboutAnEarlierSession(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	k.probe()
	k.lifecycle.end(t, n, succeededTask)
	k.lose(n)
	k.back(n)
	k.round()
	k.listen(5 * time.Second)
	k.probe()
	k.round()
	if v := k.last(n); v.GetHealthySince() != nil || k.lifecycle.queued() != 2 {
		t.Fatalf("%d probes, verdict %v", k.lifecycle.queued(), v)
	}
	k.pass(time.Second)
	k.beat()
	k.lifecycle.end(t, n, succeededTask)
	k.probe()
	k.round()
	if k.last(n).GetHealthySince() == nil {
		t.Errorf("verdict %v", k.last(n))
	}
}

// TestASessionOfAnEarlierBuild checks that a node whose session was opened before its certificate was reported is not
// healthy, and becomes so in its next session.
func TestASessionOfAnEarlierBuild(t *testing.T) {
	k := newKit(t)
	n := k.made()
	n.session.Serial, n.identity.NodeInstanceId = "", ids.New()
	k.put(n.identity, n.session, n.gate)
	k.fail(n)
	if v := k.last(n); !slices.Contains(absent(v), recoveryv1.HealthCheck_HEALTH_CHECK_SESSION_ON_CURRENT_SERIAL) ||
		k.probe() != 0 {
		t.Fatalf("verdict %v", v)
	}
	k.back(n)
	k.round()
	k.recover(n)
}

// TestTimesOfTheChecklistAreOfTheSession: of a node that was healthy before it connected again, no time is from before
// the present session; what was seen before has its own time in the detail.
func TestTimesOfTheChecklistAreOfTheSession(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.fail(n)
	probed := k.now()
	k.recover(n)
	k.listen(time.Minute)
	k.lose(n)
	k.pass(time.Second)
	opened := k.now()
	k.back(n)
	k.beat()
	k.round()
	out, err := judge.NewServer(k.judge).GetNodeHealth(k.ctx, &recoveryv1.GetNodeHealthRequest{NodeId: n.id()})
	k.must(err)
	h := out.GetHealth()
	if at := h.GetHealthySince(); at == nil || at.AsTime().Before(opened) {
		t.Errorf("healthy since %v, the session since %v", at.AsTime(), opened)
	}
	for _, item := range h.GetChecklist() {
		if !item.GetPresent() || item.GetObservedAt().AsTime().Before(opened) {
			t.Errorf("%s since %v, the session since %v", item.GetCheck(), item.GetObservedAt().AsTime(), opened)
		}
		if item.GetCheck() == probeCheck && !strings.Contains(item.GetDetail(), probed.UTC().Format(time.RFC3339)) {
			t.Errorf("the probe completed at %v: %s", probed, item.GetDetail())
		}
	}
}

// TestWhatIsKnownOfANode checks what recovery returns of a node of which there is no verdict, of one that waits for its
// probe, of one that has just lost its session, and of none.
func TestWhatIsKnownOfANode(t *testing.T) {
	k := newKit(t)
	server := judge.NewServer(k.judge)
	get := func(id string) *recoveryv1.NodeHealth {
		t.Helper()
		out, err := server.GetNodeHealth(k.ctx, &recoveryv1.GetNodeHealthRequest{NodeId: id})
		k.must(err)
		return out.GetHealth()
	}
	never := k.up()
	unprobed := []recoveryv1.HealthCheck{probeCheck, tasksCheck}
	h := get(never.id())
	if got := absent(&recoveryv1.NodeVerdict{Checklist: h.GetChecklist()}); !slices.Equal(got, unprobed) ||
		h.GetHealthySince() != nil || h.GetProbe().GetDueAt() == nil || len(h.GetParts()) < 2 || h.GetAsOf() == nil {
		t.Errorf("without a verdict: %v", h)
	}
	k.recover(never)
	n := k.up()
	k.fail(n)
	k.probe()
	k.lifecycle.end(t, n, expiredTask)
	k.pass(time.Second)
	k.beat()
	k.probe()
	_, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.verdict_period (period_id, node_id, reason, severity,
			observed_at, detected_at, ended_at, correlation_id, version)
		SELECT $1::uuid, $1::uuid, 'of_a_newer_build', '', mesh.clock(), mesh.clock(), mesh.clock(), '', 1`, n.id())
	k.must(err)
	reported := testkit.SetAside(t, "drift.period")
	h = get(n.id())
	if reported() != 1 {
		t.Errorf("%d periods with a reason of a newer build were reported", reported())
	}
	if p := h.GetProbe(); p.GetFailed() != 1 || !strings.Contains(p.GetNote(), "expired") || p.GetDueAt() == nil {
		t.Errorf("probe %v", p)
	}
	if v := h.GetCounters().GetVerdicts(); len(v) != 1 || v[0].GetReason() != held || v[0].GetCount() != 1 {
		t.Errorf("counters %v", h.GetCounters())
	}
	k.listen(5 * time.Second)
	k.recover(n)
	if h = get(n.id()); h.GetHealthySince() == nil || h.GetProbe() != nil {
		t.Errorf("healthy: %v", h)
	}
	k.lose(n)
	k.round()
	if h = get(n.id()); h.GetHealthySince() != nil {
		t.Errorf("healthy without a session: %v", h)
	}
	if _, err := server.GetNodeHealth(k.ctx, &recoveryv1.GetNodeHealthRequest{NodeId: ids.New()}); fault.ReasonOf(err) !=
		commonv1.Reason_REASON_NOT_FOUND {
		t.Errorf("no such node: %v", err)
	}
}
