package saga_test

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
	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// rowsOpen counts the rows of open attempts of a run.
func (b *bed) rowsOpen(id string) int {
	b.t.Helper()
	var n int
	err := b.db.Pool(pg.RoleLifecycle).QueryRow(testkit.Context(b.t),
		`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND state IN ('running', 'waiting')`, id).Scan(&n)
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// announced returns an error unless the newest event of a run is its row, and those of its attempts are theirs.
func (b *bed) announced(id string) error {
	ctx := testkit.Context(b.t)
	run, err := runs.Get(ctx, b.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		return err
	}
	timeline, err := runs.Timeline(ctx, b.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		return err
	}
	rows, err := b.db.Pool(pg.RoleLifecycle).Query(ctx,
		`SELECT kind, body, body_type, correlation_id, tenant_id, workspace_id, workflow_id FROM `+testkit.EventRows+
			` WHERE workflow_id = $1 AND kind IN ('run.changed', 'step.changed') ORDER BY seq`, id)
	if err != nil {
		return err
	}
	last, attempts := &lifecyclev1.Run{}, map[string]*lifecyclev1.StepAttempt{}
	note := func(a *lifecyclev1.StepAttempt) {
		key := fmt.Sprint(a.GetStep(), a.GetDirection(), a.GetAttempt())
		if before := attempts[key]; before == nil || before.GetVersion() < a.GetVersion() {
			attempts[key] = a
		}
	}
	var r events.Record
	var correlation *string // none of a step alone
	if _, err := pgx.ForEachRow(rows,
		[]any{&r.Kind, &r.Body, &r.BodyType, &correlation, &r.TenantID, &r.WorkspaceID, &r.WorkflowID}, func() error {
			r.CorrelationID = ""
			if correlation != nil {
				r.CorrelationID = *correlation
			}
			if r.Kind == "step.changed" {
				a := &lifecyclev1.StepAttempt{}
				if err := r.Decode(a); err != nil {
					return err
				}
				note(a)
				return nil
			}
			seen := &lifecyclev1.Run{}
			if err := r.Decode(seen); err != nil {
				return err
			}
			for _, a := range seen.GetChangedSteps() {
				note(a)
			}
			if seen.GetVersion() >= last.GetVersion() {
				last = seen
			}
			return nil
		}); err != nil {
		return err
	}
	want := run.Proto()
	for _, p := range []*lifecyclev1.Run{want, last} {
		p.NextAt, p.HeartbeatAt, p.ChangedSteps = nil, nil, nil // these change without an event
	}
	if !proto.Equal(want, last) {
		return fmt.Errorf("the row is\n%v\nand its event\n%v", want, last)
	}
	for i := range timeline {
		a := timeline[i].Proto()
		key := fmt.Sprint(a.GetStep(), a.GetDirection(), a.GetAttempt())
		if got := attempts[key]; !proto.Equal(a, got) {
			return fmt.Errorf("the attempt is\n%v\nand its event\n%v", a, got)
		}
	}
	return nil
}

// TestAnAttemptIsWrittenOnce holds that a step that ends by itself costs one row of its own and none of its workspace,
// and that its attempt is in the timeline while it has no row.
func TestAnAttemptIsWrittenOnce(t *testing.T) {
	testkit.IO(t)
	began, goOn := make(chan struct{}), make(chan struct{})
	steps := pureSteps("one", "two", "three", "four")
	steps[2].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		close(began)
		<-goOn
		return saga.Done(map[string]int{"answer": 42}), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()})
	cfg := b.config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, 20*time.Minute
	ws, id := b.create("toy")
	first := b.workspace(ws)
	b.drive(cfg)
	<-began
	if n := b.rowsOpen(id); n != 0 {
		t.Errorf("the attempt under way has %d rows", n)
	}
	list := b.timeline(id)
	if len(list) != 3 || list[2].State != "running" || list[2].Name != "three" || list[2].Attempt != 1 ||
		list[2].StartedAt.Before(list[1].StartedAt) {
		t.Errorf("timeline = %+v", list)
	}
	if w := b.workspace(ws); w.OpSeq != first.OpSeq || w.Version != first.Version {
		t.Errorf("two steps changed their workspace: op_seq from %d to %d, version from %d to %d", first.OpSeq, w.OpSeq,
			first.Version, w.Version)
	}
	close(goOn)
	b.await(id, 5*time.Second, "succeeded")
	b.numbered(ws, b.timeline(id), 4)
	list = b.timeline(id)
	if string(list[2].Output) != `{"answer": 42}` {
		t.Errorf("output = %s", list[2].Output)
	}
	for _, a := range list {
		if a.IdemKey != id+"/"+a.Name+"/do" {
			t.Errorf("the key of %q is %q", a.Name, a.IdemKey)
		}
	}
	var n int
	if err := b.db.Pool(pg.RoleLifecycle).QueryRow(t.Context(),
		`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND idem_key <> ''`, id).
		Scan(&n); err != nil || n != 0 {
		t.Errorf("%d attempts that have ended keep a key that is made of their columns", n)
	}
	if err := b.announced(id); err != nil {
		t.Error(err)
	}
}

