// Package cgroup names the control groups of node agents, and removes them when an agent has ended.
//
// An agent that is killed cannot remove its own groups, and their directories depend on the group that the agent was
// started in. So an agent records each directory in its state directory before it makes it, and the process that ends
// the agent for good, which is the driver that launched its instance or the mesh that started it, removes the recorded
// groups. A record can only lead to the removal of groups that have the name of an agent's group and contain no
// process.
package cgroup

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// File is the record in an agent's state directory: a line for each directory, absolute.
const File = "control-groups"

// Name returns the path of an agent's groups, relative to the group that the agent was started in.
func Name(stateDir string) string {
	sum := sha256.Sum256([]byte(stateDir))
	return filepath.Join("gpuaas", hex.EncodeToString(sum[:6]))
}

// named matches absolute paths that end in a path that Name returns.
var named = regexp.MustCompile(`^/.*/gpuaas/[0-9a-f]{12}$`)

// Record adds dir to the record of the agent with this state directory, unless it is recorded already.
func Record(stateDir, dir string) error {
	f, err := os.OpenFile(filepath.Join(stateDir, File), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("record control group: %w", err)
	}
	defer f.Close() // the write has said
	var have bytes.Buffer
	if _, err := have.ReadFrom(f); err != nil {
		return fmt.Errorf("record control group: %w", err)
	}
	line := dir + "\n"
	if have.Len() > 0 && have.Bytes()[have.Len()-1] != '\n' {
		line = "\n" + line // a crash or a full disk cut the previous line short
	}
	for known := range strings.Lines(have.String()) {
		if known == dir+"\n" {
			return nil
		}
	}
	if _, err := f.WriteString(line); err != nil {
		return fmt.Errorf("record control group: %w", err)
	}
	return nil
}

// Remove removes the groups that the agent with this state directory has recorded, and then the record. It returns an
// error, and keeps the record, while a process is in one of them. Without a record it does nothing.
func Remove(stateDir string) error {
	path := filepath.Join(stateDir, File)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read record of control groups: %w", err)
	}
	var problems []error
	for line := range strings.Lines(string(data)) {
		root := strings.TrimSuffix(line, "\n")
		if root != filepath.Clean(root) || !named.MatchString(root) || !isGroup(root) {
			continue // the line was cut short, the group is gone, or no agent made it
		}
		problems = append(problems, remove(root))
		_ = syscall.Rmdir(filepath.Dir(root)) // `gpuaas` itself, if this was the last of all agents here
	}
	if err := errors.Join(problems...); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record of control groups: %w", err)
	}
	return nil
}

// RemoveBelow is Remove for each agent whose state directory is below dir, as far down as a mesh puts them.
func RemoveBelow(dir string) error { return removeBelow(dir, 5) }

func removeBelow(dir string, depth int) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for records of control groups: %w", err)
	}
	var problems []error
	for _, entry := range entries {
		switch {
		case entry.Name() == File:
			problems = append(problems, Remove(dir))
		case entry.IsDir() && depth > 0:
			problems = append(problems, removeBelow(filepath.Join(dir, entry.Name()), depth-1))
		}
	}
	return errors.Join(problems...)
}

// isGroup reports whether dir is a directory of a cgroup file system.
func isGroup(dir string) bool {
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return false
	}
	return stat.Type == unix.CGROUP_SUPER_MAGIC || stat.Type == unix.CGROUP2_SUPER_MAGIC
}

// remove removes a group and all groups below it, deepest first. The kernel refuses to remove a group that a process is
// in.
func remove(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read control group: %w", err)
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := remove(filepath.Join(dir, entry.Name())); err != nil {
				return err
			}
		}
	}
	// Only rmdir works: the files of a group cannot be unlinked, and disappear with it. A group is busy for a moment after
	// its last process has ended.
	for began := time.Now(); ; <-time.After(busyPoll) {
		err := syscall.Rmdir(dir)
		switch {
		case err == nil || errors.Is(err, fs.ErrNotExist):
			return nil
		case errors.Is(err, syscall.EBUSY) && time.Since(began) < busyFor:
		default:
			return fmt.Errorf("remove control group %s: %w", dir, err)
		}
	}
}

// busyFor is how long the removal of a group waits until the kernel has finished with its processes.
const (
	busyFor  = 2 * time.Second
	busyPoll = 20 * time.Millisecond
)
