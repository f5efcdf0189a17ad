package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"
)

type restart struct {
	next time.Time
	wait time.Duration
}

// Keep powers on instances whose agent has died, and ends processes of instances that have ended, until ctx ends.
func (d *Driver) Keep(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var swept, pruned time.Time
	for {
		if time.Since(pruned) >= pruneEvery {
			if err := d.prune(ctx, time.Now()); err != nil && ctx.Err() == nil {
				d.logger.WarnContext(ctx, "directories of ended instances not removed", slog.Any("error", err))
			}
			pruned = time.Now()
		}
		if time.Since(swept) >= strayEvery {
			if err := d.endStrays(ctx); err != nil && ctx.Err() == nil {
				d.logger.WarnContext(ctx, "processes of ended instances not ended", slog.Any("error", err))
			}
			swept = time.Now()
		}
		if err := d.keepOnce(ctx); err != nil {
			d.logger.WarnContext(ctx, "instances not kept", slog.Any("error", err))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (d *Driver) keepOnce(ctx context.Context) error {
	err := d.launchLog.with(ctx, func(l *content, write func(entry) error) error {
		var errs []error
		for k, b := range l.live() {
			if (b.Op != opLaunched && b.Op != opRestarted) || alive(b.PID, b.StartTicks) || !d.due(k) {
				continue
			}
			if err := d.restore(ctx, k, b, write); err != nil {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("keep instances: %w", err)
	}
	return nil
}

// due paces restarts of an instance that keeps dying.
func (d *Driver) due(k instanceKey) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.off {
		return false
	}
	now := time.Now()
	// An instance that was not restarted for a while is paced anew, and one that has ended is forgotten.
	maps.DeleteFunc(d.backoff, func(_ string, r restart) bool { return now.Sub(r.next) > time.Minute })
	id := instanceID(k.workspaceID, k.epoch)
	r := d.backoff[id]
	if now.Before(r.next) {
		return false
	}
	r.wait = min(max(2*r.wait, 500*time.Millisecond), 30*time.Second)
	r.next = now.Add(r.wait)
	d.backoff[id] = r
	return true
}

func (d *Driver) restore(ctx context.Context, k instanceKey, b *instance, write func(entry) error) error {
	pid, err := d.start(k.workspaceID, k.epoch, b.GPUs, nil)
	if err != nil {
		return err
	}
	d.logger.InfoContext(ctx, "instance powered on again", slog.String("workspace_id", k.workspaceID),
		slog.Int64("epoch", k.epoch), slog.Int("pid", pid))
	return write(entry{Op: opRestarted, WorkspaceID: k.workspaceID, Epoch: k.epoch, PID: pid, StartTicks: startTicks(pid)})
}
