package plans

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/mesh/internal/pki"
)

// launches holds what the placement of a template wrote about its instances: the lines of its launch log, and the path
// of the log.
type launches struct {
	path  string
	lines []string
}

// readLaunches reads the launch log below a directory of instances.
func readLaunches(dir string) (launches, error) {
	l := launches{path: filepath.Join(dir, "launches.jsonl")}
	raw, err := os.ReadFile(l.path)
	if err != nil {
		return l, fmt.Errorf("read the launch log of the template: %w", err)
	}
	l.lines = slices.Collect(strings.Lines(string(raw)))
	return l, nil
}

// launchTable returns the launch log as a table of one column.
func (t *Template) launchTable() table {
	return table{name: "launches.jsonl", columns: []string{"line"}, types: []string{"text"}, rows: t.launches.lines}
}

// launchLines returns how many lines the launch log of a fleet has.
func (t *Template) launchLines(size Size) int {
	lines := 0
	for _, line := range t.launches.lines {
		lines += size.copies(t.levelOf(line))
	}
	return lines
}

// writeLaunches replaces the launch log by that of a fleet. This process stands in for the agents of all instances, so
// that the placement takes them for running.
func (t *Template) writeLaunches(size Size) error {
	if !t.instances {
		return nil
	}
	ticks, err := ownTicks()
	if err != nil {
		return err
	}
	var out bytes.Buffer
	lines := bufio.NewScanner(t.copies(t.launchTable(), size))
	for seq := 1; lines.Scan(); seq++ {
		entry := map[string]json.RawMessage{}
		if err := json.Unmarshal(lines.Bytes(), &entry); err != nil {
			return fmt.Errorf("read a line of the launch log: %w", err)
		}
		entry["seq"] = json.RawMessage(strconv.Itoa(seq))
		if _, there := entry["pid"]; there {
			entry["pid"], entry["start_ticks"] = json.RawMessage(strconv.Itoa(os.Getpid())), json.RawMessage(ticks)
		}
		line, err := json.Marshal(entry)
		if err != nil {
			return fmt.Errorf("write a line of the launch log: %w", err)
		}
		out.Write(append(line, '\n'))
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("copy the launch log: %w", err)
	}
	if err := pki.WriteFile(t.launches.path, out.Bytes()); err != nil {
		return fmt.Errorf("write the launch log of the fleet: %w", err)
	}
	return nil
}

// ownTicks returns when this process began, in clock ticks since boot (proc(5), field 22 of stat).
func ownTicks() (string, error) {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return "", fmt.Errorf("read when this process began: %w", err)
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return "", errors.New("/proc/self/stat has no time at which this process began")
	}
	return fields[19], nil
}
