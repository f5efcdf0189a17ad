package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Usage is the measured size of one storage, with its limit.
type Usage struct {
	WorkspaceID string
	Name        string
	UsedBytes   int64
	LimitBytes  int64 // 0: none
	Enforced    bool
}

// Over reports whether the limit is exceeded, which can happen where it is only measured.
func (u Usage) Over() bool { return u.LimitBytes > 0 && u.UsedBytes > u.LimitBytes }

// Names returns the names of a workspace's storages whose directories exist, sorted. It measures nothing.
func (s *Store) Names(workspaceID string) ([]string, error) {
	if !validWorkspace(workspaceID) {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the workspace's id is malformed")
	}
	entries, err := fs.ReadDir(s.root.FS(), workspaceID)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list storage of workspace: %w", err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() && validName(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// List returns the usage of every storage of the host, measured now.
func (s *Store) List(ctx context.Context) ([]Usage, error) {
	var out []Usage
	spaces, err := fs.ReadDir(s.root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("list storage: %w", err)
	}
	for _, ws := range spaces {
		if !validWorkspace(ws.Name()) || !ws.IsDir() {
			continue
		}
		entries, err := fs.ReadDir(s.root.FS(), ws.Name())
		if err != nil {
			return nil, fmt.Errorf("list storage: %w", err)
		}
		for _, e := range entries {
			rel, err := relative(ws.Name(), e.Name())
			if err != nil || !e.IsDir() {
				continue
			}
			rec, _, err := s.read(rel)
			if err != nil && !errors.Is(err, errRecord) {
				return nil, err
			}
			used, err := s.measure(ctx, rel)
			if err != nil {
				return nil, err
			}
			out = append(out, Usage{
				WorkspaceID: ws.Name(), Name: e.Name(), UsedBytes: used, LimitBytes: rec.Limit,
				Enforced: rec.Enforced,
			})
		}
	}
	return out, nil
}

// measure returns the bytes in the blocks of all files below rel. A file that vanishes meanwhile is not counted; no
// link is followed.
func (s *Store) measure(ctx context.Context, rel string) (int64, error) {
	var used int64
	err := fs.WalkDir(s.root.FS(), rel, func(_ string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
				return nil
			}
			return err
		}
		info, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // it vanished between the listing and the look
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			used += st.Blocks * 512
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("measure storage: %w", err)
	}
	return used, nil
}
