package process

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/pki"
)

// compactAt is the share of lines to remove, as one in so many, from which on the launch log is rewritten without them.
const compactAt = 8

// Forget removes workspaces without any row in the database from the launch log, and returns how many lines it removed.
// A workspace stays if one of its instances has not ended, or not for long enough (Config.RememberEnded), if the
// directory of one still exists, or if it has the last line, because the next line's number follows from it. The log is
// rewritten only when at least one line in compactAt goes.
func (d *Driver) Forget(ctx context.Context, workspaceIDs []string) (int, error) {
	forgotten := make(map[string]bool, len(workspaceIDs))
	for _, id := range workspaceIDs {
		forgotten[id] = true
	}
	gone := 0
	err := d.launchLog.with(ctx, func(l *content, _ func(entry) error) error {
		for k, b := range l.each() {
			if !forgotten[k.workspaceID] {
				continue
			}
			there, err := pki.Exists(d.instanceDir(k.workspaceID, k.epoch))
			if err != nil {
				return err
			}
			if b.live() || time.Since(b.endedAt) < d.cfg.RememberEnded || there || b.Seq == l.seq {
				delete(forgotten, k.workspaceID)
			}
		}
		if len(forgotten) == 0 {
			return nil
		}
		var err error
		gone, err = d.launchLog.compactLocked(forgotten)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("compact launch log: %w", err)
	}
	return gone, nil
}

// compactLocked rewrites the log without the lines of some workspaces, if there are enough of these. It replaces the
// whole file by a synced one; each line keeps its number. The caller holds the lock.
//
//nolint:nonamedreturns // the file is closed on every way out
func (j *launchLog) compactLocked(forgotten map[string]bool) (gone int, err error) {
	f, err := os.OpenFile(j.path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open launch log: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	var kept bytes.Buffer
	lines, seq := 0, int64(0)
	for r := bufio.NewReader(f); ; lines++ {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, fmt.Errorf("read launch log: %w", err)
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return 0, fmt.Errorf("%w: line %d: %w", errTorn, lines+1, err)
		}
		numbered := e.Seq != 0
		if !numbered {
			e.Seq = seq + 1
		}
		seq = max(seq, e.Seq)
		if forgotten[e.WorkspaceID] {
			gone++
			continue
		}
		if !numbered { // a numbered line stays as it was read, with fields that another build may have written
			if line, err = json.Marshal(e); err != nil {
				return 0, fmt.Errorf("encode launch: %w", err)
			}
			line = append(line, '\n')
		}
		kept.Write(line)
	}
	if gone == 0 || gone*compactAt < lines {
		return 0, nil
	}
	return gone, j.replace(kept.Bytes())
}

// replace replaces the log by a file with the given text, synced before the rename.
func (j *launchLog) replace(text []byte) error {
	next := j.path + ".next"
	f, err := os.OpenFile(next, os.O_CREATE|os.O_WRONLY|os.O_TRUNC|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("open the next launch log: %w", err)
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		err = errors.Join(err, os.Remove(next))
		return fmt.Errorf("write the next launch log: %w", err)
	}
	if err := os.Rename(next, j.path); err != nil {
		return fmt.Errorf("replace launch log: %w", err)
	}
	if err := pki.SyncDir(filepath.Dir(j.path)); err != nil {
		return fmt.Errorf("sync directory of launch log: %w", err)
	}
	return nil
}
