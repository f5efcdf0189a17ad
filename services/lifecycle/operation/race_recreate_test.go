package operation

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/process"
)

// launched is a real driver of processes, whose instances' agents the fake agent plays.
type launched struct {
	*process.Driver

	world *world
	holds *holds
}

// Launch launches a real process, once the test does not delay it; then the fake agent plays its agent.
func (l launched) Launch(ctx context.Context, b placement.LaunchRequest) (placement.Launched, error) {
	if err := l.holds.wait(ctx, b.WorkspaceID); err != nil {
		return placement.Launched{}, err
	}
	out, err := l.Driver.Launch(ctx, b)
	if err != nil {
		return out, err
	}
	_, err = l.world.Launch(ctx, b)
	return out, err
}

// End keeps the fake agent's instance until the real one is confirmed ended.
func (l launched) End(ctx context.Context, workspaceID string, epoch int64) error {
	if err := l.Driver.End(ctx, workspaceID, epoch); err != nil {
		return err
	}
	return l.world.End(ctx, workspaceID, epoch)
}

// holds delays launches of workspaces.
type holds struct {
	mu sync.Mutex
	of map[string]<-chan struct{}
	// reached is called before each wait.
	reached func()
}

// put makes the next launches of a workspace wait until the channel is closed.
func (h *holds) put(workspaceID string, until <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.of[workspaceID] = until
}

