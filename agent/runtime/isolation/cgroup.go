package isolation

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/mesh/internal/cgroup"
)

// Cgroups are the control groups in which workloads run on this host. The zero value means that they run in none.
//
// With version 2 every workload has one directory; with version 1 one in each hierarchy that is of use: pids (a bound
// on forking), freezer (so that nothing forks away from a kill) and devices (the GPUs of others). Memory has no bound
// in a workload's spec, so its hierarchy is left alone.
type Cgroups struct {
	Version int      // 0: none
	Roots   []string // directories of the agent, one per hierarchy, with those of the workspaces
}

// DetectCgroups finds the hierarchies in which this process may make groups, and makes the agent's own in them, each
// recorded in the agent's state directory first. It returns the zero value where nothing can be made.
func DetectCgroups(stateDir string) Cgroups {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return Cgroups{}
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Cgroups{}
	}
	return detect(string(mounts), string(own), cgroup.Name(stateDir), func(dir string) error {
		// Without a record the groups stay behind if this agent is killed, which is better than to run workloads without
		// them.
		_ = cgroup.Record(stateDir, dir)
		return tryMake(dir)
	})
}

// wanted returns the controllers of version 1 that are used, in the order in which members are looked up in them.
func wanted() []string { return []string{"pids", "freezer", "devices"} }

func detect(mounts, own, rel string, try func(string) error) Cgroups {
	unified, hierarchies := "", map[string]string{}
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		switch f[2] {
		case "cgroup2":
			unified = f[1]
		case "cgroup":
			for option := range strings.SplitSeq(f[3], ",") {
				if slices.Contains(wanted(), option) {
					hierarchies[option] = f[1]
				}
			}
		}
	}
	path := map[string]string{} // controller, or "" for version 2, to the agent's own group
	for line := range strings.Lines(own) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) == 3 {
			for c := range strings.SplitSeq(parts[1], ",") {
				path[c] = parts[2]
			}
		}
	}
	if len(hierarchies) == 0 && unified != "" {
		// The root is a sibling of the agent's group, not a child: a group with processes of its own cannot enable
		// controllers for children.
		root := filepath.Join(unified, filepath.Dir(path[""]), rel)
		if try(root) == nil {
			return Cgroups{Version: 2, Roots: []string{root}}
		}
		return Cgroups{}
	}
	out := Cgroups{Version: 1}
	for _, c := range wanted() {
		mount, ok := hierarchies[c]
		if !ok {
			continue
		}
		root := filepath.Join(mount, path[c], rel)
		if try(root) == nil {
			out.Roots = append(out.Roots, root)
		}
	}
	if len(out.Roots) == 0 {
		return Cgroups{}
	}
	return out
}

func tryMake(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { // the kernel's file system: modes are not secrets
		return err
	}
	// Version 2 enables controllers level by level; where that fails, the group can still be used to find its members.
	for _, d := range []string{filepath.Dir(filepath.Dir(dir)), filepath.Dir(dir), dir} {
		_ = writeControl(filepath.Join(d, "cgroup.subtree_control"), "+pids")
	}
	return nil
}

// Create makes the groups of one workload and returns their directories, in the order of c.Roots.
func (c Cgroups) Create(workspaceID, name string, maxPIDs int, denied []string) ([]string, error) {
	var dirs []string
	for _, root := range c.Roots {
		if c.Version == 2 {
			ws := filepath.Join(root, workspaceID)
			if err := tryMakeAll(ws); err != nil {
				return nil, err
			}
			_ = writeControl(filepath.Join(ws, "cgroup.subtree_control"), "+pids")
		}
		dir := filepath.Join(root, workspaceID, name)
		if err := tryMakeAll(dir); err != nil {
			return nil, err
		}
		if err := writeControl(filepath.Join(dir, "pids.max"), strconv.Itoa(maxPIDs)); err != nil &&
			!errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("bound the processes of a workload: %w", err)
		}
		for _, rule := range denied {
			if err := writeControl(filepath.Join(dir, "devices.deny"), rule); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("deny a workload the devices of others: %w", err)
			}
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}

func tryMakeAll(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { // the kernel's file system: modes are not secrets
		return fmt.Errorf("make control group: %w", err)
	}
	return nil
}

// RemoveCgroups removes the groups of a workload, and those of its workspace if they are empty: rmdir fails for those
// in use.
func RemoveCgroups(dirs []string) {
	for _, dir := range dirs {
		if os.Remove(dir) == nil {
			_ = os.Remove(filepath.Dir(dir))
		}
	}
}

// Sweep removes the empty groups of workloads that known does not name: a group is busy for a moment after its last
// process has ended, and a crash may come between the end of a workload and the removal of its group.
func (c Cgroups) Sweep(known func(workspaceID, name string) bool) {
	for _, root := range c.Roots {
		spaces, err := os.ReadDir(root)
		if err != nil {
			continue
		}
		for _, space := range spaces {
			names, err := os.ReadDir(filepath.Join(root, space.Name()))
			if err != nil {
				continue // a file of the group
			}
			for _, name := range names {
				if name.IsDir() && !known(space.Name(), name.Name()) {
					_ = os.Remove(filepath.Join(root, space.Name(), name.Name()))
				}
			}
			_ = os.Remove(filepath.Join(root, space.Name()))
		}
	}
}

// Join moves a process into the groups.
func Join(pid int, dirs []string) error {
	for _, dir := range dirs {
		if err := writeControl(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			return err
		}
	}
	return nil
}

// Joined reports whether the process is in all of the groups, which is part of its identity when it is adopted.
func Joined(pid int, dirs []string) bool {
	return !slices.ContainsFunc(dirs, func(dir string) bool { return !slices.Contains(cgroupMembers(dir), pid) })
}

// freeze freezes (on) or thaws every process of the workload's control groups, where the host can.
func freeze(dirs []string, on bool) {
	for _, dir := range dirs {
		v1, v2 := "THAWED", "0"
		if on {
			v1, v2 = "FROZEN", "1"
		}
		if writeControl(filepath.Join(dir, "freezer.state"), v1) != nil {
			// on a host without either the processes are not frozen; kill lists them again
			_ = writeControl(filepath.Join(dir, "cgroup.freeze"), v2)
		}
	}
}

func cgroupMembers(dir string) []int {
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // made by the agent
	if err != nil {
		return nil
	}
	var out []int
	for line := range strings.FieldsSeq(string(data)) {
		if pid, err := strconv.Atoi(line); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// writeControl writes to an existing file of the control group file system. It creates none.
func writeControl(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0) // made by the agent
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
