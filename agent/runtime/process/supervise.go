package process

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	"github.com/gpuaas/mesh/agent/runtime/procfs"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Run brings back workloads that should run and have no shim, now and whenever a shim dies, and signals changes on
// Changed. A workload that does not run when the agent starts waits until SetRunList lists its epoch. Run ends with
// ctx; workloads and shims go on.
func (r *Runtime) Run(ctx context.Context) error {
	ticker := time.NewTicker(r.cfg.CheckEvery)
	defer ticker.Stop()
	for {
		r.runOnce(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// runOnce checks each workload once.
func (r *Runtime) runOnce(ctx context.Context) {
	for _, w := range r.list() {
		if ctx.Err() != nil {
			return
		}
		if err := r.heal(ctx, w); err != nil && ctx.Err() == nil {
			r.deps.Logger.WarnContext(ctx, "workload was not brought back", slog.String("workspace_id", w.key.workspaceID),
				slog.String("workload", w.key.name), slog.Any("error", err))
		}
	}
	if r.observeChanges(ctx) {
		r.notify()
	}
}

// heal starts a shim for a workload that should run and has none. The new shim adopts a process that outlived the old
// one.
func (r *Runtime) heal(ctx context.Context, w *workload) error {
	if !w.mu.TryLock() {
		return nil // an operation on it is under way
	}
	defer w.mu.Unlock()
	if !w.present || w.failed != "" {
		return nil
	}
	s := w.state()
	if s.Shim.Alive() && s.BootID == r.boot {
		return nil
	}
	var onDisk desired
	if _, err := jsonfile.Read(w.dir, fileDesired, &onDisk); err != nil {
		if err := jsonfile.Write(w.dir, fileDesired, w.want); err != nil {
			return err
		}
	}
	if !w.want.Run {
		// A stop was cut short by the end of an earlier agent, or of a shim.
		if t := r.tree(w); len(t.Members()) > 0 {
			return t.Kill(nil)
		}
		return nil
	}
	if s.Final || !r.runs(s) && !r.mayStart(w) {
		return nil
	}
	w.mayStart.Store(true)
	r.deps.Logger.InfoContext(ctx, "workload has no shim, starting one", slog.String("workspace_id", w.key.workspaceID),
		slog.String("workload", w.key.name))
	if _, err := r.cfg.Cgroups.Create(w.key.workspaceID, w.key.name, r.cfg.MaxPIDs, nil); err != nil {
		return err // after a reboot the groups are gone
	}
	w.adopted = false
	return r.spawn(ctx, w)
}

func (r *Runtime) tree(w *workload) isolation.Tree {
	s := w.state()
	t := isolation.Tree{Cgroups: w.spec.Cgroups, Child: s.Child, Run: s.Run, UID: w.spec.UID}
	if s.BootID != r.boot {
		t.Child = procfs.Process{}
	}
	return t
}

// begin starts the workload afresh and returns its status once it executes. The caller holds w.mu, and no process of
// the workload runs.
func (r *Runtime) begin(ctx context.Context, w *workload) (*nodev1.WorkloadStatus, error) {
	if err := os.Remove(filepath.Join(w.dir, fileState)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("forget former run: %w", err)
	}
	want := desired{Run: true}
	if err := jsonfile.Write(w.dir, fileDesired, want); err != nil {
		return nil, err
	}
	w.want, w.adopted = want, false
	w.mayStart.Store(true)
	if err := r.spawn(ctx, w); err != nil {
		return nil, err
	}
	return r.status(ctx, w), nil
}

// spawn starts a shim and waits for its report.
func (r *Runtime) spawn(ctx context.Context, w *workload) error {
	log, err := os.OpenFile(filepath.Join(w.dir, fileShimLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log of shim: %w", err)
	}
	defer func() { _ = log.Close() }()
	if info, err := log.Stat(); err == nil && info.Size() > 1<<20 {
		_ = log.Truncate(0)
	}
	in, out, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	defer func() { _ = in.Close() }()
	//nolint:noctx // our own binary; it outlives this call and this process
	cmd := exec.Command(r.cfg.Executable, "shim", w.dir)
	cmd.Args[0] = programName
	cmd.Dir = "/"
	// Little of the agent's environment goes to the shim, and none of it to the workload.
	cmd.Env = append([]string{reportVariable + "=1", "GOMAXPROCS=2", "GOGC=50"}, inherited()...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{out}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = out.Close()
	if err != nil {
		return fmt.Errorf("start shim: %w", err)
	}
	r.shims.Go(func() { _ = cmd.Wait() }) // its result is in the state file; this only reaps it
	return r.listen(ctx, in)
}

// inherited returns the variables of test builds that a shim needs as well.
func inherited() []string {
	var out []string
	for _, k := range []string{"GPUAAS_FAILPOINTS", "GPUAAS_FAILPOINT_REPORT", "GORACE"} {
		if v := os.Getenv(k); v != "" {
			out = append(out, k+"="+v)
		}
	}
	return out
}

// listen waits for the report of a shim. A shim that ends without one has failed, or found another shim that has the
// lock.
func (r *Runtime) listen(ctx context.Context, in *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = in.SetReadDeadline(time.Now()) })
	defer stop()
	_ = in.SetReadDeadline(time.Now().Add(r.cfg.StartWait))
	line, err := bufio.NewReader(in).ReadBytes('\n')
	var rep report
	if err == nil {
		err = json.Unmarshal(line, &rep)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fault.New(commonv1.Reason_REASON_WORKLOAD_FAILED, "the workload's shim did not start", fault.Cause(err))
	}
	if rep.NoRoom {
		return fault.New(commonv1.Reason_REASON_NODE_DISK_FULL, "",
			fault.Cause(fmt.Errorf("start workload: %s: %w", rep.Error, syscall.ENOSPC)))
	}
	if rep.Error != "" {
		return fault.New(commonv1.Reason_REASON_WORKLOAD_FAILED, "the workload cannot be started: "+rep.Error)
	}
	return nil
}

// halt ends the workload and its shim. The caller holds w.mu. The order to stop is on disk before any process is
// signalled, so that the next agent or shim finishes a stop that is cut short.
func (r *Runtime) halt(ctx context.Context, w *workload, grace time.Duration) error {
	if grace <= 0 {
		grace = DefaultGrace
	}
	if w.present || w.failed != "" {
		want := desired{Run: false, Grace: grace}
		if err := jsonfile.Write(w.dir, fileDesired, want); err != nil {
			return err
		}
		w.want = want
	}
	return r.end(ctx, w, grace)
}

// end ends the workload and its shim, whatever its desired file orders. The caller holds w.mu.
func (r *Runtime) end(ctx context.Context, w *workload, grace time.Duration) error {
	if grace <= 0 {
		grace = DefaultGrace
	}
	s := w.state()
	if s.BootID == r.boot && s.Shim.Alive() {
		word := syscall.SIGTERM
		if !w.want.Run {
			word = syscall.SIGUSR1
		}
		if err := s.Shim.Signal(word); err != nil {
			return err
		}
		// The shim has the grace, and a margin for its own work; one that hangs is killed with the other processes.
		if !await(ctx, s.Shim, grace+isolation.KillWait+5*time.Second) {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := s.Shim.Signal(syscall.SIGKILL); err != nil {
				return err
			}
			s.Shim.Wait(5 * time.Second)
		}
	}
	// The processes that a dead shim left, and those of a start that was under way.
	t := r.tree(w)
	if t.Child.Alive() {
		_ = syscall.Kill(-t.Child.PID, syscall.SIGTERM)
		await(ctx, t.Child, grace)
	}
	if err := t.Kill(nil); err != nil {
		return err
	}
	r.recordLostEnd(w)
	w.adopted = false
	r.notify()
	return nil
}

// await waits up to d for the end of a process and returns whether it has ended. It waits in pieces, to notice the end
// of ctx.
func await(ctx context.Context, process procfs.Process, d time.Duration) bool {
	deadline := time.Now().Add(d)
	for ctx.Err() == nil {
		left := time.Until(deadline)
		if left <= 0 {
			break
		}
		if process.Wait(min(left, 100*time.Millisecond)) {
			return true
		}
	}
	return !process.Alive()
}

// recordLostEnd records the end of a workload whose shim could not.
func (r *Runtime) recordLostEnd(w *workload) {
	s := w.state()
	if s.Child.IsZero() && (s.Phase == phaseStopped || s.Phase == phaseExited || s.Phase == "") {
		return
	}
	if !s.HasExited {
		s.HasExited, s.ExitCode, s.ExitedAt = true, exitUnknown, time.Now()
	}
	s.Phase, s.Child, s.Detail = phaseStopped, procfs.Process{}, describeExit(s.ExitCode)
	if err := jsonfile.Write(w.dir, fileState, s); err != nil {
		r.deps.Logger.Warn("state of a stopped workload was not written", slog.String("workload", w.key.name),
			slog.Any("error", err))
	}
}
