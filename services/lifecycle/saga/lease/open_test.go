package lease_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// rowsOpen counts the rows of open attempts of a run.
func (b *bed) rowsOpen(id string) int {
	b.T.Helper()
	var n int
	err := b.DB.Pool(pg.RoleLifecycle).QueryRow(testkit.Context(b.T),
		`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND state IN ('running', 'waiting')`, id).Scan(&n)
	if err != nil {
		b.T.Fatal(err)
	}
	return n
}

// TestAnAttemptIsWrittenOnce checks that a step that ends by itself costs one row of its own and none of its workspace,
// and that its attempt is in the timeline while it has no row.
func TestAnAttemptIsWrittenOnce(t *testing.T) {
	testkit.IO(t)
	began, goOn := make(chan struct{}), make(chan struct{})
	steps := sagatest.PureSteps("one", "two", "three", "four")
	steps[2].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		close(began)
		<-goOn
		return saga.Done(map[string]int{"answer": 42}), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	cfg := b.Config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, 20*time.Minute
	ws, id := b.Create("toy")
	first := b.Workspace(ws)
	b.Drive(cfg)
	<-began
	if n := b.rowsOpen(id); n != 0 {
		t.Errorf("the attempt under way has %d rows", n)
	}
	list := b.Timeline(id)
	if len(list) != 3 || list[2].State != "running" || list[2].Name != "three" || list[2].Attempt != 1 ||
		list[2].StartedAt.Before(list[1].StartedAt) {
		t.Errorf("timeline = %+v", list)
	}
	if w := b.Workspace(ws); w.OpSeq != first.OpSeq || w.Version != first.Version {
		t.Errorf("two steps changed their workspace: op_seq from %d to %d, version from %d to %d", first.OpSeq, w.OpSeq,
			first.Version, w.Version)
	}
	close(goOn)
	b.Await(id, testkit.Patience, "succeeded")
	b.numbered(ws, b.Timeline(id), 4)
	list = b.Timeline(id)
	if string(list[2].Output) != `{"answer": 42}` {
		t.Errorf("output = %s", list[2].Output)
	}
	for _, a := range list {
		if a.IdemKey != id+"/"+a.Name+"/do" {
			t.Errorf("the key of %q is %q", a.Name, a.IdemKey)
		}
	}
	var n int
	if err := b.DB.Pool(pg.RoleLifecycle).QueryRow(t.Context(),
		`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND idem_key <> ''`, id).
		Scan(&n); err != nil || n != 0 {
		t.Errorf("%d attempts that have ended keep a key that is made of their columns", n)
	}
	if err := b.Announced(id); err != nil {
		t.Error(err)
	}
}

// numbered checks that the attempts have rising numbers, and none above what their workspace has drawn.
func (b *bed) numbered(ws string, list []runs.Attempt, want int) {
	b.T.Helper()
	drawn := b.Workspace(ws).OpSeq
	for i, a := range list {
		if a.OpSeq > drawn || a.OpSeq < 1 || i > 0 && a.OpSeq <= list[i-1].OpSeq {
			b.T.Errorf("attempt %d of step %q has number %d; its workspace has drawn %d, and the attempt before has "+
				"another: %+v", a.Attempt, a.Name, a.OpSeq, drawn, list)
		}
	}
	if len(list) != want {
		b.T.Errorf("%d attempts, not %d", len(list), want)
	}
}