// numbered checks that the attempts have rising numbers, and none above what their workspace has drawn.
func (b *bed) numbered(ws string, list []runs.Attempt, want int) {
	b.t.Helper()
	drawn := b.workspace(ws).OpSeq
	for i, a := range list {
		if a.OpSeq > drawn || a.OpSeq < 1 || i > 0 && a.OpSeq <= list[i-1].OpSeq {
			b.t.Errorf("attempt %d of step %q has number %d; its workspace has drawn %d, and the attempt before has "+
				"another: %+v", a.Attempt, a.Name, a.OpSeq, drawn, list)
		}
	}
	if len(list) != want {
		b.t.Errorf("%d attempts, not %d", len(list), want)
	}
}

// TestARangeOfNumbersIsReplaced holds that a run whose range is used up, or older than the era, goes on above
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
			_, err := b.db.Pool(pg.RoleLifecycle).Exec(testkit.Context(b.t),
				`UPDATE lifecycle.saga_run SET op_last = op_seq WHERE id = $1`, env.RunID)
			return err
		}, func(before, after runs.Attempt) bool { return after.OpSeq > before.OpSeq+10 }},
		{"of a former era", func(b *bed, _ *saga.Env) error {
			_, err := pg.RaiseEra(testkit.Context(b.t), b.db.OwnerPool(), "test")
			return err
		}, func(_, after runs.Attempt) bool { return after.OpSeq >= firstOfEra }},
	} {
		t.Run(tc.what, func(t *testing.T) {
			var b *bed
			steps := pureSteps("one", "two", "three")
			steps[1].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) { return saga.Done(nil), tc.do(b, env) }
			var told atomic.Int64
			steps[2].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
				told.Store(env.OpSeq)
				return saga.Done(nil), nil
			}
			b = newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()})
			b.drive(b.config("a"))
			ws, id := b.create("toy")
			b.await(id, 5*time.Second, "succeeded")
			list := b.timeline(id)
			b.numbered(ws, list, 3)
			if !tc.want(list[1], list[2]) || told.Load() != list[2].OpSeq {
				t.Errorf("after %d comes %d, and its step was told %d", list[1].OpSeq, list[2].OpSeq, told.Load())
			}
			if err := b.announced(id); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAnOpenAttemptOutlivesItsDriver holds that the next lease closes an attempt that is only in its run's row as lost,
// with the values with which it was opened.
func TestAnOpenAttemptOutlivesItsDriver(t *testing.T) {
	testkit.IO(t)
	began, end := make(chan struct{}), make(chan struct{})
	var calls atomic.Int32
	steps := pureSteps("one", "two", "three")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) == 1 {
			close(began)
			<-end
		}
		return saga.Done(nil), nil
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()}
	b := newBed(t, def)
	cfg := b.config("dead")
	// Its one worker is busy when the run becomes due for any driver.
	cfg.Heartbeat, cfg.Lease, cfg.Workers = time.Minute, 3*time.Minute, 1
	b.drive(cfg)
	ws, id := b.create("toy")
	<-began
	open := b.timeline(id)[1]
	if n := b.rowsOpen(id); n != 0 {
		t.Errorf("the attempt under way has %d rows", n)
	}
	testkit.SetClockOffset(b.db, 4*time.Minute)
	o := b.second(def)
	o.drive(o.config("alive"))
	o.await(id, 10*time.Second, "succeeded")
	close(end)
	list := o.timeline(id)
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
	if n := o.core.Stats().Lost.Load(); n != 1 {
		t.Errorf("%d attempts count as lost", n)
	}
	if err := o.announced(id); err != nil {
		t.Error(err)
	}
}

