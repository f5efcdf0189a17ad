package lease_test

import (
	"context"
	"sync"
	"testing"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// notedEnv has the fields of Env that a step got for an attempt.
type notedEnv struct {
	step, key string
	attempt   int
	opSeq     int64
}

// recordingSteps returns steps that sagatest.Record their Env. The step called last waits when it is called first.
func recordingSteps(list *[]notedEnv, mu *sync.Mutex, names ...string) []saga.Step {
	steps := sagatest.PureSteps(names...)
	for i := range steps {
		name := steps[i].Name
		steps[i].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
			mu.Lock()
			defer mu.Unlock()
			*list = append(*list, notedEnv{name, env.IdempotencyKey, env.Attempt, env.OpSeq})
			return saga.Done(nil), nil
		}
	}
	return steps
}

// earlierLease leases a run as builds without ranges did, for a lease of zero length: the fence is raised, the
// workspace's next number is drawn, and the attempt has a row from its beginning.
func (b *bed) earlierLease(id, ws string, step int, name string, attempt int) {
	b.T.Helper()
	b.Exec(`UPDATE lifecycle.saga_run
		SET owner = 'earlier', fence = fence + 1, lease_until = mesh.clock(), next_at = mesh.clock(), state = 'running',
		step = $2,
		why_waiting = 'doing the step', version = version + 1 WHERE id = $1`, id, step)
	b.Exec(`UPDATE lifecycle.workspace SET op_seq = op_seq + 1 WHERE id = $1`, ws)
	b.Exec(`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq,
		state, idem_key, stall_after)
		SELECT r.id, r.step, $3, 'do', $4, w.id, r.tenant_id, r.fence, w.op_seq, 'running', r.id || '/' || $3 || '/do',
			'5 min'
		FROM lifecycle.saga_run r JOIN lifecycle.workspace w ON w.id = r.workspace_id
			WHERE r.id = $1 AND w.id = $2`, id, ws, name, attempt)
}

// earlierClose ends the open attempt as those builds did.
func (b *bed) earlierClose(id, state string) {
	b.T.Helper()
	b.Exec(`UPDATE lifecycle.saga_step SET state = $2, outcome = $2, finished_at = CASE WHEN $2 <> 'waiting'
		THEN mesh.clock() END, version = version + 1
		WHERE run_id = $1 AND state = 'running'`, id, state)
}

