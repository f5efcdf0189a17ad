package process

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
)

// held locks the launch log as another replica would, through its own file description, and returns a function that
// unlocks it.
func held(t *testing.T, d *Driver) func() {
	t.Helper()
	file, err := os.OpenFile(d.launchLog.lock.path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Flock(int(file.Fd()), unix.LOCK_EX), file.Truncate(0)); err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte("4711\n"), 0); err != nil {
		t.Fatal(err)
	}
	free := func() { _ = file.Close() } // a second time is an error, and harmless
	t.Cleanup(free)
	return free
}

// Scenario: a replica is stopped while it decides on a launch. The others wait no longer than they were told to, and go
// on when it is gone.
func TestAStoppedHolderOfTheLaunchLogBlocksNoOtherForEver(t *testing.T) {
	d := newDriver(t, 4, 4)
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	free := held(t, d)
	ctx, cancel := context.WithCancelCause(t.Context())
	type call struct {
		name string
		err  error
	}
	calls := map[string]func() error{
		"Launch": func() error { _, err := d.Launch(ctx, newInstance(ids.New(), 1)); return err },
		"List":   func() error { _, err := d.List(ctx); return err },
		"End":    func() error { return d.End(ctx, ws, 1) },
		"Fence":  func() error { return d.Fence(ctx, ws, 1, "an operator's word") },
		"Keep":   func() error { return d.keepOnce(ctx) },
	}
	answers := make(chan call, len(calls))
	for name, f := range calls {
		go func() { answers <- call{name, f()} }()
	}
	why := errors.New("the caller has waited enough")
	cancel(why)
	for range calls {
		select {
		case got := <-answers:
			refusal, ok := fault.As(got.err)
			if !ok || refusal.Reason != commonv1.Reason_REASON_UNAVAILABLE || !errors.Is(got.err, why) {
				t.Errorf("%s: %v", got.name, got.err)
				continue
			}
			if fault.ActionOf(got.err) != commonv1.Action_ACTION_WAIT ||
				!strings.Contains(refusal.Remedy, "continue it or end it") {
				t.Errorf("%s: action %v, remedy %q", got.name, fault.ActionOf(got.err), refusal.Remedy)
			}
			// One of them tried to lock the file and names its holder; the rest waited for that one.
			if !strings.Contains(refusal.Public, "process 4711") &&
				!strings.Contains(refusal.Public, "process "+strconv.Itoa(os.Getpid())) {
				t.Errorf("%s: no process is named in %q", got.name, refusal.Public)
			}
		case <-time.After(time.Minute):
			t.Fatal("a call waits for ever")
		}
	}
	free()
	mustEnd(t, d, ws, 1)
	if instances, err := d.List(t.Context()); err != nil || len(instances) != 1 || instances[0].EndedAt.IsZero() {
		t.Errorf("afterwards %v, %v", instances, err)
	}
}

// A caller whose context has no deadline waits for a bounded time too.
func TestWaitingForTheLaunchLogIsBounded(t *testing.T) {
	d := newDriver(t, 4, 4)
	free := held(t, d)
	patience := d.launchLog.lock.wait
	d.launchLog.lock.wait = time.Millisecond
	_, err := d.List(t.Context())
	wantReason(t, err, commonv1.Reason_REASON_UNAVAILABLE)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("cause %v", err)
	}
	free()
	d.launchLog.lock.wait = patience
	if _, err := d.List(t.Context()); err != nil {
		t.Error(err)
	}
}

// A caller that waits gets the lock as soon as it is free.
func TestAWaitingCallerGetsTheLaunchLog(t *testing.T) {
	d := newDriver(t, 4, 4)
	free := held(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() { _, err := d.List(ctx); done <- err }()
	free()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A caller's cleanup needs the launch log too: a free lock is taken with a context that has ended.
func TestAFreeLaunchLogIsHadWithoutWaiting(t *testing.T) {
	d := newDriver(t, 4, 4)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.List(ctx); err != nil {
		t.Error(err)
	}
}
