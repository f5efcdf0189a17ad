package workspace

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
)

// GPUAAS_MODEL_FOR is how long the model and the concurrent clients are at work; GPUAAS_MODEL_SEED repeats what they asked.
const modelFor = 30 * time.Second

func modelTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("GPUAAS_MODEL_FOR")
	if text == "" {
		return modelFor
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func modelSeed(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64() >> 1 //nolint:gosec // a seed needs no secrecy
	if text := os.Getenv("GPUAAS_MODEL_SEED"); text != "" {
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

// tale is one sequence: a name, the workspace that has it, and the model of it.
type tale struct {
	*stage

	rt       fataler
	rules    rules
	tenant   string
	tenantID string
	other    string // id of a foreign tenant
	name     string
	where    commonv1.PlacementDriver
	machine  string
	flush    func()

	s        sketch
	healthy  time.Duration     // clock offset at which it became active
	keys     map[string]string // idempotency key → what it stands for and the run it was answered
	before   history
	troubled bool // something was done to the open run by which it may fail
	said     []string
	counts   map[string]int
}

type fataler interface {
	Fatalf(format string, args ...any)
}

func (a *tale) fail(format string, args ...any) {
	a.rt.Fatalf("%s\nin %+v\nafter %s", fmt.Sprintf(format, args...), a.s, strings.Join(a.said, "; "))
}

func (a *tale) say(format string, args ...any) { a.said = append(a.said, fmt.Sprintf(format, args...)) }

// asking is one request.
type asking struct {
	verb, who, key     string
	override, noReason bool
	seat               int
	dry                bool
}

func (a *tale) ask(q asking) (*lifecyclev1.Operation, error) {
	ctx := testkit.Context(a.t)
	switch q.who {
	case "operator":
		ctx = rpc.WithPerson(ctx, rpc.Person{Subject: "olga", Roles: []string{"operator"}})
	case "member":
		ctx = rpc.WithPerson(ctx, rpc.Person{Subject: "tom", TenantID: a.tenantID, Roles: []string{"tenant"}})
	case "stranger":
		ctx = rpc.WithPerson(ctx, rpc.Person{Subject: "eve", TenantID: a.other, Roles: []string{"tenant"}})
	}
	req := &lifecyclev1.RequestOperationRequest{Kind: kindOf(q.verb), IdempotencyKey: q.key, DryRun: q.dry, Override: q.override, Reason: "the model asks"}
	if q.noReason {
		req.Reason = ""
	}
	if q.verb == askCreate || q.verb == askOther {
		spec := &lifecyclev1.WorkspaceSpec{Placement: a.where, Gpus: 1}
		if q.verb == askOther {
			spec.Gpus = 2
		}
		req.Target = &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{Tenant: a.tenant, Name: a.name, Spec: spec}}
	} else {
		req.Target = &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: a.s.ID}
	}
	res, err := a.seats[q.seat].server.RequestOperation(ctx, req)
	return res.GetOperation(), err
}

// expects is what the model says to a request: who may ask at all, whether the key was answered before, and then the rules.
func (a *tale) expects(q asking) (verdict, string) {
	create := q.verb == askCreate || q.verb == askOther
	if !create && q.override && (q.who == "member" || q.who == "stranger") {
		return refusal(commonv1.Reason_REASON_PERMISSION_DENIED), ""
	}
	if !create && q.noReason && (q.override || q.verb == askSkipUndo) {
		return refusal(commonv1.Reason_REASON_REASON_REQUIRED), ""
	}
	if q.who == "stranger" {
		if create {
			return refusal(commonv1.Reason_REASON_TENANT_UNKNOWN), ""
		}
		return refusal(commonv1.Reason_REASON_NOT_FOUND), ""
	}
	if was := a.keys[q.key]; was != "" && !q.dry {
		stands, run, _ := strings.Cut(was, "|")
		if stands != a.stands(q.verb) {
			return refusal(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED), ""
		}
		return verdict{how: "replays"}, run
	}
	return a.rules.decide(a.s, q.verb, q.override), ""
}

func (a *tale) stands(verb string) string {
	if verb == askCreate || verb == askOther {
		return verb
	}
	return verb + "/" + a.s.ID
}

// request asks for something in three ways, in the table of actions, as a dry run and in earnest, and holds the answers to the model.
func (a *tale) request(q asking) {
	a.s.Healthy = a.s.State == "active" && a.offset-a.healthy >= time.Hour
	before, err := a.traces(a.tenantID)
	if err != nil {
		a.fail("%v", err)
	}
	a.table()
	dry := q
	dry.dry = true
	want, _ := a.expects(dry)
	got, err := a.ask(dry)
	a.compare("a dry run of "+q.verb, dry, want, got, err, "")
	if now, err := a.traces(a.tenantID); err != nil || now != before {
		a.fail("a dry run of %s changed something: %v", q.verb, err)
	}
	want, run := a.expects(q)
	got, err = a.ask(q)
	a.say("%s by %s key %q override %v: %s %s", q.verb, q.who, q.key, q.override, want.how, want.reason)
	a.counts[q.verb+" "+want.how]++
	a.compare(q.verb, q, want, got, err, run)
	if want.how == refuses || want.how == joins || want.how == same || want.how == "replays" {
		if now, err := a.traces(a.tenantID); err != nil || now != before {
			a.fail("%s, which %s, changed something: %v", q.verb, want.how, err)
		}
	}
	if want.how != refuses && want.how != "replays" {
		old := a.s.ID
		next := a.rules.after(a.s, q.verb, want, got.GetWorkspaceId(), got.GetOperationId())
		if q.key != "" {
			if a.keys[q.key] = a.stands(q.verb) + "|" + got.GetOperationId(); q.verb != askCreate && q.verb != askOther {
				a.keys[q.key] = q.verb + "/" + old + "|" + got.GetOperationId()
			}
		}
		if next.ID != old {
			a.before = history{}
		}
		a.s = next
		if want.how == begins {
			a.troubled = a.planted() || a.s.Unclean
		}
		a.observe(q.verb == askSkipUndo && want.how == does)
	}
	a.holds()
}

// compare holds an answer to a verdict.
func (a *tale) compare(what string, q asking, want verdict, got *lifecyclev1.Operation, err error, replayed string) {
	if want.how == refuses {
		if err == nil || names.Of(fault.ReasonOf(err)) != want.reason {
			a.fail("%s by %s is to be refused with %s: %v, %v", what, q.who, want.reason, got, err)
		}
		return
	}
	if err != nil {
		a.fail("%s by %s is to be accepted (%s): %v", what, q.who, want.how, err)
	}
	problem := ""
	switch {
	case got.GetDryRun() != q.dry:
		problem = "dry run"
	case got.GetJoined() != (want.how == joins):
		problem = "joined"
	case got.GetReplayed() != (want.how == "replays"):
		problem = "replayed"
	case want.how == joins && got.GetOperationId() != a.s.Run, (want.how == does || want.how == same) && got.GetOperationId() != a.s.Run:
		problem = "operation"
	case want.how == "replays" && got.GetOperationId() != replayed:
		problem = "operation, which was " + replayed
	case !q.dry && want.how == begins && (got.GetOperationId() == a.s.Run || got.GetOperationId() == ""):
		problem = "operation, which is not new"
	case want.how == joins && got.GetEpoch() != a.s.Epoch:
		problem = "epoch"
	}
	if problem != "" {
		a.fail("%s by %s, which %s, is answered with another %s: %v", what, q.who, want.how, problem, got)
	}
}

// table holds the table of actions to the rules.
func (a *tale) table() {
	if a.s.ID == "" {
		return
	}
	res, err := a.seats[0].server.GetActions(testkit.Context(a.t), &lifecyclev1.GetActionsRequest{WorkspaceId: a.s.ID})
	if err != nil {
		a.fail("table of actions: %v", err)
	}
	rows := map[string]*lifecyclev1.ActionOption{}
	for _, row := range res.GetActions() {
		rows[names.Of(row.GetKind())] = row
	}
	for _, verb := range verbs() {
		row, v := rows[verb], a.rules.decide(a.s, verb, false)
		switch {
		case row == nil:
			a.fail("the table has no row for %s", verb)
		case v.how == same:
		case row.GetPossible() != (v.how == begins || v.how == does):
			a.fail("the table says %v of %s, which %s %s", row, verb, v.how, v.reason)
		case v.how == refuses && names.Of(row.GetReason()) != v.reason:
			a.fail("the table says that %s is refused with %s, it is with %s", verb, names.Of(row.GetReason()), v.reason)
		}
	}
}

// observe reads what there is and holds it to the model: as drivers may have left it (moved), or to the last field.
func (a *tale) observe(moved bool) {
	now, run, err := a.look(a.s.ID)
	if err != nil {
		a.fail("%v", err)
	}
	now.Other, now.Healthy, now.Away = a.s.Other, a.s.Healthy, a.s.Away
	if problem := fits(now); problem != "" {
		a.fail("%s, and its run is %+v", problem, now)
	}
	was := a.s
	if !moved {
		was.Boxed, was.Placed, was.Unclean = now.Boxed, now.Placed, now.Unclean
		if was != now {
			a.fail("the model has %+v, there is %+v", was, now)
		}
	} else {
		if was.Stuck && !now.Stuck { // helped by hand
			was.Stuck = false
			if !now.Open && now.State == "failed" || now.State == "decommissioned" || now.Open {
				was = now
			}
		}
		if problem := reachable(was, now); problem != "" {
			a.fail("%s: %+v, then %+v", problem, was, now)
		}
	}
	if now.State == "active" && a.s.State != "active" {
		a.healthy = a.offset
	}
	if !a.troubled && a.s.Open && !a.s.Undoing && !a.s.Cancelled && !a.s.Stuck && (now.Undoing || now.Stuck || !now.Open && now.State == "failed") {
		a.fail("nothing was done to run %s, and it failed: %s %s", run.ID, run.ErrorCode, run.Error)
	}
	a.s = now
	a.s.Healthy = false
}

func (a *tale) holds() {
	if a.s.ID == "" {
		return
	}
	wrong, err := a.wrong(a.s.ID, &a.before)
	if err != nil || len(wrong) > 0 {
		a.fail("%q %v", wrong, err)
	}
}

func (a *tale) planted() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.faults) > 0
}