func (h *holds) wait(ctx context.Context, workspaceID string) error {
	h.mu.Lock()
	until := h.of[workspaceID]
	h.mu.Unlock()
	if until == nil {
		return nil
	}
	h.reached()
	select {
	case <-until:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// realInstances returns a driver of processes whose launch log is in dir.
func realInstances(t *testing.T, dir string) *process.Driver {
	t.Helper()
	agent, ca := filepath.Join(dir, "agent"), filepath.Join(dir, "ca.pem")
	// it is to be run
	if err := os.WriteFile(agent, []byte("#!/bin/sh\nexec sleep 3600\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ca, []byte("trust"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := process.New(testkit.Logger(t), process.Config{
		Dir: filepath.Join(dir, "p"), AgentBinary: agent, EnrollURL: "https://127.0.0.1:1", APIURL: "127.0.0.1:2", CAFile: ca,
		MaxInstances: 64, MaxGPUs: 64,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.PowerOff(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return d
}

// line is a line of the driver's launch log as this test reads it, independently of the driver.
type line struct {
	Op          string `json:"op"`
	WorkspaceID string `json:"workspace_id"`
	Epoch       int64  `json:"epoch"`
}

// checkLedger reads the driver's launch log and returns the number of launches, and every moment at which two instances
// of one workspace stood, or one was launched twice.
func checkLedger(raw []byte) (int, []string) {
	var wrong []string
	launches := 0
	stands := map[string]map[int64]bool{}
	seen := map[string]bool{}
	for n, text := range strings.Split(strings.TrimSpace(string(raw)), "\n") {
		var l line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			wrong = append(wrong, fmt.Sprintf("line %d: %v", n+1, err))
			continue
		}
		if stands[l.WorkspaceID] == nil {
			stands[l.WorkspaceID] = map[int64]bool{}
		}
		switch l.Op {
		case "launched":
			launches++
			k := fmt.Sprintf("%s:%d", l.WorkspaceID, l.Epoch)
			if seen[k] {
				wrong = append(wrong, fmt.Sprintf("line %d: %s was launched twice", n+1, k))
			}
			seen[k] = true
			for e := range stands[l.WorkspaceID] {
				wrong = append(wrong, fmt.Sprintf("line %d: %s was launched while epoch %d stood", n+1, k, e))
			}
			stands[l.WorkspaceID][l.Epoch] = true
		case "ended":
			delete(stands[l.WorkspaceID], l.Epoch)
		}
	}
	return launches, wrong
}

// The check must find the double launches that a log contains.
func TestTheCheckOfTheLaunchLogSeesDoubleLaunches(t *testing.T) {
	for text, guilty := range map[string]bool{
		`{"op":"launched","workspace_id":"a","epoch":1}` + "\n" + `{"op":"ended","workspace_id":"a","epoch":1}` + "\n" +
			`{"op":"launched","workspace_id":"a","epoch":2}`: false,
		`{"op":"launched","workspace_id":"a","epoch":1}` + "\n" + `{"op":"ending","workspace_id":"a","epoch":1}` + "\n" +
			`{"op":"launched","workspace_id":"a","epoch":2}`: true,
		`{"op":"launched","workspace_id":"a","epoch":1}` + "\n" + `{"op":"ended","workspace_id":"a","epoch":1}` + "\n" +
			`{"op":"launched","workspace_id":"a","epoch":1}`: true,
	} {
		if _, wrong := checkLedger([]byte(text)); (len(wrong) > 0) != guilty {
			t.Errorf("%s: %q", text, wrong)
		}
	}
}

// The number of requests for a recreation; GPUAAS_RACE_REQUESTS changes it.
const (
	racingRequests     = 2500 // one burst for each workspace
	racingRequestsLong = 10000
)

// Scenario: double-provision-race. Everyone who may ask for a recreation asks at once, through several replicas, while
// the lock store forgets everything ten times a second and replicas that hold locks and leases are paused for longer
// than those last. Of each burst the first launch waits until a request has joined its operation, the first of each
// workspace until a replica is paused.
func TestRacingRecreationsLaunchNothingTwice(t *testing.T) {
	testkit.IO(t)
	const workspaces, seats, burstSize, lease = 10, 3, 250, 1500 * time.Millisecond
	total := testkit.Repeat(racingRequests, racingRequestsLong)
	if text := os.Getenv("GPUAAS_RACE_REQUESTS"); text != "" {
		var err error
		if total, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	store := testkit.Redis(t)
	dial := func() *redis.Client {
		client, err := lock.Dial(store.URL(), lock.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() })
		return client
	}
	held, paused := make(chan struct{}), make(chan struct{})
	isHeld, isPaused := sync.OnceFunc(func() { close(held) }), sync.OnceFunc(func() { close(paused) })
	launches := &holds{of: map[string]<-chan struct{}{}, reached: isHeld}
	p := newCluster(t, clusterConfig{
		seats: seats, lease: lease, workers: 16,
		instances: func(w *world) placement.Driver { return launched{realInstances(t, dir), w, launches} },
		joins: func(int) *lock.Lock {
			l, err := lock.New(lock.Deps{Client: dial(), Logger: testkit.Logger(t)}, lock.Config{TTL: 250 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			return l
		},
	})
	tenant := p.tenant()
	ids := make([]string, workspaces)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() { ids[i] = p.create(tenant, fmt.Sprintf("w%d", i), byProcess) })
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	ctx, stop := context.WithCancel(testkit.Context(t))
	var chaos sync.WaitGroup
	every := func(d time.Duration, fn func()) {
		chaos.Go(func() {
			tick := time.NewTicker(d)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					fn()
				case <-ctx.Done():
					return
				}
			}
		})
	}
	flusher := dial()
	var flushes, pauses atomic.Int64
	flush := func() {
		if err := flusher.FlushAll(ctx).Err(); err == nil {
			flushes.Add(1)
		}
	}
	every(100*time.Millisecond, flush)
	pause := func() {
		thaw := p.seats[rand.IntN(seats)].freeze()
		defer thaw()
		pauses.Add(1)
		isPaused()
		select {
		case <-time.After(lease + lease/4): // a pause is the fault itself
		case <-ctx.Done():
		}
	}
	chaos.Go(func() {
		select {
		case <-held:
			pause()
		case <-ctx.Done():
		}
	})
	// A pause follows progress, so that on a busy machine, whose runs take longer, the runs get on between the pauses. The
	// steps may be counted at any time: a replica that is paused does not use this pool.
	steps := 0
	every(2*lease, func() {
		var succeeded int
		err := p.db.OwnerPool().QueryRow(ctx, `SELECT count(*) FROM lifecycle.saga_step WHERE state = 'succeeded'`).
			Scan(&succeeded)
		if err != nil || succeeded == steps {
			return
		}
		steps = succeeded
		pause()
	})
	begin := time.Now()
	var started, joinedOps, asked atomic.Int64
	var mu sync.Mutex
	begun := map[string]string{} // operation → workspace
	named := map[string]string{}
	for i, id := range ids {
		wg.Go(func() {
			for asked.Add(burstSize) <= int64(total) {
				var burst sync.WaitGroup
				second, until := make(chan struct{}), make(chan struct{})
				launches.put(id, until)
				hasJoined := sync.OnceFunc(func() { close(second) })
				chaos.Go(func() {
					defer close(until)
					for _, c := range []chan struct{}{second, paused} {
						select {
						case <-c:
						case <-ctx.Done():
						}
					}
				})
				for n := range burstSize {
					burst.Go(func() {
						if n == burstSize/2 {
							flush()
						}
						who := []string{"watchdog", "auto_recovery", "admin", "user"}[n%4]
						op, err := p.seats[(i+n)%seats].ask(testkit.Context(t), kRecreate, id,
							func(r *lifecyclev1.RequestOperationRequest) { r.Requester = who })
						if err != nil {
							t.Errorf("%s was refused: %v", who, err)
							return
						}
						mu.Lock()
						defer mu.Unlock()
						if named[op.GetOperationId()] = op.GetWorkspaceId(); op.GetJoined() {
							joinedOps.Add(1)
							hasJoined()
							return
						}
						started.Add(1)
						begun[op.GetOperationId()] = id
					})
				}
				burst.Wait()
				hasJoined() // the caller who began the last one is alone
				// Pauses take half of the replicas' time, and each costs the work of a lease.
				p.restsWithin(4*testkit.Patience, id, "active")
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	stop()
	chaos.Wait()
	raw, err := os.ReadFile(filepath.Join(dir, "p", "launches.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	launchedInstances, wrong := checkLedger(raw)
	if len(wrong) > 0 {
		t.Errorf("the driver's ledger: %q", wrong)
	}
	runs := p.count(`SELECT count(*) FROM lifecycle.saga_run WHERE kind = 'recreate'`)
	if int(started.Load()) != runs || len(begun) != runs {
		t.Errorf("%d answers say that they began a recreation, %d runs are there", started.Load(), runs)
	}
	if launchedInstances != runs+workspaces {
		t.Errorf("%d launches for %d recreations of %d workspaces", launchedInstances, runs, workspaces)
	}
	if n := started.Load() + joinedOps.Load(); n != int64(total/burstSize*burstSize) {
		t.Errorf("%d of %d were answered", n, total)
	}
	for op, id := range named {
		if begun[op] != id {
			t.Errorf("somebody joined %s, which is no recreation of %s", op, id)
		}
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_run a JOIN lifecycle.saga_run b ON a.workspace_id = b.workspace_id
		AND a.id < b.id
		WHERE tstzrange(a.created_at, a.finished_at) && tstzrange(b.created_at, b.finished_at)`); n != 0 {
		t.Errorf("%d pairs of operations were open at once", n)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.workspace w WHERE w.epoch <> (SELECT count(*) FROM lifecycle.saga_run r
		WHERE r.workspace_id = w.id)`); n != 0 {
		t.Errorf("%d workspaces have drawn another number of epochs than they had operations", n)
	}
	p.never("the race")
	bursts := int64(total / burstSize)
	if flushes.Load() < bursts || pauses.Load() < 1 || runs < workspaces || joinedOps.Load() < bursts {
		t.Errorf("%d flushes, %d pauses, %d recreations: this race shows nothing", flushes.Load(), pauses.Load(), runs)
	}
	fenced := int64(0)
	for _, s := range p.seats {
		fenced += s.core.Stats().FencedOut.Load() + s.core.Stats().Lost.Load()
	}
	t.Logf("%d asked in %s: %d began, %d joined; %d flushes, %d pauses, %d writes fenced out or attempts lost",
		total, took.Round(time.Millisecond), started.Load(), joinedOps.Load(), flushes.Load(), pauses.Load(), fenced)
}
