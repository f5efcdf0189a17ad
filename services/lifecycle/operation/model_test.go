package operation

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/saga/stall"
)

// The time for which the model and the concurrent clients run; GPUAAS_MODEL_FOR changes it, and GPUAAS_MODEL_SEED
// repeats their requests.
const (
	modelFor     = 10 * time.Second
	modelForLong = 2 * time.Minute
)

func modelTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("GPUAAS_MODEL_FOR")
	if text == "" {
		return testkit.Repeat(modelFor, modelForLong)
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func modelSeed(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64() >> 1 // a seed needs no secrecy
	// RAPID_SEED is the same in each `make test`; zero, or none, draws anew.
	if text := cmp.Or(os.Getenv("GPUAAS_MODEL_SEED"), os.Getenv("RAPID_SEED")); text != "" && text != "0" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("repeat with GPUAAS_MODEL_SEED=%d", seed)
	return seed
}

// rapidly sets the library's flags for one test.
func rapidly(t *testing.T, set map[string]string) {
	t.Helper()
	for name, value := range set {
		f := flag.Lookup("rapid." + name)
		was := f.Value.String()
		if err := f.Value.Set(value); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Value.Set(was) })
	}
}

func (a *scenario) planted() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.faults) > 0
}

// drives runs a driver: until it dies after so many points, or until the run rests.
func (a *scenario) drives(points int64, within time.Duration) {
	if a.s.ID == "" || !a.s.Open || a.s.Stuck {
		return
	}
	until := time.Now().Add(within)
	died := a.drive(points, func() bool {
		run := ""
		err := a.pool.QueryRow(testkit.Context(a.t), `SELECT state FROM lifecycle.saga_run WHERE id = $1`, a.s.Run).Scan(&run)
		return err != nil || run == "succeeded" || run == "failed" || run == "stuck" || time.Now().After(until)
	})
	a.observe(true)
	a.holds()
	if died {
		a.counts["deaths"]++
	}
	a.say("driven %d points: died %v, %s %s", points, died, a.s.Kind, a.s.State)
}

// runsOut removes every hindrance from the agents and waits until the run rests; steps that were made to fail go on
// failing.
func (a *scenario) runsOut() {
	a.world.mu.Lock()
	a.world.mute = false
	a.world.mu.Unlock()
	a.away(false)
	a.comes()
	for tries := 0; a.s.Open && !a.s.Stuck; tries++ {
		if tries == 5 {
			run, _, _ := a.view(a.s.ID)
			a.fail("it does not rest: %+v", run)
		}
		if tries > 0 { // a run that waits for a deadline reaches it
			a.troubled = true
			a.jump(2 * time.Minute)
			if _, err := a.tasks.Sweep(testkit.Context(a.t)); err != nil {
				a.fail("sweep: %v", err)
			}
		}
		a.drives(0, 15*time.Second)
	}
	if a.s.ID == "" {
		return
	}
	if diff, err := a.disagrees(a.s.ID, a.tenant, a.name, a.machine, a.s.Stuck); err != nil || len(diff) > 0 {
		a.fail("the world disagrees: %q %v", diff, err)
	}
}

func (a *scenario) away(is bool) {
	if a.machine == "" || a.s.Away == is {
		return
	}
	a.s.Away = is
	by := 100000 * time.Hour
	if is {
		a.troubled, by = true, -by
	}
	a.beat(by)
}

// stays lets no agent of an instance connect from now on, drives the open run until it waits for its instance or time
// is up, and lets it be flagged as stalled: if the run waits for an instance of its own, that instance does not come.
func (a *scenario) stays(within time.Duration) {
	a.world.mu.Lock()
	a.world.deadTo = math.MaxInt64 - 1
	a.world.mu.Unlock()
	a.world.turns(a.t) // agents that were about to connect have done so
	a.troubled = true
	if until := time.Now().Add(within); a.s.ID != "" && a.s.Open && !a.s.Stuck {
		a.drive(0, func() bool {
			run, open, err := runs.Live(testkit.Context(a.t), a.pool, a.s.ID)
			return err != nil || !open || run.State == "stuck" || run.State == "waiting" &&
				run.StepName() == provision.StepStorage ||
				time.Now().After(until)
		})
	}
	a.jump(6 * time.Minute)
	if _, err := stall.Mark(testkit.Context(a.t), a.seats[0].core, 100000*time.Hour); err != nil {
		a.fail("flag what stalls: %v", err)
	}
	if a.s.ID != "" {
		a.observe(true)
	}
	a.say("no box comes: %v, its run held: %v", a.s.WithoutInstance, a.s.Held)
	if a.s.WithoutInstance {
		a.counts["boxless"]++
	}
}

