package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/filelock"
	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	"github.com/gpuaas/mesh/agent/runtime/output"
	"github.com/gpuaas/mesh/agent/runtime/procfs"
	"github.com/gpuaas/mesh/internal/failpoint"
)

// Exit codes of a shim, for its agent and the host's operator.
const (
	shimDone   = 0
	shimUsage  = 64
	shimFailed = 70
	shimLocked = 75 // another shim supervises this workload
)

const (
	programName    = "gpuaas-node-agent"
	selfExecutable = "/proc/self/exe" // also when the file was replaced by an update
	initArgument   = "--init"
	reportVariable = "GPUAAS_SHIM_REPORT"
	reportFD       = 3 // the shim's end of the pipe on which its agent waits for the first start
	lockWait       = 5 * time.Second
	watchEvery     = time.Second // between two checks of the output's size, and of changes for which no signal came
	// calmAfter is the default of Config.CalmAfter: a workload that ran for this long begins with the shortest backoff
	// again, and is in no crash loop.
	calmAfter  = time.Minute
	ranUnknown = time.Duration(-1)
)

// report is the report that a shim sends its agent once, after its first start.
type report struct {
	Error  string `json:"error,omitempty"`
	NoRoom bool   `json:"no_room,omitempty"` // it was refused for want of room on the disk
}

// ShimMain is the subcommand `shim <directory>` of the agent's binary, and its stage before a workload executes. It
// returns the exit code.
func ShimMain(args []string) int {
	if len(args) == 1 && args[0] == initArgument {
		return isolation.StageMain()
	}
	if len(args) != 1 {
		fmt.Fprintln(os.Stderr, "usage: shim <directory of a workload>")
		return shimUsage
	}
	s := &shim{dir: args[0], boot: procfs.BootID()}
	if os.Getenv(reportVariable) != "" {
		unix.CloseOnExec(reportFD)
		s.out = os.NewFile(reportFD, "report")
	}
	code, err := s.run()
	s.reportStart(err)
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s shim: %v\n", time.Now().UTC().Format(time.RFC3339), err)
	}
	return code
}

type shim struct {
	dir    string
	boot   string
	spec   spec
	want   desired
	state  state
	saved  os.FileInfo // of the state's file as it was written last; nil: it is to be written again
	known  bool        // the state's file names this shim, so that its agent finds it
	out    *os.File    // nil once the report is sent
	output output.Recorder

	own     bool // the child is a child of this process, which can wait for it
	exited  bool
	code    int32
	pidfd   int // of an adopted child
	backoff time.Duration

	commands chan os.Signal
	children chan os.Signal
}

func (s *shim) run() (int, error) {
	lock, err := s.lock()
	if err != nil {
		return shimLocked, err
	}
	defer func() { _ = lock.Close() }()
	// Orphans of the workload become children of the shim, so that none escapes it.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return shimFailed, fmt.Errorf("become reaper: %w", err)
	}
	s.commands, s.children = make(chan os.Signal, 4), make(chan os.Signal, 1)
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	signal.Notify(s.commands, syscall.SIGUSR1, syscall.SIGTERM, syscall.SIGINT)
	signal.Notify(s.children, syscall.SIGCHLD)
	if err := s.load(); err != nil {
		return shimFailed, err
	}
	if err := s.takeOver(); err != nil {
		return shimFailed, err
	}
	return s.supervise()
}

// lock makes this the only shim of the workload for as long as it lives.
func (s *shim) lock() (*os.File, error) {
	f, err := filelock.Within(lockWait, filepath.Join(s.dir, fileLock), unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		err = fmt.Errorf("another shim supervises %s: %w", s.dir, err)
	}
	return f, err
}

func (s *shim) load() error {
	found, err := jsonfile.Read(s.dir, fileSpec, &s.spec)
	if err == nil && !found {
		err = errors.New("there is no " + fileSpec)
	}
	if err != nil {
		return err
	}
	s.output = output.Recorder{Dir: s.dir, Limit: s.spec.LogBytes, Masked: secretsOf(s.spec)}
	if _, err := jsonfile.Read(s.dir, fileState, &s.state); err != nil {
		// if the state cannot be read the shim starts afresh; processes that may still run are found by their control group
		s.state = state{}
	}
	return s.reload()
}

