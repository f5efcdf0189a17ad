package race

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/stage"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/mesh/cluster"
)

const (
	// instants is how often the drill aims at the instant of the watchdog's request.
	instants = 5
	// aim is how long after its detection the watchdog's request is waited for: it waits five seconds itself, and then for
	// its next round.
	aim = 4 * time.Second
	// longest is how long lifecycle is stopped at most; the watchdog waits that long for an answer.
	longest = 4500 * time.Millisecond
)

// Beside races until the watchdog's own request falls into the race.
func (x *Race) Beside(ctx context.Context) error {
	return x.repeat(ctx, instants, "beside the watchdog", x.together,
		fmt.Errorf("in %d rounds the watchdog did not once ask while the others did", instants))
}

// together kills the instance's agent, and when the watchdog is about to ask for a recreation, lets all others send
// theirs too: lifecycle is stopped until all requests wait for it, and handles all of them at once. It reports whether
// the watchdog's request was one of them, by the time in the recovery's own record.
func (x *Race) together(ctx context.Context, run start) (bool, error) {
	c, err := x.r.Mesh.Cluster()
	if err != nil {
		return false, err
	}
	if err := errors.Join(x.Invite(ctx), x.r.Mesh.ReleaseBrake(ctx)); err != nil {
		return false, stage.At(stage.Good, err)
	}
	open, err := x.orphan(ctx, c)
	if err != nil {
		return false, stage.At(stage.Injected, err)
	}
	record, err := x.detected(ctx)
	if err != nil {
		return false, stage.At(stage.Injected, errors.Join(err, open()))
	}
	if err := await.Sleep(ctx, time.Until(record.GetDetectedAt().AsTime().Add(aim))); err != nil {
		return false, errors.Join(err, open())
	}
	release, err := stopAll(ctx, c.Lifecycle)
	if err != nil {
		return false, stage.At(stage.Injected, errors.Join(err, open()))
	}
	type answer struct {
		op  *lifecyclev1.Operation
		err error
	}
	answers := make(chan answer, 1)
	began := time.Now()
	x.r.FaultAt = began
	go func() {
		op, err := run(ctx)
		answers <- answer{op, err}
	}()
	// How well this aims depends on the speed of the machine: the result is read from the record afterwards.
	_ = await.Until(ctx, "the watchdog to ask", longest, func(ctx context.Context) error {
		if record, err = x.recovery(ctx, record.GetRecordId()); err != nil {
			return err
		}
		if record.GetStartedAt() == nil || x.flying.Load() < racers/2 {
			return errors.New("it has not asked")
		}
		return nil
	})
	waiting := x.flying.Load()
	err = errors.Join(open(), release())
	got := <-answers
	ended := time.Now()
	if err = errors.Join(err, got.err); err != nil {
		return false, err
	}
	return x.met(ctx, record.GetRecordId(), got.op, waiting, began, ended)
}

// met reports whether the watchdog sent its request between two moments; then all requesters must have got the one
// operation: people by the audit log, the watchdog by its record.
func (x *Race) met(ctx context.Context, recordID string, op *lifecyclev1.Operation, waiting int64, began,
	ended time.Time,
) (bool, error) {
	record, err := x.recovery(ctx, recordID)
	if err != nil {
		return false, stage.At(stage.Injected, err)
	}
	asked := record.GetStartedAt().AsTime()
	if record.GetStartedAt() == nil || asked.Before(began) || asked.After(ended) {
		x.r.Note("the watchdog did not ask within the %.2f s of the race: %s", ended.Sub(began).Seconds(),
			cmp.Or(record.GetWithheldBecause(), "nothing withheld it"))
		return false, nil
	}
	x.r.Evidence(record.GetRecordId())
	var by []string
	err = await.Until(ctx, "every requester to stand with the operation", await.Patience, func(ctx context.Context) error {
		if by, err = x.requesters(ctx, op.GetOperationId()); err != nil {
			return err
		}
		if record, err = x.recovery(ctx, recordID); err != nil {
			return err
		}
		if !slices.Contains(by, x.called(userName)) || !slices.Contains(by, x.called(adminName)) ||
			record.GetOperationId() != op.GetOperationId() {
			return fmt.Errorf("operation %s was asked for by %v, and the watchdog follows %q", op.GetOperationId(), by,
				record.GetOperationId())
		}
		return nil
	})
	if err != nil {
		return false, stage.At(stage.Evidence, err)
	}
	x.r.Note("%d people's requests stood before lifecycle when it went on, and the watchdog's, made %.2f s into the "+
		"race; operation %s was asked for by %s, and by "+
		"the watchdog", waiting, asked.Sub(began).Seconds(), op.GetOperationId(), strings.Join(by, " and "))
	return true, nil
}

// orphan kills the instance's agent and does not admit it again, so that the watchdog misses it. The returned function
// admits the next instance.
func (x *Race) orphan(ctx context.Context, c *cluster.Cluster) (func() error, error) {
	if _, err := c.ShutOut(c.Plan.Addresses.Agents, true); err != nil {
		return nil, err
	}
	open := func() error { _, err := c.ShutOut(c.Plan.Addresses.Agents, false); return err }
	pid, err := x.r.Mesh.InstancePID(x.id, x.epoch)
	if err != nil {
		return nil, errors.Join(err, open())
	}
	agent := host.Kernel(pid)
	err = errors.Join(syscall.Kill(pid, syscall.SIGKILL),
		await.Until(ctx, "the agent to be gone", await.Took, func(context.Context) error { return host.Gone(pid, agent) }))
	if err != nil {
		return nil, errors.Join(err, open())
	}
	x.r.Note("the agent of the instance, process %d, is gone", pid)
	return open, nil
}

// detected waits for the watchdog's record of the instance, before the watchdog's request.
func (x *Race) detected(ctx context.Context) (*recoveryv1.RecoveryRecord, error) {
	var record *recoveryv1.RecoveryRecord
	err := await.Until(ctx, "the watchdog to miss the instance", x.r.Policy.HeartbeatStaleAfter()+await.Limit,
		func(ctx context.Context) error {
			var err error
			record, err = x.recovery(ctx, "")
			return err
		})
	return record, err
}

// recovery returns a record of the workspace: by its id, or the one that is open.
func (x *Race) recovery(ctx context.Context, id string) (*recoveryv1.RecoveryRecord, error) {
	resp, err := x.r.Mesh.Client.Incidents.ListRecoveries(ctx,
		&readmodelv1.ListRecoveriesRequest{PageSize: 100, Workspace: x.id})
	if err != nil {
		return nil, err
	}
	for _, r := range resp.GetItems() {
		if r.GetRecordId() == id || id == "" && r.GetEndedAt() == nil {
			return r, nil
		}
	}
	return nil, errors.New("there is no such recovery")
}

// stopAll stops processes, and checks with the kernel that they are stopped. The returned function continues them; it
// may be called once.
func stopAll(ctx context.Context, processes []*cluster.Process) (func() error, error) {
	var pids []int
	release := func() error {
		var errs []error
		for _, pid := range pids {
			errs = append(errs, host.Stopped(pid), syscall.Kill(pid, syscall.SIGCONT))
		}
		return errors.Join(errs...)
	}
	for _, p := range processes {
		pid := p.PID()
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			return nil, errors.Join(err, release())
		}
		pids = append(pids, pid)
	}
	for _, pid := range pids {
		if err := await.Until(ctx, "a replica to stop", await.Took,
			func(context.Context) error { return host.Stopped(pid) }); err != nil {
			return nil, errors.Join(err, release())
		}
	}
	return release, nil
}