// TestARunPassesBetweenBuilds checks that attempts, operation numbers and idempotency keys stay right when a run is
// driven by a build without ranges of numbers and open attempts in runs' rows, before this build, after it, or both.
func TestARunPassesBetweenBuilds(t *testing.T) {
	testkit.IO(t)
	for _, tc := range []struct {
		what   string
		ranges bool // this build has begun the run, and its driver has died in the step "two", at its third attempt
		leave  func(b *bed, id, ws string)
		want   []notedEnv // what the steps get, apart from the numbers
		drawn  int64      // the highest number that was drawn before
	}{
		{"begun before, lost in a step", false, func(b *bed, id, ws string) {
			b.earlierLease(id, ws, 0, "one", 1)
			b.earlierClose(id, "succeeded")
			b.earlierLease(id, ws, 1, "two", 1)
		}, []notedEnv{{step: "two", attempt: 2}, {step: "three", attempt: 1}}, 2},
		{"begun before, parked", false, func(b *bed, id, ws string) {
			b.earlierLease(id, ws, 0, "one", 1)
			b.earlierClose(id, "waiting")
			b.Exec(`UPDATE lifecycle.saga_run SET state = 'waiting', owner = NULL, lease_until = NULL WHERE id = $1`, id)
		}, []notedEnv{{step: "one", attempt: 1, opSeq: 1}, {step: "two", attempt: 1}, {step: "three", attempt: 1}}, 1},
		{"begun here, driven on before, lost in the same step", true, func(b *bed, id, ws string) {
			b.earlierLease(id, ws, 1, "two", 3)
		}, []notedEnv{{step: "two", attempt: 4}, {step: "three", attempt: 1}}, 65},
		{"begun here, driven on before, lost in the next step", true, func(b *bed, id, ws string) {
			b.earlierLease(id, ws, 1, "two", 3)
			b.earlierClose(id, "succeeded")
			b.earlierLease(id, ws, 2, "three", 1)
		}, []notedEnv{{step: "three", attempt: 2}}, 66},
		{"begun here, parked before", true, func(b *bed, id, ws string) {
			b.earlierLease(id, ws, 1, "two", 3)
			b.earlierClose(id, "waiting")
			b.Exec(`UPDATE lifecycle.saga_run SET state = 'waiting', owner = NULL, lease_until = NULL WHERE id = $1`, id)
		}, []notedEnv{{step: "two", attempt: 3, opSeq: 65}, {step: "three", attempt: 1}}, 65},
	} {
		t.Run(tc.what, func(t *testing.T) {
			var mu sync.Mutex
			var list []notedEnv
			b := newBed(t, saga.Definition{
				Name: "toy", Version: 1, Steps: recordingSteps(&list, &mu, "one", "two", "three"),
				States: sagatest.States(),
			})
			ws, id := b.Create("toy")
			if tc.ranges {
				// Attempts 1 and 2 at "two" have failed, and the third is open in the run's row.
				b.Exec(`UPDATE lifecycle.saga_run
					SET owner = 'dead', fence = 1, lease_until = mesh.clock(), next_at = mesh.clock(), state = 'running', step = 1,
					why_waiting = 'doing the step', op_seq = 4, open_attempt = 3, open_since = mesh.clock() WHERE id = $1`, id)
				b.Exec(`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq,
					state, idem_key, stall_after)
					SELECT $1, x.step, x.name, 'do', x.attempt, $2, $3, 1, x.op_seq, x.state, '', '5 min'
					FROM (VALUES (0, 'one', 1, 1, 'succeeded'), (1, 'two', 1, 2, 'failed'), (1, 'two', 2, 3, 'failed')) AS x (step,
						name, attempt, op_seq, state)`,
					id, ws, b.Tenant)
			} else {
				// as the migration fills the columns
				b.Exec(`UPDATE lifecycle.saga_run SET op_seq = 0, op_last = 0 WHERE id = $1`, id)
				b.Exec(`UPDATE lifecycle.workspace SET op_seq = 0 WHERE id = $1`, ws)
			}
			tc.leave(b, id, ws)
			if drawn := b.Workspace(ws).OpSeq; drawn != tc.drawn {
				t.Fatalf("%d numbers are drawn, not %d", drawn, tc.drawn)
			}
			b.Drive(b.Config("now"))
			b.Await(id, testkit.Patience, "succeeded")
			mu.Lock()
			defer mu.Unlock()
			last := tc.drawn
			for i, got := range list {
				if i >= len(tc.want) {
					t.Fatalf("steps were told %+v", list)
				}
				want := tc.want[i]
				want.key = id + "/" + want.step + "/do"
				switch {
				case want.opSeq == 0 && got.opSeq <= last:
					t.Errorf("%q is told the number %d, and %d was given away before", got.step, got.opSeq, last)
				case want.opSeq == 0:
					want.opSeq = got.opSeq
				}
				last = max(last, got.opSeq)
				if got != want {
					t.Errorf("a step was told %+v, not %+v", got, want)
				}
			}
			if len(list) != len(tc.want) {
				t.Errorf("steps were told %+v", list)
			}
			seen := map[int64]bool{}
			for _, a := range b.Timeline(id) {
				if seen[a.OpSeq] || a.OpSeq < 1 || a.OpSeq > b.Workspace(ws).OpSeq || a.IdemKey != id+"/"+a.Name+"/do" {
					t.Errorf("attempt %d of %q has number %d and key %s", a.Attempt, a.Name, a.OpSeq, a.IdemKey)
				}
				seen[a.OpSeq] = true
			}
		})
	}
}
