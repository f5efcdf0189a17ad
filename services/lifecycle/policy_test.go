package lifecycle

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention/retentiontest"
)

// changing is a policy that a test changes.
type changing struct{ set atomic.Pointer[policy.Set] }

// Current returns the policy that was set last.
func (c *changing) Current() policy.Set {
	if set := c.set.Load(); set != nil {
		return *set
	}
	return policy.Defaults()
}

func (c *changing) change(t *testing.T, values map[string]string) {
	t.Helper()
	set, err := policy.NewSet(values)
	if err != nil {
		t.Fatal(err)
	}
	c.set.Store(&set)
}

// TestTermsFollowThePolicy: each retention key is the term of its own cuts.
func TestTermsFollowThePolicy(t *testing.T) {
	retentiontest.TermsFollow(t, pg.RoleLifecycle, cuts, map[string][]string{
		policy.RetentionTasksSeconds:         {"tasks"},
		policy.RetentionRunsSeconds:          {"claims", "runs", "allocations", "instances", "unaccounted"},
		policy.RetentionWorkspacesSeconds:    {"workspaces"},
		policy.RetentionFindingsSeconds:      {"findings", "evidence"},
		policy.RetentionIdentitiesSeconds:    {"gates"},
		policy.RetentionOperationKeysSeconds: {"operation_keys"},
	})
}

// TestStaleTasksAreSweptAsOftenAsThePolicySays: every minute by default, and every ten seconds after the key was set.
func TestStaleTasksAreSweptAsOftenAsThePolicySays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reader changing
		var mu sync.Mutex
		var sweeps []time.Duration
		swept := func() []time.Duration {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(sweeps)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- sweepAtPolicy(ctx, slog.New(slog.DiscardHandler), &reader,
				func(_ context.Context, interval time.Duration) error {
					mu.Lock()
					defer mu.Unlock()
					sweeps = append(sweeps, interval)
					return nil
				})
		}()
		<-time.After(3*time.Minute + time.Second)
		synctest.Wait()
		if got := swept(); len(got) != 3 || got[2] != time.Minute {
			t.Errorf("sweeps in three minutes: %v", got)
		}
		reader.change(t, map[string]string{policy.TaskStaleSweepIntervalSeconds: "10"})
		<-time.After(2 * time.Minute)
		synctest.Wait()
		// The pause under way, of which 59 s are left, and 61 s in pauses of ten.
		if got := swept(); len(got) != 3+1+6 || got[9] != 10*time.Second {
			t.Errorf("sweeps in two more minutes: %v", got[3:])
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestTheGraceOfACancelIsThePolicys: the driver reads the key at each cancel, as package saga proves.
func TestTheGraceOfACancelIsThePolicys(t *testing.T) {
	var reader changing
	cfg := driverConfig(&reader, Config{SagaLease: time.Minute, Workers: 4}, "a")
	if grace := cfg.GraceNow(); grace != 30*time.Second {
		t.Errorf("by default: %s", grace)
	}
	reader.change(t, map[string]string{policy.SagaCancelGraceSeconds: "5"})
	if grace := cfg.GraceNow(); grace != 5*time.Second {
		t.Errorf("after a change: %s", grace)
	}
}