func (s *shim) reload() error {
	var want desired
	found, err := jsonfile.Read(s.dir, fileDesired, &want)
	if err != nil {
		// The unreadable file is no reason to end a running workload or its shim: the agent writes it again.
		want, found = wantedBy(s.state), true
		fmt.Fprintf(os.Stderr, "%s shim: %v; it is taken as run=%t\n", time.Now().UTC().Format(time.RFC3339), err, want.Run)
	}
	s.want = desired{Run: found && want.Run, Grace: want.Grace}
	return nil
}

// takeOver takes over from an earlier shim: it adopts a workload that still runs, records the end of one that ended
// without a shim, and ends processes whose first process has ended.
func (s *shim) takeOver() error {
	s.backoff = s.spec.BackoffMin
	prev := s.state
	s.state.BootID, s.state.Adopted = s.boot, false
	var err error
	if s.state.Shim, err = procfs.Identify(os.Getpid()); err != nil {
		return err
	}
	same := prev.BootID == s.boot
	if same && !prev.HasExited && prev.Child.Alive() && isolation.Joined(prev.Child.PID, s.spec.Cgroups) {
		if fd := prev.Child.Open(); fd >= 0 {
			s.pidfd, s.own, s.exited = fd, false, false
			s.state.Phase, s.state.Adopted = phaseRunning, true
			return s.save()
		}
	}
	if !prev.Child.IsZero() && !prev.HasExited {
		// It ended without a parent to read its exit status. The code is unknown, and counts as a failure.
		s.state.HasExited, s.state.ExitCode, s.state.ExitedAt, s.state.Phase = true, exitUnknown, time.Now(), phaseExited
	}
	if !same {
		s.state.Child = procfs.Process{}
	}
	if err := s.tree().Kill(s.reap); err != nil {
		return err
	}
	s.state.Child = procfs.Process{}
	return nil
}

func (s *shim) tree() isolation.Tree {
	return isolation.Tree{
		Cgroups: s.spec.Cgroups, Child: s.state.Child, Run: s.state.Run, UID: s.spec.UID, Parent: os.Getpid(),
	}
}

// supervise runs the workload until the agent orders it to stop, or its policy does not start it again.
func (s *shim) supervise() (int, error) {
	// If the first start ever of a workload fails it is not tried again, and its deploy returns the error. A later start
	// is tried again.
	fresh := s.state.Run == ""
	if s.state.HasExited && s.state.Phase == phaseExited {
		if done, err := s.evaluate(s.state.ExitCode, ranUnknown); done || err != nil {
			return shimDone, err
		}
	}
	for {
		if s.state.Child.IsZero() {
			if !s.want.Run {
				return shimDone, s.end(phaseStopped, s.state.Detail)
			}
			if s.state.HasExited {
				if again, err := s.pause(); err != nil || !again {
					return shimDone, err
				}
			}
			if err := s.start(); err != nil {
				s.state.HasExited, s.state.ExitCode, s.state.ExitedAt = true, 127, time.Now()
				s.state.Child = procfs.Process{}
				if fresh {
					return shimDone, errors.Join(err, s.end(phaseExited, err.Error()))
				}
				s.state.Detail = err.Error() // a failed start does not count as a restart
				s.state.ShortRuns++
				continue
			}
		}
		fresh = false
		s.reportStart(nil)
		ended, err := s.watch()
		if err != nil {
			return shimFailed, err
		}
		if !ended {
			return shimDone, nil // the agent ordered a stop, and the workload has stopped
		}
		if done, err := s.ended(); done || err != nil {
			return shimDone, err
		}
	}
}

// end writes the last state of this shim.
func (s *shim) end(phase, detail string) error {
	s.state.Phase, s.state.Detail, s.state.Child = phase, detail, procfs.Process{}
	s.state.Final = phase == phaseExited
	return s.save()
}

