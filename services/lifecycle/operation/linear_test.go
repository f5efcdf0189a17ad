package operation

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// moody returns lifecycle's definitions with one step each, which takes a moment, and now and then fails or cannot be
// undone.
func moody(t *testing.T) *saga.Registry {
	t.Helper()
	mood := func(ctx context.Context, in, total int) (saga.Outcome, error) {
		select {
		case <-time.After(time.Duration(rand.IntN(4)) * time.Millisecond): // moods need no secrecy
		case <-ctx.Done():
		}
		if rand.IntN(total) < in { // moods need no secrecy
			return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_UNAVAILABLE,
				"a mood", nil)
		}
		return saga.Done(nil), nil
	}
	once := saga.RetryPolicy{Attempts: 1}
	do := func(bad int) []saga.Step {
		return []saga.Step{{
			Name: "a mood", Class: saga.Idempotent, Retry: once, UndoRetry: once,
			Do:   func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) { return mood(ctx, bad, 8) },
			Undo: func(ctx context.Context, _ *saga.Env) (saga.Outcome, error) { return mood(ctx, 1, 4) },
			Observe: func(context.Context, *saga.Env) (saga.Observation, error) {
				return saga.Observation{Presence: saga.Partial}, nil
			},
		}}
	}
	states := func(running, succeeded commonv1.WorkspaceState) saga.WorkspaceStates {
		return saga.WorkspaceStates{
			Running: running, Succeeded: succeeded,
			Failed: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		}
	}
	const active = commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	reg, err := saga.NewRegistry(
		saga.Definition{
			Name: provision.DefinitionProvision, Version: 1, Steps: do(3),
			States: states(commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, active),
		},
		saga.Definition{
			Name: provision.DefinitionRecreate, Version: 1, Steps: do(3),
			States: states(commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING, active),
		},
		saga.Definition{
			Name: provision.DefinitionDecommission, Version: 1, Steps: do(4), Sticks: true, Uncancellable: true,
			States: states(commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING,
				commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED),
		},
	)
	if err != nil {
		t.Fatal(err)
	}
	return reg
}

// replica is one instance of the server, with a driver.
type replica struct {
	pool   *pgxpool.Pool
	server *Server
}

func (r *replica) call(ctx context.Context, tenant string, in called) (heard, error) {
	if in.verb == askView {
		w, err := workspace.Get(ctx, r.pool, in.id)
		return heard{id: w.ID, run: w.RunID, state: w.State, epoch: w.Epoch, reset: w.ResetDone, used: w.RetryUsed}, err
	}
	req := &lifecyclev1.RequestOperationRequest{
		Kind: kindOf(in.verb), IdempotencyKey: in.key, Override: in.override,
		Reason: "a client asks",
	}
	if in.verb == askCreate || in.verb == askOther {
		spec := &lifecyclev1.WorkspaceSpec{Gpus: 1}
		if in.verb == askOther {
			spec.Gpus = 2
		}
		req.Target = &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant,
			Name:   "demo", Spec: spec,
		}}
	} else {
		req.Target = &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: in.id}
	}
	if in.verb == askReplace {
		ctx, req.Requester = asService(ctx, "recovery"), "watchdog"
	}
	res, err := r.server.RequestOperation(ctx, req)
	for movedMeanwhile(err) { // nothing came of it: a client asks again
		res, err = r.server.RequestOperation(ctx, req)
	}
	if f, ok := fault.As(err); ok && f.Reason != commonv1.Reason_REASON_INTERNAL {
		return heard{reason: names.Of(f.Reason)}, nil
	}
	op := res.GetOperation()
	return heard{
		joined: op.GetJoined(), replayed: op.GetReplayed(), id: op.GetWorkspaceId(), run: op.GetOperationId(),
		epoch: op.GetEpoch(),
	}, err
}

