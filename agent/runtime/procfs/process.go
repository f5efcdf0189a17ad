package procfs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process names one process of this boot: a pid is recycled, a pid with its start time is not.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // field 22 of stat: clock ticks since boot
}

// IsZero reports whether p names no process.
func (p Process) IsZero() bool { return p.PID == 0 }

// Stat has the used fields of /proc/<pid>/stat.
type Stat struct {
	Process
	Parent  int
	Session int
	Zombie  bool
}

// ReadStat reads the stat of a process.
func ReadStat(pid int) (Stat, error) {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return Stat{}, err
	}
	return parseStat(pid, data)
}

// parseStat parses /proc/<pid>/stat, in which the program's name is in parentheses and may itself have parentheses and
// spaces.
func parseStat(pid int, data []byte) (Stat, error) {
	end := bytes.LastIndexByte(data, ')')
	if end < 0 {
		return Stat{}, fmt.Errorf("stat of process %d is malformed", pid)
	}
	fields := strings.Fields(string(data[end+1:])) // field 3 is the first of these
	if len(fields) < 20 {
		return Stat{}, fmt.Errorf("stat of process %d is malformed", pid)
	}
	parent, err1 := strconv.Atoi(fields[1])
	session, err2 := strconv.Atoi(fields[3])
	start, err3 := strconv.ParseUint(fields[19], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return Stat{}, fmt.Errorf("stat of process %d is malformed: %w", pid, err)
	}
	return Stat{Process: Process{PID: pid, Start: start}, Parent: parent, Session: session, Zombie: fields[0] == "Z" ||
		fields[0] == "X"}, nil
}

// Identify returns the identity of a living process.
func Identify(pid int) (Process, error) {
	s, err := ReadStat(pid)
	if err != nil {
		return Process{}, fmt.Errorf("identify process %d: %w", pid, err)
	}
	return s.Process, nil
}

// Started returns when the process began, by SinceBoot.
func (p Process) Started() time.Duration {
	const ticks = 100 // per second, in the kernel's interface to user space
	return time.Duration(p.Start) * (time.Second / ticks)
}

// SinceBoot returns the time since the host was booted, its sleep included: the clock by which the kernel dates the
// starts of processes. Setting the host's time does not change it.
func SinceBoot() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0 // then no run counts as long, and no workload is ready too soon
	}
	return time.Duration(now.Nano())
}

// Alive reports whether exactly this process still runs. A zombie does not.
func (p Process) Alive() bool {
	if p.PID <= 0 {
		return false
	}
	s, err := ReadStat(p.PID)
	return err == nil && s.Start == p.Start && !s.Zombie
}

// Open returns a handle on exactly this process, or -1 if it is gone. The handle is opened before the start time is
// compared, so that a signal by it goes to the process that was compared.
func (p Process) Open() int {
	if p.PID <= 0 {
		return -1
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		return -1
	}
	if !p.Alive() {
		_ = unix.Close(fd)
		return -1
	}
	return fd
}

// Signal sends sig to exactly this process. It returns nil if the process is gone.
func (p Process) Signal(sig syscall.Signal) error {
	fd := p.Open()
	if fd < 0 {
		return nil
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// Wait waits up to d for the end of the process and returns whether it has ended.
func (p Process) Wait(d time.Duration) bool {
	fd := p.Open()
	if fd < 0 {
		return true
	}
	defer func() { _ = unix.Close(fd) }()
	deadline := time.Now().Add(d)
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return !p.Alive()
		}
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} // a descriptor
		n, err := unix.Poll(fds, int(left.Milliseconds())+1)
		if n > 0 {
			return true
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return !p.Alive()
		}
	}
}

// BootID returns an id that changes with each boot of the host, empty if it cannot be read. Start times of another boot
// have no meaning.
func BootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}