// TestARangeOfNumbersIsReplaced checks that a run whose range is used up, or older than the era, goes on above
// everything that was drawn.
func TestARangeOfNumbersIsReplaced(t *testing.T) {
	testkit.IO(t)
	const firstOfEra = 1 << 40
	for _, tc := range []struct {
		what string
		do   func(b *bed, env *saga.Env) error
		want func(before, after runs.Attempt) bool
	}{
		{"used up", func(b *bed, env *saga.Env) error {
			_, err := b.DB.Pool(pg.RoleLifecycle).Exec(testkit.Context(b.T),
				`UPDATE lifecycle.saga_run SET op_last = op_seq WHERE id = $1`, env.RunID)
			return err
		}, func(before, after runs.Attempt) bool { return after.OpSeq > before.OpSeq+10 }},
		{"of a former era", func(b *bed, _ *saga.Env) error {
			_, err := testkit.RaiseEra(testkit.Context(b.T), b.DB.OwnerPool(), "test")
			return err
		}, func(_, after runs.Attempt) bool { return after.OpSeq >= firstOfEra }},
	} {
		t.Run(tc.what, func(t *testing.T) {
			var b *bed
			steps := sagatest.PureSteps("one", "two", "three")
			steps[1].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) { return saga.Done(nil), tc.do(b, env) }
			var notified atomic.Int64
			steps[2].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
				notified.Store(env.OpSeq)
				return saga.Done(nil), nil
			}
			b = newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
			b.Drive(b.Config("a"))
			ws, id := b.Create("toy")
			b.Await(id, testkit.Patience, "succeeded")
			list := b.Timeline(id)
			b.numbered(ws, list, 3)
			if !tc.want(list[1], list[2]) || notified.Load() != list[2].OpSeq {
				t.Errorf("after %d comes %d, and its step was told %d", list[1].OpSeq, list[2].OpSeq, notified.Load())
			}
			if err := b.Announced(id); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAnOpenAttemptOutlivesItsDriver checks that the next lease closes an attempt that is only in its run's row as
// lost, with the values with which it was opened.
func TestAnOpenAttemptOutlivesItsDriver(t *testing.T) {
	testkit.IO(t)
	began, end := make(chan struct{}), make(chan struct{})
	var calls atomic.Int32
	steps := sagatest.PureSteps("one", "two", "three")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) == 1 {
			close(began)
			<-end
		}
		return saga.Done(nil), nil
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
	b := newBed(t, def)
	cfg := b.Config("dead")
	// Its one worker is busy when the run becomes due for any driver.
	cfg.Heartbeat, cfg.Lease, cfg.Workers = time.Minute, 3*time.Minute, 1
	b.Drive(cfg)
	ws, id := b.Create("toy")
	<-began
	open := b.Timeline(id)[1]
	if n := b.rowsOpen(id); n != 0 {
		t.Errorf("the attempt under way has %d rows", n)
	}
	testkit.SetClockOffset(b.DB, 4*time.Minute)
	o := &bed{b.Second(def)}
	o.Drive(o.Config("alive"))
	o.Await(id, testkit.Patience, "succeeded")
	close(end)
	list := o.Timeline(id)
	o.numbered(ws, list, 4)
	lost := list[1]
	if lost.State != "lost" || lost.Error == "" || lost.FinishedAt == nil || lost.Fence != open.Fence ||
		lost.OpSeq != open.OpSeq ||
		!lost.StartedAt.Equal(open.StartedAt) || lost.IdemKey != open.IdemKey || lost.Attempt != 1 {
		t.Errorf("what was open as\n%+v\nwas closed as\n%+v", open, lost)
	}
	if next := list[2]; next.Attempt != 2 || next.Name != "two" || next.Fence <= lost.Fence || next.OpSeq <= lost.OpSeq {
		t.Errorf("the next attempt is %+v", next)
	}
	if n := o.Core.Stats().Lost.Load(); n != 1 {
		t.Errorf("%d attempts count as lost", n)
	}
	if err := o.Announced(id); err != nil {
		t.Error(err)
	}
}

// TestAnOpenAttemptIsShown checks that heartbeats, progress texts and the flag of a stall are kept with an attempt
// that had no row, and that the events of the driver's next write have what others wrote to the run and its attempt.
func TestAnOpenAttemptIsShown(t *testing.T) {
	testkit.IO(t)
	goOn := make(chan struct{})
	parked := make(chan struct{})
	var calls atomic.Int32
	steps := sagatest.PureSteps("zero", "one", "two", "three")
	steps[1].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		return saga.Done(nil), env.Progress(ctx, "half")
	}
	steps[2].StallAfter = time.Minute
	steps[2].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) == 1 {
			<-goOn
			return saga.Wait(saga.WaitFor{For: time.Hour, Why: "it looks again", WakeOnSignal: true}), nil
		}
		close(parked)
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), StallAfter: 10 * time.Hour,
	})
	cfg := b.Config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, 20*time.Minute
	b.Drive(cfg)
	ws, id := b.Create("toy")
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.Run(id); r.Step != 2 {
			return fmt.Errorf("run is at step %d", r.Step)
		}
		return nil
	})
	if list := b.Timeline(id); list[1].Progress != "half" || list[1].ProgressAt == nil {
		t.Errorf("progress = %+v", list[1])
	}
	testkit.SetClockOffset(b.DB, 61*time.Second)
	testkit.Eventually(t, testkit.Patience, func() error {
		if list := b.Timeline(id); len(list) != 3 || !list[2].Stalled {
			return fmt.Errorf("timeline = %+v", list)
		}
		return nil
	})
	if n := b.rowsOpen(id); n != 1 {
		t.Errorf("the attempt that stalls has %d rows", n)
	}
	close(goOn)
	b.Await(id, testkit.Patience, "waiting")
	if err := b.Announced(id); err != nil {
		t.Error(err)
	}
	if a := b.Timeline(id)[2]; a.State != "waiting" || a.DeadlineAt == nil || !a.Stalled {
		t.Errorf("parked = %+v", a)
	}
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, id) }); err != nil {
		t.Fatal(err)
	}
	<-parked
	b.Await(id, testkit.Patience, "succeeded")
	b.numbered(ws, b.Timeline(id), 4)
	if err := b.Announced(id); err != nil {
		t.Error(err)
	}
}

