package host

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The files below a facts root that a drill changes.
const (
	FactKernel = "proc/sys/kernel/osrelease"
	FactBootID = "proc/sys/kernel/random/boot_id"
	// FactAddresses is the kernel's table of routes, from which an agent below a root reads the host's own addresses.
	FactAddresses = "proc/net/fib_trie"
	factDriver    = "proc/driver/nvidia/version"
)

// factFiles are the files of a host from which an agent reads facts.
var factFiles = []string{
	"etc/machine-id", "etc/os-release", FactKernel, FactBootID, "proc/sys/kernel/hostname", "proc/meminfo",
	"proc/self/mounts", factDriver, FactAddresses, "proc/net/if_inet6",
}

// FactsRoot fills a directory with copies of the files from which an agent reads this host's facts, and returns the
// variable of the environment by which an agent reads them there. Files that this host lacks are left out.
func FactsRoot(dir string) (string, error) {
	for _, name := range factFiles {
		data, err := os.ReadFile(filepath.Join("/", name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("copy the facts of this host: %w", err)
		}
		if err := SetFact(dir, name, string(data)); err != nil {
			return "", err
		}
	}
	return "GPUAAS_FACTS_ROOT=" + dir, nil
}

// Fact returns the content of a file below a facts root.
func Fact(dir, name string) (string, error) {
	data, err := os.ReadFile(filepath.Join(dir, name))
	return string(data), err
}

// FactsDigest returns a digest of the files below a facts root that drills change.
func FactsDigest(dir string) string {
	sum := sha256.New()
	for _, name := range []string{FactKernel, factDriver, FactAddresses} {
		data, _ := os.ReadFile(filepath.Join(dir, name)) // one that is missing is empty
		_, _ = fmt.Fprintf(sum, "%s %d %s", name, len(data), data)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// SetOffset makes a file contain by how much the clock of a process is to be off that reads it from there.
func SetOffset(path string, by time.Duration) error {
	return SetFact(filepath.Dir(path), filepath.Base(path), by.String()+"\n")
}

// ReadsOffset returns nil if the environment of a process names the file as that of its clock's offset, and the file
// contains the offset.
func ReadsOffset(pid int, path string, by time.Duration) error {
	if err := HasEnv(pid, "GPUAAS_CLOCK_OFFSET=@"+path); err != nil {
		return err
	}
	data, err := os.ReadFile(path)
	if err == nil && strings.TrimSpace(string(data)) != by.String() {
		err = fmt.Errorf("%s contains %q", path, data)
	}
	return err
}

// HasEnv returns nil if a process was started with a variable, given as NAME=VALUE.
func HasEnv(pid int, variable string) error {
	env, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil {
		return fmt.Errorf("read the environment of process %d: %w", pid, err)
	}
	if !slices.Contains(strings.Split(string(env), "\x00"), variable) {
		return fmt.Errorf("process %d was started without %s", pid, variable)
	}
	return nil
}

// AddAddress makes a further address one of the host's own below a facts root.
func AddAddress(dir, address string) error {
	was, err := Fact(dir, FactAddresses)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read addresses: %w", err)
	}
	return SetFact(dir, FactAddresses, was+"     |-- "+address+"\n        /32 host LOCAL\n")
}

// SetFact replaces a file below a facts root at once, so that no agent reads a half of it.
func SetFact(dir, name, content string) error {
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("set fact %s: %w", name, err)
	}
	fresh := path + ".new"
	if err := os.WriteFile(fresh, []byte(content), 0o644); err != nil {
		return fmt.Errorf("set fact %s: %w", name, err)
	}
	return os.Rename(fresh, path)
}

// SetDriver makes a version that of the GPU driver below a facts root.
func SetDriver(dir, version string) error {
	return SetFact(dir, factDriver, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+version+"\n")
}