// ended records an exit durably, ends the processes that the workload left, and returns whether it is not started
// again.
func (s *shim) ended() (bool, error) {
	ran := s.state.uptime()
	s.state.HasExited, s.state.ExitCode, s.state.ExitedAt, s.state.RanFor = true, s.code, time.Now(), ran
	s.state.Phase = phaseExited
	recorded := s.save()
	if recorded != nil && !room.IsFull(recorded) {
		return false, recorded
	}
	if err := failpoint.Hit("agent.shim.after_exit"); err != nil {
		return false, err
	}
	if err := s.tree().Kill(s.reap); err != nil {
		return false, err
	}
	if recorded != nil {
		if err := s.keep(); err != nil {
			return false, err
		}
	}
	s.closeChild()
	return s.evaluate(s.code, ran)
}

// evaluate applies the policy to an exit and returns whether the workload is not started again.
func (s *shim) evaluate(code int32, ran time.Duration) (bool, error) {
	detail := describeExit(code)
	if s.spec.Policy == policyNever || (s.spec.Policy != policyAlways && code == 0) {
		s.state.Phase, s.state.Detail, s.state.Child, s.state.Final = phaseExited, detail, procfs.Process{}, true
		return true, s.keep()
	}
	s.state.Restarts++
	s.state.Detail = detail
	switch {
	case ran == ranUnknown:
	case ran >= s.spec.calm():
		s.backoff, s.state.ShortRuns = s.spec.BackoffMin, 0
	default:
		s.state.ShortRuns++
	}
	return false, nil
}

// pause waits for the backoff and returns whether the workload is still to run.
func (s *shim) pause() (bool, error) {
	s.state.Phase = phaseBackoff
	if err := s.keep(); err != nil {
		return false, err
	}
	if !s.want.Run { // it was stopped meanwhile
		return false, s.end(phaseStopped, s.state.Detail)
	}
	timer := time.NewTimer(s.backoff)
	defer timer.Stop()
	s.backoff = min(s.backoff*2, s.spec.BackoffMax)
	for {
		select {
		case <-timer.C:
			return true, nil
		case <-s.children:
			s.reap()
		case sig := <-s.commands:
			if sig != syscall.SIGUSR1 {
				return false, s.end(phaseStopped, "its shim was told to end")
			}
			if err := s.reload(); err != nil {
				return false, err
			}
			if !s.want.Run {
				return false, s.end(phaseStopped, s.state.Detail)
			}
		}
	}
}

func (s *shim) save() error {
	s.saved = nil
	if err := jsonfile.Write(s.dir, fileState, s.state); err != nil {
		return err
	}
	s.known = true
	s.saved, _ = os.Stat(filepath.Join(s.dir, fileState)) // nil on an error: restore writes it again
	return nil
}

// keep saves a state that must not be lost: how the workload ended. While the disk is full it tries again every
// watchEvery, since a shim that ended instead would leave a workload whose end is unknown, and which is run again
// although it has done its work. It returns an error if the shim is told to end meanwhile, or if its agent cannot find
// it: the agent starts another one then.
func (s *shim) keep() error {
	err := s.save()
	if !room.IsFull(err) || !s.known {
		return err
	}
	s.reportStart(err)
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	for room.IsFull(err) {
		select {
		case <-ticker.C:
			err = s.save()
		case <-s.children:
			s.reap()
		case sig := <-s.commands:
			if sig != syscall.SIGUSR1 {
				return fmt.Errorf("the shim was told to end before the end of its workload was recorded: %w", err)
			}
			if err := s.reload(); err != nil {
				return err
			}
			err = s.save()
		}
	}
	return err
}

// restore writes the state again if the file is not the one that was written last: without it the agent would not find
// this shim.
func (s *shim) restore() {
	now, err := os.Stat(filepath.Join(s.dir, fileState))
	if err != nil || s.saved == nil || !os.SameFile(now, s.saved) || now.Size() != s.saved.Size() ||
		!now.ModTime().Equal(s.saved.ModTime()) {
		_ = s.save() // on a full disk it fails, and is tried again soon
	}
}

// reportStart sends the report to the waiting agent, once. The agent may be gone: then the write fails, which is no
// error.
func (s *shim) reportStart(err error) {
	if s.out == nil {
		return
	}
	var r report
	if err != nil {
		r.Error, r.NoRoom = err.Error(), room.IsFull(err)
	}
	_ = json.NewEncoder(s.out).Encode(r)
	_ = s.out.Close()
	s.out = nil
}
