package background

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAReplicaAtRestSleepsUntilAJobIsDue: what one replica takes, another leaves alone until it is due again; a period that was shortened counts at once.
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
	if left := take(two, 2); left > time.Second { // both are due later than in their periods
		t.Errorf("a job of each second is due in %s", left)
	}
	role = pg.RoleRecovery
	other := schedule{names: []string{"first"}, every: []float64{hour}}
	take(other, 0)
	take(other, 1) // a service's job is its own
}

// TestAJobThatIsTakenBesideANewOneIsRun: what a look has moved and locked runs, and its lock is given back, also where another job is added by the same look.
func TestAJobThatIsTakenBesideANewOneIsRun(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	one := schedule{names: []string{"first"}, every: []float64{1}}
	if _, _, err := one.take(ctx, db.Pool(pg.RoleLifecycle), []string{}); err != nil { // it is added, and due
		t.Fatal(err)
	}
	held := &locks{pool: db.Pool(pg.RoleLifecycle), logger: testkit.Logger(t), within: unlockWithin, held: map[string]bool{}}
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
	defer other.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the test is over
	if due, _, err = one.take(ctx, other, []string{}); err != nil || len(due) != 1 || !due[0].Free {
		t.Errorf("another session takes %v, %v", due, err)
	}
}