// TestAnOpenAttemptTellsOfItself holds that heartbeats, progress texts and the flag of a stall are kept with an attempt
// that had no row, and that the events of the driver's next write have what others wrote to the run and its attempt.
func TestAnOpenAttemptTellsOfItself(t *testing.T) {
	testkit.IO(t)
	goOn := make(chan struct{})
	parked := make(chan struct{})
	var looks atomic.Int32
	steps := pureSteps("zero", "one", "two", "three")
	steps[1].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		return saga.Done(nil), env.Progress(ctx, "half")
	}
	steps[2].StallAfter = time.Minute
	steps[2].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if looks.Add(1) == 1 {
			<-goOn
			return saga.Wait(saga.WaitFor{For: time.Hour, Why: "it looks again", WakeOnSignal: true}), nil
		}
		close(parked)
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states(), StallAfter: 10 * time.Hour})
	cfg := b.config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, 20*time.Minute
	b.drive(cfg)
	ws, id := b.create("toy")
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.run(id); r.Step != 2 {
			return fmt.Errorf("run is at step %d", r.Step)
		}
		return nil
	})
	if list := b.timeline(id); list[1].Progress != "half" || list[1].ProgressAt == nil {
		t.Errorf("progress = %+v", list[1])
	}
	testkit.SetClockOffset(b.db, 61*time.Second)
	testkit.Eventually(t, testkit.Patience, func() error {
		if list := b.timeline(id); len(list) != 3 || !list[2].Stalled {
			return fmt.Errorf("timeline = %+v", list)
		}
		return nil
	})
	if n := b.rowsOpen(id); n != 1 {
		t.Errorf("the attempt that stalls has %d rows", n)
	}
	close(goOn)
	b.await(id, 5*time.Second, "waiting")
	if err := b.announced(id); err != nil {
		t.Error(err)
	}
	if a := b.timeline(id)[2]; a.State != "waiting" || a.DeadlineAt == nil || !a.Stalled {
		t.Errorf("parked = %+v", a)
	}
	if err := b.tx(func(ctx context.Context, tx pgx.Tx) error { return b.core.Wake(ctx, tx, id) }); err != nil {
		t.Fatal(err)
	}
	<-parked
	b.await(id, 5*time.Second, "succeeded")
	b.numbered(ws, b.timeline(id), 4)
	if err := b.announced(id); err != nil {
		t.Error(err)
	}
}

// TestHeartbeatsOfAnOpenAttempt holds that a heartbeat is kept with an attempt that had no row, and closes nothing.
func TestHeartbeatsOfAnOpenAttempt(t *testing.T) {
	testkit.IO(t)
	goOn := make(chan struct{})
	steps := pureSteps("one", "two")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		<-goOn
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()})
	cfg := b.config("a")
	cfg.Lease = 10 * time.Minute // a heartbeat that takes longer than one more is cut off
	b.drive(cfg)
	_, id := b.create("toy")
	testkit.Eventually(t, testkit.Patience, func() error {
		if list := b.timeline(id); len(list) != 2 || list[1].HeartbeatAt == nil {
			return fmt.Errorf("timeline = %+v", list)
		}
		return nil
	})
	close(goOn)
	b.await(id, 5*time.Second, "succeeded")
	if list := b.timeline(id); len(list) != 2 || list[1].State != "succeeded" {
		t.Errorf("timeline = %+v", list)
	}
	if err := b.announced(id); err != nil {
		t.Error(err)
	}
}