// comes lets agents connect, and waits until the instance that a run waits for has connected.
func (a *scenario) comes() {
	a.world.mu.Lock()
	was := a.world.deadTo
	a.world.deadTo = 0
	a.world.mu.Unlock()
	if was == 0 || a.s.ID == "" {
		return
	}
	testkit.Eventually(a.t, testkit.Patience, func() error {
		now, _, err := a.view(a.s.ID)
		if err == nil && now.WithoutInstance {
			err = errors.New("its box does not connect")
		}
		return err
	})
	a.observe(true)
	a.say("boxes come again")
}

// step does one random thing.
func (a *scenario) step(rt *rapid.T) {
	all := slices.Concat([]string{askCreate, askOther, askReplace, askReplace}, verbs(), releaseVerbs())
	steps := []string{
		"ask", "ask", "ask what goes", "ask what goes", "ask what goes", "ask what goes", "ask what goes", "die", "die",
		"rest", "rest", "rest", "jump", "plant", "plant", "heal", "agents", "boxes", "boxes", "flush", "fail release",
		"fail release",
	}
	what := rapid.SampledFrom(steps).Draw(rt, "what")
	if what == "ask what goes" {
		goes := slices.DeleteFunc(slices.Clone(all), func(verb string) bool {
			v := a.rules.decide(a.s, verb, false)
			return v.how == refuses || v.how == joins || v.how == same
		})
		if what = "rest"; len(goes) > 0 {
			what, all = "ask", goes
		}
	}
	switch what {
	case "ask":
		q := request{
			verb: rapid.SampledFrom(all).Draw(rt, "verb"),
			who: rapid.SampledFrom([]string{"service", "operator", "member", "member", "operator", "stranger"}).Draw(rt,
				"who"),
			key:      rapid.SampledFrom([]string{"", "", "", "", "k1", "k2", "k3"}).Draw(rt, "key"),
			override: rapid.IntRange(0, 3).Draw(rt, "override") == 0, noReason: rapid.IntRange(0, 9).Draw(rt, "reasonless") == 0,
			seat: rapid.IntRange(0, 1).Draw(rt, "seat"),
		}
		if a.s.ID == "" && q.verb != askOther {
			q.verb = askCreate
		}
		if ofAllocation(q.verb) { // members are refused, and keys unknown, before the service is called
			if q.key = ""; q.who == "member" {
				q.who = "operator"
			}
		}
		a.request(q)
	case "die":
		a.drives(int64(rapid.IntRange(1, 45).Draw(rt, "points")), 3*time.Second)
	case "rest":
		a.runsOut()
	case "jump":
		by := rapid.SampledFrom([]time.Duration{30 * time.Second, 6 * time.Minute, 70 * time.Minute}).Draw(rt, "by")
		a.troubled = a.troubled || by > time.Minute
		a.jump(by)
		a.say("%s pass", by)
	case "plant":
		a.troubled = true
		for _, list := range [][]string{
			{
				provision.StepValidate + "/do", provision.StepPrevious + "/do", provision.StepStorage + "/do",
				provision.StepHandle + "/do", provision.StepSchema + "/do", provision.StepDeploy + "/do",
				provision.StepReady + "/do", provision.StepActive + "/do", provision.StepActive + "/do",
				provision.StepActive + "/do", "Remove tenant workloads/do", "Drop per-tenant schema/do",
				"Release storage and box/do",
			},
			{
				provision.StepStorage + "/undo", provision.StepHandle + "/undo", provision.StepSchema + "/undo",
				provision.StepDeploy + "/undo", "",
			},
		} {
			where := rapid.SampledFrom(list).Draw(rt, "where")
			how := rapid.SampledFrom([]string{failsBefore, failsAfter, failsOnce}).Draw(rt, "how")
			if where == "" {
				continue
			}
			a.mu.Lock()
			a.faults[where] = how
			a.mu.Unlock()
			a.say("%s fails %s", where, how)
		}
	case "heal":
		a.mu.Lock()
		clear(a.faults)
		a.mu.Unlock()
		a.say("nothing fails")
	case "agents":
		if a.machine != "" && rapid.Bool().Draw(rt, "away") {
			a.away(!a.s.Away)
			a.say("machine away: %v", a.s.Away)
			return
		}
		a.world.mu.Lock()
		a.world.mute = !a.world.mute
		a.troubled = true
		a.say("agents mute: %v", a.world.mute)
		a.world.mu.Unlock()
	case "boxes":
		if a.world.dead() && rapid.Bool().Draw(rt, "come") {
			a.comes()
		} else {
			a.stays(time.Second)
		}
	case "fail release":
		if a.s.State == "active" || a.s.State == "failed" {
			a.request(request{verb: askDecommission, who: "service"})
		}
		a.troubled = true
		where := "Release storage and box/do"
		if a.s.Undoing {
			where = provision.StepStorage + "/undo"
		}
		a.mu.Lock()
		a.faults[where] = failsBefore
		a.mu.Unlock()
		a.runsOut()
		if rapid.Bool().Draw(rt, "for good") {
			return
		}
		a.mu.Lock()
		delete(a.faults, where)
		a.mu.Unlock()
		a.say("its release was made to fail: %v", a.s.Unclean)
	case "flush":
		a.flush()
	}
	a.holds()
}

