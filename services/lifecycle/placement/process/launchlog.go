package process

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// LaunchLog returns the entries of the launch log, also those of ended instances and tombstones.
func (d *Driver) LaunchLog(ctx context.Context) (placement.LaunchLog, error) {
	var out placement.LaunchLog
	err := d.launchLog.with(ctx, func(l *content, _ func(entry) error) error {
		out = placement.LaunchLog{Seq: l.seq, Entries: make([]placement.LogEntry, 0, len(l.instances))}
		for k, b := range l.each() {
			out.Entries = append(out.Entries, placement.LogEntry{
				WorkspaceID: k.workspaceID, Epoch: k.epoch, InstanceID: b.InstanceID, First: b.first, Ended: b.ending,
				Fenced: b.Fenced != "",
			})
		}
		var err error
		out.ID, err = d.logID()
		return err
	})
	if err != nil {
		return placement.LaunchLog{}, fmt.Errorf("read launch log: %w", err)
	}
	return out, nil
}

// logID returns the id of the log, and draws it the first time. The id is in a file beside the log, which earlier
// builds do not read.
func (d *Driver) logID() (string, error) {
	path := filepath.Join(d.cfg.Dir, "launches.id")
	there, err := pki.Exists(path)
	if err != nil {
		return "", err
	}
	if !there {
		if err := pki.WriteFile(path, []byte(ids.New()+"\n")); err != nil {
			return "", fmt.Errorf("write id of launch log: %w", err)
		}
	}
	raw, err := pki.ReadFile(path)
	if err != nil {
		return "", err
	}
	id := strings.TrimSpace(string(raw))
	if !ids.Valid(id) {
		return "", fmt.Errorf("id of launch log in %s is not an id", path)
	}
	return id, nil
}
