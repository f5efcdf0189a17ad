package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// The files below a facts root that a drill changes.
const (
	FactKernel = "proc/sys/kernel/osrelease"
	FactBootID = "proc/sys/kernel/random/boot_id"
	factDriver = "proc/driver/nvidia/version"
)

// factFiles are the files of a host from which an agent reads facts.
var factFiles = []string{
	"etc/machine-id", "etc/os-release", FactKernel, FactBootID, "proc/sys/kernel/hostname", "proc/meminfo",
	"proc/self/mounts", factDriver,
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
