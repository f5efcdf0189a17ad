package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// strayEvery is the time between two scans for processes of ended instances: each reads the host's whole list of
// processes.
const strayEvery = 10 * time.Second

// endStrays ends the processes of instances that have ended according to the launch log: an epoch is never launched
// again, so that no process of it may run. It leaves alone a process that only has its working directory there, for
// example a shell in which a person reads the log.
func (d *Driver) endStrays(ctx context.Context) error {
	procs, err := scan(d.root(), marked)
	if err != nil || len(procs) == 0 {
		return err
	}
	return d.endFound(ctx, procs)
}

// endFound ends those of the processes that a scan has found whose instances have ended, and that still run now that
// the log is read: the end of an instance that was under way during the scan is no stray.
func (d *Driver) endFound(ctx context.Context, procs map[string][]proc) error {
	strays := map[instanceKey]int{}
	err := d.launchLog.with(ctx, func(l *content, _ func(entry) error) error {
		for id, found := range procs {
			k, ok := keyOf(id)
			if !ok || l.instances[k] == nil || l.instances[k].Op != opEnded {
				continue
			}
			for _, p := range found {
				if alive(p.pid, p.ticks) {
					strays[k]++
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for processes of ended instances: %w", err)
	}
	var problems []error
	for k, n := range strays {
		problems = append(problems, d.endStraysOf(ctx, k, n))
	}
	return errors.Join(problems...)
}

func (d *Driver) endStraysOf(ctx context.Context, k instanceKey, found int) error {
	if err := endAll(ctx, d.root(), marked, []string{instanceID(k.workspaceID, k.epoch)}, 3*time.Second); err != nil {
		return fmt.Errorf("end what runs of an ended instance: %w", err)
	}
	d.logger.ErrorContext(ctx, "processes of an ended instance were found and ended",
		slog.String("workspace_id", k.workspaceID), slog.Int64("epoch", k.epoch),
		slog.Int("processes", found))
	err := d.launchLog.with(ctx, func(_ *content, write func(entry) error) error {
		return write(entry{Op: opEnded, WorkspaceID: k.workspaceID, Epoch: k.epoch, Strays: found})
	})
	if err != nil {
		return fmt.Errorf("record what ran of an ended instance: %w", err)
	}
	d.discard(k.workspaceID, k.epoch)
	return nil
}
