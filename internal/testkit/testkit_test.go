package testkit_test

import (
	"errors"
	"math"
	"os"
	"runtime/metrics"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.CheckLeaks()) }

func TestDatabasesAreApartAndClocksMove(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	began := time.Now()
	a := testkit.DB(t)
	t.Logf("first database (server and template included) after %s", time.Since(began))
	began = time.Now()
	b := testkit.DB(t)
	t.Logf("second database after %s", time.Since(began))

	testkit.SetClockOffset(a, 25*time.Hour)
	_, offA, err := testkit.Clock(ctx, a.Pool(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	_, offB, err := testkit.Clock(ctx, b.Pool(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	if offA < 24*time.Hour || offB > time.Minute {
		t.Fatalf("offsets %s and %s", offA, offB)
	}
	if _, err := a.Pool(pg.RoleLifecycle).Exec(ctx, "UPDATE mesh.clock_offset SET by = '0'"); !testkit.IsPrivilege(err) {
		t.Fatalf("a service moved the clock: %v", err)
	}
}

func TestWorkloadDatabase(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	d := testkit.DB(t)
	pool, err := pg.Open(ctx, pg.Config{URL: d.WorkloadURL()})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, "CREATE SCHEMA probe"); err != nil {
		t.Fatal(err)
	}
}

func TestRedisIsReal(t *testing.T) {
	testkit.IO(t)
	s := testkit.Redis(t)
	opts, err := redis.ParseURL(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	client := redis.NewClient(opts)
	defer func() { _ = client.Close() }()
	if err := client.Set(testkit.Context(t), "k", "v", time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
}

func TestEventuallyReturnsAtTheFirstSuccess(t *testing.T) {
	t.Parallel()
	n := 0
	testkit.Eventually(t, testkit.Patience, func() error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if n != 3 {
		t.Fatalf("asked %d times", n)
	}
}

// TestTestsCollectSeldom: the pace of collections is that of Main, unless the environment sets one.
func TestTestsCollectSeldom(t *testing.T) {
	want := uint64(400)
	if text, set := os.LookupEnv("GOGC"); text == "off" {
		want = math.MaxUint64
	} else if set {
		given, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("read GOGC: %v", err)
		}
		want = given
	}
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	if got := sample[0].Value.Uint64(); got != want {
		t.Errorf("the heap grows by %d %% until it is collected, not by %d", got, want)
	}
}

func TestPausesGrowWithTheWait(t *testing.T) {
	t.Parallel()
	for waited, want := range map[time.Duration]time.Duration{
		0: 5 * time.Millisecond, 20 * time.Millisecond: 5 * time.Millisecond, 400 * time.Millisecond: 40 * time.Millisecond,
		time.Minute: 100 * time.Millisecond,
	} {
		if got := testkit.Pause(waited); got != want {
			t.Errorf("after %s it waits %s, want %s", waited, got, want)
		}
	}
}

func TestRepetitionsAreLongWhereTheyAreAskedFor(t *testing.T) {
	for set, want := range map[string]int{"": 2, "1": 50} {
		t.Setenv(testkit.EnvLong, set)
		if got := testkit.Repeat(2, 50); got != want {
			t.Errorf("%s=%q repeats %d times, want %d", testkit.EnvLong, set, got, want)
		}
	}
}
