package background

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAReplicaAtRestSleepsUntilAJobIsDue: a job that one replica takes, another does not take until it is due again; a
// shortened period takes effect at once.
func TestAReplicaAtRestSleepsUntilAJobIsDue(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	hour := time.Hour.Seconds()
	one := schedule{names: []string{"first", "second"}, every: []float64{hour, 2 * hour}}
	two := one
	role := pg.RoleLifecycle
	take := func(s schedule, want int) time.Duration {
		t.Helper()
		due, left, err := s.take(t.Context(), db.Pool(role), []string{})
		if err != nil || len(due) != want {
			t.Fatalf("%v is due, not %d jobs: %v", due, want, err)
		}
		return left
	}
	if left := take(one, 0); left != 0 { // they are added
		t.Errorf("jobs that were added are due in %s", left)
	}
	take(one, 2)
	if left := take(two, 0); left != longestSleep {
		t.Errorf("a replica that has nothing to do sleeps for %s", left)
	}
	testkit.SetClockOffset(db, time.Hour)
	take(two, 1)
	testkit.SetClockOffset(db, 2*time.Hour-50*time.Second)
	if left := take(one, 0); left <= 0 || left > 50*time.Second {
		t.Errorf("fifty seconds before two jobs are due a replica sleeps for %s", left)
	}
	testkit.SetClockOffset(db, 2*time.Hour)
	take(one, 2)
	two.every = []float64{1, hour}
	if left := take(two, 2); left > time.Second { // both have a due time more than their period ahead
		t.Errorf("a job of each second is due in %s", left)
	}
	role = pg.RoleRecovery
	other := schedule{names: []string{"first"}, every: []float64{hour}}
	take(other, 0)
	take(other, 1) // a service takes only its own jobs
}

// TestAJobThatIsTakenBesideANewOneIsRun: a job that a query has moved and locked runs, and its lock is released, even
// if the same call of take adds another job.
func TestAJobThatIsTakenBesideANewOneIsRun(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	one := schedule{names: []string{"first"}, every: []float64{1}}
	if _, _, err := one.take(ctx, db.Pool(pg.RoleLifecycle), []string{}); err != nil { // it is added, and due
		t.Fatal(err)
	}
	held := &locks{
		pool: db.Pool(pg.RoleLifecycle), logger: testkit.Logger(t), within: unlockWithin,
		held: map[string]bool{},
	}
	due, left, err := held.take(ctx, schedule{names: []string{"first", "second"}, every: []float64{1, 1}})
	if err != nil || left != 0 {
		t.Fatalf("a job that was added is due in %s, %v", left, err)
	}
	if len(due) != 1 || due[0].Name != "first" || !due[0].Free {
		t.Errorf("%v is to be run", due)
	}
	held.give(ctx, "first")
	testkit.SetClockOffset(db, time.Minute)
	other, err := pgx.Connect(ctx, db.URL(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close(context.WithoutCancel(ctx))
	if due, _, err = one.take(ctx, other, []string{}); err != nil || len(due) != 1 || !due[0].Free {
		t.Errorf("another session takes %v, %v", due, err)
	}
}

// TestATakenJobIsOneRecord: a job that is due is moved by one record of the WAL; neither its row nor one that another
// replica takes is locked, which would be another record.
func TestATakenJobIsOneRecord(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleLifecycle)
	plan := schedule{names: []string{"first", "second"}, every: []float64{0, 0}} // due at each query
	if _, _, err := plan.take(ctx, pool, plan.names); err != nil {
		t.Fatal(err)
	}
	if n := testkit.Records(t, pool, takeJobs.SQL(), plan.names, plan.every, plan.names); n != 2 {
		t.Errorf("two jobs that were taken wrote %d records, want 2", n)
	}
}

// TestOneOfTwoReplicasTakesAJob: a replica that queries while another has not yet committed takes nothing and does not
// wait, and takes nothing after the commit either.
func TestOneOfTwoReplicasTakesAJob(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleLifecycle)
	plan := schedule{names: []string{"first"}, every: []float64{time.Hour.Seconds()}}
	if _, _, err := plan.take(ctx, pool, plan.names); err != nil { // it is added, and due
		t.Fatal(err)
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(ctx) // it is committed
	if due, _, err := plan.take(ctx, tx, plan.names); err != nil || len(due) != 1 {
		t.Fatalf("one replica takes %v: %v", due, err)
	}
	if due, _, err := plan.take(ctx, pool, plan.names); err != nil || len(due) != 0 {
		t.Fatalf("the other takes %v of it meanwhile: %v", due, err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if due, _, err := plan.take(ctx, pool, plan.names); err != nil || len(due) != 0 {
		t.Fatalf("the other takes %v of it afterwards: %v", due, err)
	}
}
