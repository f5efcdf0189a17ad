package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/cgroup"
)

// pruneEvery is the time between two scans of the directories of ended instances.
const pruneEvery = 10 * time.Minute

// discard removes the keys, the data and the control groups of an ended instance. Its logs and diagnostics stay as
// evidence until prune removes them.
func (d *Driver) discard(workspaceID string, epoch int64) {
	dir := d.instanceDir(workspaceID, epoch)
	keep := map[string]bool{"agent.log": true, "diagnostics.jsonl": true}
	if err := cgroup.Remove(filepath.Join(dir, "state")); err != nil {
		d.logger.Warn("control groups of an ended instance not removed; tried again later", slog.String("path", dir),
			slog.Any("error", err))
		keep[cgroup.File] = true
	}
	for _, sub := range []string{"etc", "state"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil {
			continue
		}
		for _, e := range entries {
			if keep[e.Name()] || strings.HasPrefix(e.Name(), "diag") {
				continue
			}
			if err := os.RemoveAll(filepath.Join(dir, sub, e.Name())); err != nil {
				d.logger.Warn("instance's files not removed", slog.String("path", e.Name()), slog.Any("error", err))
			}
		}
	}
}

// prune removes the directories of instances that ended longer than KeepEnded ago, and the oldest of those beyond
// KeepEndedMax. It keeps a directory whose control groups it cannot remove, because the record of them is in it. Its
// work grows with the directories that exist, not with all that was ever launched. It leaves alone a directory that is
// not in the launch log.
func (d *Driver) prune(ctx context.Context, now time.Time) error {
	entries, err := os.ReadDir(d.root())
	if err != nil {
		return fmt.Errorf("list directories of instances: %w", err)
	}
	type old struct {
		dir     string
		endedAt time.Time
	}
	var ended []old
	err = d.launchLog.with(ctx, func(l *content, _ func(entry) error) error {
		for _, e := range entries {
			k, ok := keyOf(e.Name())
			if b := l.instances[k]; ok && b != nil && b.Op == opEnded {
				ended = append(ended, old{dir: filepath.Join(d.root(), e.Name()), endedAt: b.endedAt})
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for directories of ended instances: %w", err)
	}
	slices.SortFunc(
		ended, func(a, b old) int { return cmp.Or(b.endedAt.Compare(a.endedAt), strings.Compare(a.dir, b.dir)) },
	)
	var problems []error
	for i, o := range ended {
		state := filepath.Join(o.dir, "state")
		if err := cgroup.Remove(state); err != nil {
			problems = append(problems, err)
			continue // the record of the groups is in the directory
		}
		if i < d.cfg.KeepEndedMax && now.Sub(o.endedAt) < d.cfg.KeepEnded {
			continue
		}
		if err := os.RemoveAll(o.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, fmt.Errorf("remove directory of ended instance: %w", err))
		}
	}
	return errors.Join(problems...)
}