// movedMeanwhile reports whether a request was given up because its workspace changed each time that it was read, as on
// a slow machine.
func movedMeanwhile(err error) bool {
	f, ok := fault.As(err)
	return ok && f.Reason == commonv1.Reason_REASON_CONFLICT && strings.HasPrefix(f.Public, "the workspace moved ")
}

// replicas makes several instances of the server over one database and one lock store that is emptied all the time.
func replicas(t *testing.T, n int) ([]*replica, *testkit.Database) {
	t.Helper()
	testkit.IO(t)
	db := testkit.DB(t)
	store := testkit.Redis(t)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var loops sync.WaitGroup
	t.Cleanup(func() { stop(); loops.Wait() })
	keys := secretKeys(t, secretenv.NewKey())
	var out []*replica
	for i := range n {
		pool, err := pg.Open(t.Context(), pg.Config{URL: db.URL(pg.RoleLifecycle), MaxConns: 8})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		core, err := saga.New(saga.Deps{DB: pool, Registry: moody(t), Logger: testkit.Logger(t)})
		if err != nil {
			t.Fatal(err)
		}
		driver, err := drive.New(core,
			drive.Config{Owner: fmt.Sprintf("replica-%d", i), Workers: 2, Poll: 20 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		loops.Go(func() {
			if err := driver.Run(ctx); err != nil {
				t.Errorf("driver: %v", err)
			}
		})
		out = append(out, &replica{pool: pool, server: NewServer(Deps{
			Logger: testkit.Logger(t), DB: pool, Core: core, Catalogue: catalogue(), Lock: locks(t, dialLocks(t, store.URL())),
			Policy:       policy.Fixed{Set: policy.Defaults()},
			DefaultQuota: tenants.Quota{Workspaces: 1000, GPUs: 1000, StorageBytes: 1 << 50}, Secrets: keys,
		})})
	}
	flusher := dialLocks(t, store.URL())
	loops.Go(func() {
		tick := time.NewTicker(7 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			select {
			case <-tick.C:
				flusher.FlushAll(ctx)
			case <-ctx.Done():
			}
		}
	})
	return out, db
}

// round has clients send requests at the same time and returns the history.
func round(t *testing.T, all []*replica, tenant string, seed uint64, clients, requests int) []porcupine.Operation {
	t.Helper()
	ctx := testkit.Context(t)
	var mu sync.Mutex
	var past []porcupine.Operation
	newest := ""
	base := time.Now()
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			dice := rand.New(rand.NewPCG(seed, uint64(c))) // it is to be repeated
			requests := append([]string{
				askCreate, askCreate, askOther, askView, askView, askRetry, askRecreate, askReplace,
				askReset, askReset,
			}, verbs()...)
			for range requests {
				in := called{verb: requests[dice.IntN(len(requests))], override: dice.IntN(4) == 0}
				if dice.IntN(5) == 0 {
					in.key = fmt.Sprintf("k%d", dice.IntN(linearKeys))
				}
				mu.Lock()
				id := newest
				mu.Unlock()
				if id == "" && in.verb != askOther {
					in.verb = askCreate
				}
				if in.verb != askCreate && in.verb != askOther {
					in.id = id
				}
				if in.verb == askView {
					in.key = ""
				}
				call := time.Since(base)
				out, err := all[dice.IntN(len(all))].call(ctx, tenant, in)
				back := time.Since(base)
				if err != nil {
					t.Errorf("%+v: %v", in, err)
					return
				}
				mu.Lock()
				past = append(past, porcupine.Operation{
					ClientId: c, Input: in, Output: out, Call: call.Nanoseconds(),
					Return: back.Nanoseconds(),
				})
				if out.id != "" && !out.replayed {
					newest = out.id
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return past
}

// alone has one client send, each time its workspace rests, the requests that the rules refuse or count in that state,
// and returns the history.
func alone(t *testing.T, all []*replica, tenant string) []porcupine.Operation {
	t.Helper()
	ctx := testkit.Context(t)
	var past []porcupine.Operation
	base := time.Now()
	ask := func(verb, id string) heard {
		t.Helper()
		in := called{verb: verb, id: id}
		call := time.Since(base)
		out, err := all[len(past)%len(all)].call(ctx, tenant, in)
		if err != nil {
			t.Fatalf("%+v: %v", in, err)
		}
		past = append(past, porcupine.Operation{
			Input: in, Output: out, Call: call.Nanoseconds(),
			Return: time.Since(base).Nanoseconds(),
		})
		return out
	}
	id := ask(askCreate, "").id
	for range 4 {
		testkit.Eventually(t, testkit.Patience, func() error {
			w, err := workspace.Get(ctx, all[0].pool, id)
			if err == nil && !slices.Contains([]string{"active", "failed", "stuck"}, w.State) {
				err = fmt.Errorf("the workspace is %s", w.State)
			}
			return err
		})
		switch ask(askView, id).state {
		case "active":
			ask(askReset, id)
			ask(askRecreate, id)
		case "failed":
			ask(askRetry, id)
			ask(askReset, id)
			ask(askRetry, id)
		default:
			return past
		}
	}
	return past
}

// TestConcurrentRequestsTakeTurns checks the answers that concurrent clients of several replicas got against the rules:
// there must be an order, in which each request takes effect at one moment between its call and its answer, that
// explains every answer.
func TestConcurrentRequestsTakeTurns(t *testing.T) {
	const clients, requests = 6, 25
	within, seed := modelTime(t)/2, modelSeed(t)
	all, _ := replicas(t, 3)
	until := time.Now().Add(within)
	hows := map[string]int{}
	caught := map[string]int{"reset always": 0, "retry without reset": 0, "recreate keeps epoch": 0}
	rounds, undecided := 0, 0
	unseen := func() bool { return slices.Contains(slices.Collect(maps.Values(caught)), 0) }
	check := func(past []porcupine.Operation) {
		t.Helper()
		for _, op := range past {
			out := op.Output.(heard)
			switch {
			case out.reason != "":
				hows[op.Input.(called).verb+" "+out.reason]++
			case out.joined:
				hows[op.Input.(called).verb+" joined"]++
			case out.replayed:
				hows[op.Input.(called).verb+" replayed"]++
			default:
				hows[op.Input.(called).verb]++
			}
		}
		result, info := porcupine.CheckOperationsVerbose(rules{}.specification(), past, 20*time.Second)
		if result == porcupine.Unknown { // there was no time to search for an order: inconclusive
			undecided++
			return
		}
		if result != porcupine.Ok {
			path := filepath.Join(os.TempDir(), fmt.Sprintf("linear-%d.html", seed))
			err := porcupine.VisualizePath(rules{}.specification(), info, path)
			t.Fatalf("round %d of seed %d: %s; see %s (%v)\n%s", rounds, seed, result, path, err, stopsAt(past, info))
		}
		for plant := range caught {
			if porcupine.CheckOperationsTimeout(rules{plant: plant}.specification(), past, 2*time.Second) == porcupine.Illegal {
				caught[plant]++
			}
		}
	}
	tenant := func() string {
		t.Helper()
		name := fmt.Sprintf("t%d", rounds)
		if _, err := all[0].server.CreateTenant(t.Context(), &lifecyclev1.CreateTenantRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for ; rounds < 2 || time.Now().Before(until); rounds++ {
		past := round(t, all, tenant(), seed+uint64(rounds), clients, requests) // a small count
		if t.Failed() {
			return
		}
		check(past)
	}
	// On a slow machine the few rounds may have missed a wrong rule: a single client that sends the requests which tell
	// the rules apart finds every wrong rule.
	for together := rounds; rounds == together || unseen() && rounds < together+100; rounds++ {
		check(alone(t, all, tenant()))
	}
	t.Logf("%d rounds, of %d requests by %d clients or of one alone, %d undecided: %v; wrong rules that were seen: %v",
		rounds, clients*requests, clients, undecided, hows, caught)
	for plant, n := range caught {
		if n == 0 {
			t.Errorf("a specification with %q explains everything as well: this shows nothing", plant)
		}
	}
}

// stopsAt returns a text with the end of the longest order that was found, the states that the workspace may be in
// then, and the answers that none of those states explains.
func stopsAt(past []porcupine.Operation, info porcupine.LinearizationInfo) string {
	var longest []porcupine.Operation
	for _, partition := range info.PartialLinearizationsOperations() {
		for _, order := range partition {
			if len(order) > len(longest) {
				longest = order
			}
		}
	}
	done := map[string]bool{}
	states := []account{{}}
	for _, op := range longest {
		done[fmt.Sprint(op)] = true
		var next []account
		for _, s := range states {
			for _, n := range (rules{}).step(s, op.Input.(called), op.Output.(heard)) {
				if !slices.Contains(next, n) {
					next = append(next, n)
				}
			}
		}
		states = next
	}
	out := &strings.Builder{}
	show := func(what string, list []porcupine.Operation) {
		for _, op := range list {
			fmt.Fprintf(out, "%s client %d %d-%d %+v -> %+v\n", what, op.ClientId, op.Call/1000, op.Return/1000, op.Input,
				op.Output)
		}
	}
	show("explained", longest[max(0, len(longest)-8):])
	for _, s := range states {
		fmt.Fprintf(out, "it may be %+v\n", s)
	}
	left := slices.DeleteFunc(slices.Clone(past), func(op porcupine.Operation) bool { return done[fmt.Sprint(op)] })
	slices.SortFunc(left, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	show("left", left[:min(len(left), 10)])
	return out.String()
}

// The specification must reject a wrong history, and accept a right one.
func TestTheSpecificationRefusesWrongHistories(t *testing.T) {
	at := func(n int64, verb string, out heard) porcupine.Operation {
		in := called{verb: verb}
		if verb != askCreate {
			in.id = "w"
		}
		return porcupine.Operation{Input: in, Output: out, Call: n, Return: n + 15}
	}
	made := at(0, askCreate, heard{id: "w", run: "r1", epoch: 1})
	active := at(20, askView, heard{id: "w", run: "r1", epoch: 1, state: "active"})
	for name, tc := range map[string]struct {
		past   []porcupine.Operation
		guilty bool
	}{
		"one begins, the other joins": {past: []porcupine.Operation{
			made, active, at(40, askRecreate, heard{id: "w", run: "r2", epoch: 2}),
			at(41, askRecreate, heard{id: "w", run: "r2", epoch: 2, joined: true}),
		}},
		"two begin the same epoch": {guilty: true, past: []porcupine.Operation{
			made, active, at(40, askRecreate, heard{id: "w", run: "r2", epoch: 2}),
			at(41, askRecreate, heard{id: "w", run: "r3", epoch: 2}),
		}},
		"two begin one after the other": {past: []porcupine.Operation{
			made, active, at(40, askRecreate, heard{id: "w", run: "r2", epoch: 2}),
			at(41, askRecreate, heard{id: "w", run: "r3", epoch: 3}),
		}},
		"a join of what nobody began": {
			guilty: true, past: []porcupine.Operation{
				made, active, at(40, askRecreate, heard{id: "w", run: "r9", epoch: 2, joined: true}),
			},
		},
		"a reset of what is active": {
			guilty: true, past: []porcupine.Operation{made, active, at(40, askReset, heard{id: "w", run: "r1", epoch: 1})},
		},
		"a stale look": {guilty: true, past: []porcupine.Operation{
			made, active, at(40, askRecreate, heard{id: "w", run: "r2", epoch: 2}),
			at(60, askView, heard{id: "w", run: "r1", epoch: 1, state: "active"}),
		}},
	} {
		if got := porcupine.CheckOperations(rules{}.specification(), tc.past); got == tc.guilty {
			t.Errorf("%s: linearizable is %v", name, got)
		}
	}
}