// TestTheWorkspaceKeepsToItsRules throws requests, failures, deaths of drivers and jumps of the clock at workspaces, in
// any order, and compares every answer and every row with the rules.
func TestTheWorkspaceKeepsToItsRules(t *testing.T) {
	within := modelTime(t)
	store := testkit.Redis(t)
	flusher := dialLocks(t, store.URL())
	g := newStage(t, func(int) *lock.Lock { return locks(t, dialLocks(t, store.URL())) })
	until := time.Now().Add(within)
	counts := map[string]int{}
	sequences := 0
	rapidly(t, map[string]string{
		"seed": strconv.FormatUint(modelSeed(t), 10), "checks": "100000", "nofailfile": "true",
		"shrinktime": "15s",
	})
	failed := false
	rapid.Check(t, func(rt *rapid.T) {
		if !failed && time.Now().After(until) && sequences >= 2 && counts["deaths"] > 0 {
			return // the library has a fixed number of sequences; this test runs as many as there is time for
		}
		failed = true // a sequence that fails is tried again to make it shorter, whatever the time
		g.play(rt, rules{}, sequences, counts, func() { flusher.FlushAll(testkit.Context(t)) })
		failed = false
		sequences++
	})
	t.Logf("%d sequences, %d lives of drivers: %v", sequences, g.lives, counts)
	if sequences < 2 || counts["deaths"] == 0 {
		t.Errorf("%d sequences and %d deaths show nothing", sequences, counts["deaths"])
	}
}

// play runs one sequence, on a name of its own.
func (g *stage) play(rt *rapid.T, r rules, n int, counts map[string]int, flush func()) {
	a := &scenario{
		stage: g, rt: rt, rules: r, name: "demo", where: byProcess, flush: flush, keys: map[string]string{}, counts: counts,
	}
	a.tenant, a.other = g.tenant(), ""
	stranger := g.tenant()
	err := g.pool.QueryRow(testkit.Context(g.t),
		`SELECT (SELECT id::text FROM lifecycle.tenant WHERE name = $1), (SELECT id::text FROM lifecycle.tenant
			WHERE name = $2)`, a.tenant, stranger).Scan(&a.tenantID, &a.other)
	if err != nil {
		a.fail("%v", err)
	}
	if rapid.IntRange(0, 2).Draw(rt, "placement") == 0 {
		a.where, a.machine = byStatic, fmt.Sprintf("m-%s", a.tenant)
		g.machine(a.machine)
	}
	defer a.leave()
	for range rapid.IntRange(6, 24).Draw(rt, "steps") {
		a.step(rt)
	}
	a.runsOut()
	a.mu.Lock()
	clear(a.faults)
	a.mu.Unlock()
	if a.s.State == "active" || a.s.State == "failed" || a.s.State == "stuck" {
		a.request(request{verb: askDecommission, who: "service"})
		a.runsOut()
	}
	if a.s.ID != "" && a.s.State != "decommissioned" {
		a.fail("at the end it is %s", a.s.State)
	}
}

// leave removes a sequence's hindrances, whether or not it failed.
func (a *scenario) leave() {
	a.mu.Lock()
	clear(a.faults)
	a.mu.Unlock()
	a.world.mu.Lock()
	a.world.mute = false
	a.world.deadTo = 0
	delete(a.world.instances, "machine:"+a.machine)
	a.world.mu.Unlock()
	a.away(false)
	// No driver serves the operations that a sequence left open: they are closed, and its machine takes no other
	// workspace.
	_, err := a.db.OwnerPool().Exec(context.WithoutCancel(a.t.Context()), `
		WITH m AS (UPDATE lifecycle.node_gate SET cordoned = true WHERE name = $2)
		UPDATE lifecycle.saga_run SET state = 'failed', finished_at = mesh.clock(), owner = NULL
			WHERE tenant_id = $1 AND finished_at IS NULL`, a.tenantID, a.machine)
	if err != nil {
		a.t.Errorf("leave: %v", err)
	}
}

func dialLocks(t *testing.T, url string) *redis.Client {
	t.Helper()
	client, err := lock.Dial(url, lock.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func locks(t *testing.T, client *redis.Client) *lock.Lock {
	t.Helper()
	l, err := lock.New(lock.Deps{Client: client, Logger: testkit.Logger(t)}, lock.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return l
}
