package inuse

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Error is returned if the address of a flag is taken.
type Error struct {
	Flag, Addr string
	PID        int    // of the holder; zero if it is not known
	Command    string // of the holder
}

func (e *Error) Error() string {
	holder := "another process"
	if e.PID != 0 {
		holder = fmt.Sprintf("%s (pid %d)", e.Command, e.PID)
	}
	return fmt.Sprintf("%s is in use by %s: choose another with %s, or end it", e.Addr, holder, e.Flag)
}

// Check returns an *Error if the address cannot be listened on because another process does. A port of zero is
// always free.
func Check(ctx context.Context, flag, addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("%s %q is not host:port", flag, addr)
	}
	if number, err := net.DefaultResolver.LookupPort(ctx, "tcp", port); err != nil || number < 0 {
		return fmt.Errorf("%s %q: not a port", flag, addr)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err == nil {
		if err := l.Close(); err != nil {
			return fmt.Errorf("%s %s: %w", flag, addr, err)
		}
		return nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s %s: %w", flag, net.JoinHostPort(host, port), err)
	}
	taken := &Error{Flag: flag, Addr: addr}
	taken.PID, taken.Command = holder(port)
	return taken
}

// holder returns the process id and name of the process that listens on a port, from /proc. Without /proc, and for
// processes of other users, it finds none.
func holder(port string) (int, string) {
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return 0, ""
	}
	inodes := map[string]bool{}
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		listeners(table, number, inodes)
	}
	if len(inodes) == 0 {
		return 0, ""
	}
	fds, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return 0, ""
	}
	for _, fd := range fds {
		target, err := os.Readlink(fd)
		if err != nil || !inodes[strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]")] {
			continue
		}
		dir := filepath.Dir(filepath.Dir(fd))
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		return pid, command(dir)
	}
	return 0, ""
}

func command(dir string) string {
	line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil || len(line) == 0 {
		return "a process"
	}
	args := strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
	args[0] = filepath.Base(args[0])
	return strings.Join(args[:min(len(args), 2)], " ")
}

// listeners adds the inodes of the sockets that listen on a port, by a table of /proc/net.
func listeners(table string, port uint64, inodes map[string]bool) {
	f, err := os.Open(table)
	if err != nil {
		return
	}
	defer f.Close()
	const listen = "0A"
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[3] != listen {
			continue
		}
		_, hex, _ := strings.Cut(fields[1], ":")
		if n, err := strconv.ParseUint(hex, 16, 16); err == nil && n == port {
			inodes[fields[9]] = true
		}
	}
}
