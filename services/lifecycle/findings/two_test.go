package findings

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// unanswering is a placement that never returns its list.
type unanswering struct{ placement.Driver }

// Standing blocks until ctx ends.
func (unanswering) Standing(ctx context.Context) ([]placement.Instance, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// deaf is a placement that returns its list when the test lets it, and ignores its context.
type deaf struct {
	placement.Driver

	asked atomic.Int32
	let   chan struct{}
}

// Standing blocks until the test lets it go.
func (d *deaf) Standing(context.Context) ([]placement.Instance, error) {
	d.asked.Add(1)
	<-d.let
	return nil, errors.New("let go")
}

// TestADeafPlacementHoldsUpNoSweep: a placement that ignores its context prevents the sweep neither from ending with
// its own context nor from querying the others, and is not queried again meanwhile.
func TestADeafPlacementHoldsUpNoSweep(t *testing.T) {
	b := newBed(t, Config{})
	d := &deaf{let: make(chan struct{})}
	b.sweeper.deps.Drivers = maps.Clone(b.sweeper.deps.Drivers)
	b.sweeper.deps.Drivers[commonv1.PlacementDriver_PLACEMENT_DRIVER_DOCKER] = d
	sweep := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		swept := make(chan error, 1)
		go func() {
			_, err := b.sweeper.SweepTwoInstances(ctx)
			swept <- err
		}()
		select {
		case err := <-swept:
			return err
		case <-time.After(time.Minute):
			close(d.let)
			<-swept
			t.Fatal("the sweep did not end with its context")
			return nil
		}
	}
	if err := sweep(); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the first sweep: %v", err)
	}
	if err := sweep(); !errors.Is(err, errStillAsked) {
		t.Fatalf("the second sweep: %v", err)
	}
	if n := d.asked.Load(); n != 1 {
		t.Errorf("it was asked %d times", n)
	}
	close(d.let)
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, asked := b.sweeper.asked.Load(commonv1.PlacementDriver_PLACEMENT_DRIVER_DOCKER); asked {
			return errStillAsked
		}
		return nil
	})
}

// TestTwoInstancesAreFoundWhateverTheOtherChecksDo checks that the finding on two instances of one workspace is made,
// and ends, while every other check fails or hangs and another placement does not answer.
func TestTwoInstancesAreFoundWhateverTheOtherChecksDo(t *testing.T) {
	for name, other := range map[string]func(ctx context.Context) ([]finding.Seen, error){
		"fail": func(context.Context) ([]finding.Seen, error) { return nil, errors.New("a check that fails") },
		"hang": func(ctx context.Context) ([]finding.Seen, error) { <-ctx.Done(); return nil, ctx.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			id, stranger := b.live("one"), ids.New()
			b.live("two")
			for i := range b.sweeper.checks {
				b.sweeper.checks[i].run = other
			}
			b.sweeper.deps.Drivers = maps.Clone(b.sweeper.deps.Drivers)
			b.sweeper.deps.Drivers[commonv1.PlacementDriver_PLACEMENT_DRIVER_DOCKER] = unanswering{}
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := b.sweeper.Sweep(ctx)
				ended <- err
			}()
			defer func() {
				stop()
				if err := <-ended; err == nil {
					t.Error("the other checks succeeded, and this shows nothing")
				}
			}()
			for _, instance := range []placement.LaunchRequest{
				{WorkspaceID: id, Epoch: 2, InstanceID: ids.New()},
				{WorkspaceID: stranger, Epoch: 1, InstanceID: ids.New()},
				{WorkspaceID: stranger, Epoch: 2, InstanceID: ids.New()},
			} {
				if _, err := b.world.Launch(t.Context(), instance); err != nil {
					t.Fatal(err)
				}
			}
			scans := func() string {
				return b.text(`SELECT coalesce(max(looks), 0)::text FROM lifecycle.suspicion WHERE subject_id = $1`, id)
			}
			twice := func() map[string]finding.Row {
				t.Helper()
				for range 2 {
					within, cancel := context.WithCancel(t.Context())
					swept := make(chan error, 1)
					before := scans()
					go func() {
						_, err := b.sweeper.SweepTwoInstances(within)
						swept <- err
					}()
					testkit.Eventually(t, 2*time.Minute, func() error {
						if scans() == before {
							return errors.New("the scan of the placement that answers is not applied")
						}
						return nil
					})
					cancel()
					if err := <-swept; err == nil || !strings.Contains(err.Error(), "two_instances/docker") {
						t.Fatalf("the placement that does not answer is no error: %v", err)
					}
					b.pass(b.sweeper.cfg.Grace + time.Second)
				}
				return b.open()
			}
			found := wantOnly(t, twice(), "instance_without_row workspace "+id, "instance_without_row workspace "+stranger)
			if f := found[0]; f.Severity != finding.P0 || f.WorkspaceID != id || f.TenantID == "" ||
				f.Source != "two_instances/process" || f.NextAction != detect.NextTwo ||
				!strings.Contains(f.Summary, `2 instances of "one" run at once, of epochs 1, 2`) {
				t.Errorf("got %+v", f)
			}
			if f := found[1]; f.Severity != finding.P0 || f.WorkspaceID != "" || !strings.Contains(f.Summary, "not known here") {
				t.Errorf("got %+v", f)
			}
			for _, epoch := range []int64{1, 2} {
				if err := b.world.End(t.Context(), stranger, epoch); err != nil {
					t.Fatal(err)
				}
			}
			wantOnly(t, twice(), "instance_without_row workspace "+id)
		})
	}
}