// drives lets a driver live: to its death after so many points, or until the run rests.
func (a *tale) drives(points int64, within time.Duration) {
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

// settles takes every hindrance from the agents away and waits until the run rests; what was made to fail goes on failing.
func (a *tale) settles() {
	a.world.mu.Lock()
	a.world.mute = false
	a.world.mu.Unlock()
	a.away(false)
	for tries := 0; a.s.Open && !a.s.Stuck; tries++ {
		if tries == 5 {
			run, _, _ := a.look(a.s.ID)
			a.fail("it does not rest: %+v", run)
		}
		if tries > 0 { // what waits for a deadline gets it
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

func (a *tale) away(is bool) {
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

// step is one random thing that happens.
func (a *tale) step(rt *rapid.T) {
	all := append([]string{askCreate, askOther}, verbs()...)
	steps := []string{
		"ask", "ask", "ask what goes", "ask what goes", "ask what goes", "ask what goes", "ask what goes", "die", "die", "rest", "rest", "rest", "jump", "plant", "plant", "heal",
		"agents", "flush",
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
		q := asking{
			verb: rapid.SampledFrom(all).Draw(rt, "verb"), who: rapid.SampledFrom([]string{"service", "operator", "member", "member", "operator", "stranger"}).Draw(rt, "who"),
			key: rapid.SampledFrom([]string{"", "", "", "", "k1", "k2", "k3"}).Draw(rt, "key"), override: rapid.IntRange(0, 3).Draw(rt, "override") == 0,
			noReason: rapid.IntRange(0, 9).Draw(rt, "reasonless") == 0, seat: rapid.IntRange(0, 1).Draw(rt, "seat"),
		}
		if a.s.ID == "" && q.verb != askOther {
			q.verb = askCreate
		}
		a.request(q)
	case "die":
		a.drives(int64(rapid.IntRange(1, 45).Draw(rt, "points")), 3*time.Second)
	case "rest":
		a.settles()
	case "jump":
		by := rapid.SampledFrom([]time.Duration{30 * time.Second, 6 * time.Minute, 70 * time.Minute}).Draw(rt, "by")
		a.troubled = a.troubled || by > time.Minute
		a.jump(by)
		a.say("%s pass", by)
	case "plant":
		a.troubled = true
		for _, list := range [][]string{
			{
				StepValidate + "/do", StepPrevious + "/do", StepStorage + "/do", StepHandle + "/do", StepSchema + "/do", StepDeploy + "/do", StepReady + "/do",
				StepActive + "/do", StepActive + "/do", StepActive + "/do", "Remove tenant workloads/do", "Drop per-tenant schema/do", "Release storage and box/do",
			},
			{StepStorage + "/undo", StepHandle + "/undo", StepSchema + "/undo", StepDeploy + "/undo", ""},
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
	case "flush":
		a.flush()
	}
	a.holds()
}

// TestTheWorkspaceKeepsToItsRules throws requests, failures, deaths of drivers and jumps of the clock at workspaces, in any order, and holds every answer
// and every row to the rules.
func TestTheWorkspaceKeepsToItsRules(t *testing.T) {
	within := modelTime(t)
	store := testkit.Redis(t)
	flusher := dialLocks(t, store.URL())
	g := newStage(t, func(int) *lock.Lock { return locks(t, dialLocks(t, store.URL())) })
	until := time.Now().Add(within)
	counts := map[string]int{}
	tales := 0
	rapidly(t, map[string]string{"seed": strconv.FormatUint(modelSeed(t), 10), "checks": "100000", "nofailfile": "true", "shrinktime": "15s"})
	failed := false
	rapid.Check(t, func(rt *rapid.T) {
		if !failed && time.Now().After(until) {
			return // the library asks for so many sequences; we for as many as there is time for
		}
		failed = true // a sequence that fails is tried again to make it shorter, whatever the time
		g.play(rt, rules{}, tales, counts, func() { flusher.FlushAll(testkit.Context(t)) })
		failed = false
		tales++
	})
	t.Logf("%d sequences, %d lives of drivers: %v", tales, g.lives, counts)
	if tales < 2 || counts["deaths"] == 0 {
		t.Errorf("%d sequences and %d deaths show nothing", tales, counts["deaths"])
	}
}

// play is one sequence, on a name of its own.
func (g *stage) play(rt *rapid.T, r rules, n int, counts map[string]int, flush func()) {
	a := &tale{
		stage: g, rt: rt, rules: r, name: "demo", where: byProcess, flush: flush, keys: map[string]string{}, counts: counts,
	}
	a.tenant, a.other = g.tenant(), ""
	stranger := g.tenant()
	err := g.pool.QueryRow(testkit.Context(g.t), `SELECT (SELECT id::text FROM lifecycle.tenant WHERE name = $1), (SELECT id::text FROM lifecycle.tenant WHERE name = $2)`,
		a.tenant, stranger).Scan(&a.tenantID, &a.other)
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
	a.settles()
	a.mu.Lock()
	clear(a.faults)
	a.mu.Unlock()
	if a.s.State == "active" || a.s.State == "failed" || a.s.State == "stuck" {
		a.request(asking{verb: askDecommission, who: "service"})
		a.settles()
	}
	if a.s.ID != "" && a.s.State != "decommissioned" {
		a.fail("at the end it is %s", a.s.State)
	}
}

// leave takes a sequence's hindrances away, whether or not it failed.
func (a *tale) leave() {
	a.mu.Lock()
	clear(a.faults)
	a.mu.Unlock()
	a.world.mu.Lock()
	a.world.mute = false
	delete(a.world.boxes, "machine:"+a.machine)
	a.world.mu.Unlock()
	a.away(false)
	// What a sequence left open is nobody's, and its machine takes no other.
	_, err := a.db.OwnerPool().Exec(context.WithoutCancel(a.t.Context()), `
		WITH m AS (UPDATE lifecycle.node_gate SET cordoned = true WHERE name = $2)
		UPDATE lifecycle.saga_run SET state = 'failed', finished_at = mesh.clock(), owner = NULL WHERE tenant_id = $1 AND finished_at IS NULL`, a.tenantID, a.machine)
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