// TestHeartbeatsOfAnOpenAttempt checks that a heartbeat is kept with an attempt that had no row, and closes nothing.
func TestHeartbeatsOfAnOpenAttempt(t *testing.T) {
	testkit.IO(t)
	goOn := make(chan struct{})
	steps := sagatest.PureSteps("one", "two")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		<-goOn
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	cfg := b.Config("a")
	cfg.Lease = 10 * time.Minute // a heartbeat that takes longer than one more is cut off
	b.Drive(cfg)
	_, id := b.Create("toy")
	testkit.Eventually(t, testkit.Patience, func() error {
		if list := b.Timeline(id); len(list) != 2 || list[1].HeartbeatAt == nil {
			return fmt.Errorf("timeline = %+v", list)
		}
		return nil
	})
	close(goOn)
	b.Await(id, testkit.Patience, "succeeded")
	if list := b.Timeline(id); len(list) != 2 || list[1].State != "succeeded" {
		t.Errorf("timeline = %+v", list)
	}
	if err := b.Announced(id); err != nil {
		t.Error(err)
	}
}

// TestRowsOfEarlierBuildsGoOn checks that attempts that an earlier build opened, each with a row from its beginning and
// none in the run's, are closed as lost or resumed, and that a run without a range of numbers draws one above what its
// workspace has used.
func TestRowsOfEarlierBuildsGoOn(t *testing.T) {
	testkit.IO(t)
	for _, tc := range []struct {
		run, attempt string
		want         []string
	}{
		{"running", "running", []string{"succeeded 1", "lost 1", "succeeded 2", "succeeded 1"}},
		{"waiting", "waiting", []string{"succeeded 1", "succeeded 1", "succeeded 1"}},
	} {
		t.Run(tc.attempt, func(t *testing.T) {
			b := newBed(t, saga.Definition{
				Name: "toy", Version: 1, Steps: sagatest.PureSteps("one", "two", "three"), States: sagatest.States(),
			})
			ws, id := b.Create("toy")
			b.Exec(`UPDATE lifecycle.workspace SET op_seq = 7 WHERE id = $1`, ws)
			b.Exec(`UPDATE lifecycle.saga_run SET state = $2, step = 1, fence = 3, owner = CASE WHEN $2 = 'running' THEN 'gone'
				END,
				lease_until = CASE WHEN $2 = 'running' THEN mesh.clock() END, op_seq = 0, op_last = 0 WHERE id = $1`, id, tc.run)
			b.Exec(`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq,
				state, idem_key, stall_after, finished_at)
				VALUES ($1, 0, 'one', 'do', 1, $2, $3, 3, 6, 'succeeded', '/one/do', '5 min', mesh.clock()),
					($1, 1, 'two', 'do', 1, $2, $3, 3, 7, $4, '/two/do', '5 min', NULL)`, id, ws, b.Tenant, tc.attempt)
			b.Drive(b.Config("a"))
			b.Await(id, testkit.Patience, "succeeded")
			list := b.Timeline(id)
			var got []string
			for _, a := range list {
				got = append(got, fmt.Sprintf("%s %d", a.State, a.Attempt))
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("timeline = %v, not %v", got, tc.want)
			}
			b.numbered(ws, list, len(tc.want))
		})
	}
}