// TestRowsOfEarlierBuildsGoOn holds that attempts that an earlier build opened, each with a row from its beginning and
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
			b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: pureSteps("one", "two", "three"), States: states()})
			ws, id := b.create("toy")
			b.exec(`UPDATE lifecycle.workspace SET op_seq = 7 WHERE id = $1`, ws)
			b.exec(`UPDATE lifecycle.saga_run SET state = $2, step = 1, fence = 3, owner = CASE WHEN $2 = 'running' THEN 'gone'
				END,
				lease_until = CASE WHEN $2 = 'running' THEN mesh.clock() END, op_seq = 0, op_last = 0 WHERE id = $1`, id, tc.run)
			b.exec(`INSERT INTO lifecycle.saga_step (run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq,
				state, idem_key, stall_after, finished_at)
				VALUES ($1, 0, 'one', 'do', 1, $2, $3, 3, 6, 'succeeded', '/one/do', '5 min', mesh.clock()),
					($1, 1, 'two', 'do', 1, $2, $3, 3, 7, $4, '/two/do', '5 min', NULL)`, id, ws, b.tenant, tc.attempt)
			b.drive(b.config("a"))
			b.await(id, 5*time.Second, "succeeded")
			list := b.timeline(id)
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

// TestAnUnreadableRunKeepsItsOpenAttempt holds that a run that is put aside keeps what its last driver had open, as
// lost, with its event.
func TestAnUnreadableRunKeepsItsOpenAttempt(t *testing.T) {
	testkit.IO(t)
	began, end := make(chan struct{}), make(chan struct{})
	steps := pureSteps("one", "two")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		close(began)
		<-end
		return saga.Outcome{}, errors.New("nobody reads this")
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()}
	b := newBed(t, def)
	cfg := b.config("dead")
	// Its one worker is busy when the run becomes due for any driver.
	cfg.Heartbeat, cfg.Lease, cfg.Workers = time.Minute, 3*time.Minute, 1
	b.drive(cfg)
	_, id := b.create("toy")
	<-began
	defer close(end)
	other := def
	other.Steps = pureSteps("one", "renamed")
	testkit.SetClockOffset(b.db, 4*time.Minute)
	o := b.second(other)
	o.drive(o.config("alive"))
	o.await(id, 10*time.Second, "stuck")
	list := o.timeline(id)
	if len(list) != 2 || list[1].State != "lost" || list[1].Name != "two" || list[1].FinishedAt == nil ||
		o.rowsOpen(id) != 0 {
		t.Errorf("%d rows are open; timeline = %+v", o.rowsOpen(id), list)
	}
	if r := o.run(id); r.OpenAttempt != 0 {
		t.Errorf("a run that is put aside has attempt %d open", r.OpenAttempt)
	}
	if err := o.announced(id); err != nil {
		t.Error(err)
	}
}

// TestOpenAttemptsMigrate holds that the attempt which a run has open gets its row when the database goes back to the
// build before, and that what that build has open is closed as lost or goes on after the migration.
func TestOpenAttemptsMigrate(t *testing.T) {
	testkit.IO(t)
	began, end := make(chan struct{}), make(chan struct{})
	var calls atomic.Int32
	steps := pureSteps("one", "two", "three")
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) == 1 {
			close(began)
			<-end
		}
		return saga.Done(nil), nil
	}
	def := saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states()}
	b := newBed(t, def)
	cfg := b.config("dead")
	cfg.Heartbeat, cfg.Lease, cfg.Poll, cfg.StallSweep, cfg.Workers = 5*time.Minute, 15*time.Minute, time.Hour, time.Hour,
		1
	b.drive(cfg)
	ws, id := b.create("toy")
	<-began
	defer close(end)
	open := b.timeline(id)[1]
	file, err := migrations.FS.ReadFile("00103_lifecycle_open_attempt.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(file), "-- +goose Down")
	for _, sql := range []string{down, up} {
		if _, err := b.db.OwnerPool().Exec(testkit.Context(t), sql); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.rowsOpen(id); n != 1 {
		t.Errorf("%d rows are open", n)
	}
	testkit.SetClockOffset(b.db, 20*time.Minute)
	o := b.second(def)
	o.drive(o.config("alive"))
	o.await(id, 10*time.Second, "succeeded")
	list := o.timeline(id)
	o.numbered(ws, list, 4)
	if lost := list[1]; lost.State != "lost" || lost.OpSeq != open.OpSeq || lost.Fence != open.Fence ||
		!lost.StartedAt.Equal(open.StartedAt) ||
		list[2].Attempt != 2 || list[2].State != "succeeded" {
		t.Errorf("timeline = %+v", list)
	}
}