// TestAnUnreadableRunKeepsItsOpenAttempt checks that a run that is put aside keeps what its last driver had open, as
// lost, with its event.
func TestAnUnreadableRunKeepsItsOpenAttempt(t *testing.T) {
	testkit.IO(t)
	began, end := make(chan struct{}), make(chan struct{})
	steps := sagatest.PureSteps("one", "two")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		close(began)
		<-end
		return saga.Outcome{}, errors.New("this is not read")
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
	b := newBed(t, def)
	cfg := b.Config("dead")
	// Its one worker is busy when the run becomes due for any driver.
	cfg.Heartbeat, cfg.Lease, cfg.Workers = time.Minute, 3*time.Minute, 1
	b.Drive(cfg)
	_, id := b.Create("toy")
	<-began
	defer close(end)
	other := def
	other.Steps = sagatest.PureSteps("one", "renamed")
	testkit.SetClockOffset(b.DB, 4*time.Minute)
	o := &bed{b.Second(other)}
	o.Drive(o.Config("alive"))
	o.Await(id, testkit.Patience, "stuck")
	list := o.Timeline(id)
	if len(list) != 2 || list[1].State != "lost" || list[1].Name != "two" || list[1].FinishedAt == nil ||
		o.rowsOpen(id) != 0 {
		t.Errorf("%d rows are open; timeline = %+v", o.rowsOpen(id), list)
	}
	if r := o.Run(id); r.OpenAttempt != 0 {
		t.Errorf("a run that is put aside has attempt %d open", r.OpenAttempt)
	}
	if err := o.Announced(id); err != nil {
		t.Error(err)
	}
}

// TestOpenAttemptsMigrate checks that the attempt which a run has open gets its row when the database goes back to the
// build before, and that what that build has open is closed as lost or goes on after the migration.
func TestOpenAttemptsMigrate(t *testing.T) {
	testkit.IO(t)
	began, end := make(chan struct{}), make(chan struct{})
	var calls atomic.Int32
	steps := sagatest.PureSteps("one", "two", "three")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) == 1 {
			close(began)
			<-end
		}
		return saga.Done(nil), nil
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()}
	b := newBed(t, def)
	cfg := b.Config("dead")
	cfg.Heartbeat, cfg.Lease, cfg.Poll, cfg.StallSweep, cfg.Workers = 5*time.Minute, 15*time.Minute, time.Hour, time.Hour,
		1
	b.Drive(cfg)
	ws, id := b.Create("toy")
	<-began
	defer close(end)
	open := b.Timeline(id)[1]
	file, err := migrations.FS.ReadFile("00103_lifecycle_open_attempt.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(file), "-- +goose Down")
	for _, sql := range []string{down, up} {
		if _, err := b.DB.OwnerPool().Exec(testkit.Context(t), sql); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.rowsOpen(id); n != 1 {
		t.Errorf("%d rows are open", n)
	}
	testkit.SetClockOffset(b.DB, 20*time.Minute)
	o := &bed{b.Second(def)}
	o.Drive(o.Config("alive"))
	o.Await(id, testkit.Patience, "succeeded")
	list := o.Timeline(id)
	o.numbered(ws, list, 4)
	if lost := list[1]; lost.State != "lost" || lost.OpSeq != open.OpSeq || lost.Fence != open.Fence ||
		!lost.StartedAt.Equal(open.StartedAt) ||
		list[2].Attempt != 2 || list[2].State != "succeeded" {
		t.Errorf("timeline = %+v", list)
	}
}
