// Package storage owns the directories that workspaces keep data in on this host.
//
// It trusts its own tree, but not the content: a workspace may put anything there, symbolic links included, so every
// path is walked from an open root and never leaves it. It never reads a workspace's files beyond their sizes, and
// removes storage only at a caller's request.
//
//	<root>/<workspace_id>/          root's, group of the workspace, 0710: only the workspace passes
//	<root>/<workspace_id>/<name>/   the workspace's own uid, 0700
//	<meta>/<workspace_id>/<name>    the record of the requested limit: the agent's own
//
// Guarantees: allocating the same again adopts it; releasing is complete or an error, and releasing nothing succeeds;
// callers get the true answer whether a limit is enforced or only measured. A record that is empty, cut or unreadable
// does not affect other storages: the next allocation of its own storage makes it again, and New removes leftovers of
// an unfinished write. A disk without room is fault node_disk_full.
package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/uid"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Quota limits the size of a directory where the file system can.
type Quota interface {
	// Limit limits dir and all below it to bytes (0: no limit) under the project id, which is unique to it. False without
	// an error means that this file system cannot.
	Limit(dir string, project uint32, bytes int64) (bool, error)
	// Project returns the project id that a directory has; zero for none.
	Project(dir string) uint32
}

// Config sets where storage is. Workspaces must be able to traverse Root and everything above it.
type Config struct {
	Root    string
	MetaDir string // the agent's own, mode 0700
}

// Deps are what a Store needs. With a nil Quota limits are only measured.
type Deps struct {
	Logger *slog.Logger
	UIDs   *uid.Table
	Quota  Quota
}

// Store makes, measures and removes the storage of workspaces. It is safe for concurrent use.
type Store struct {
	deps Deps
	path string
	root *os.Root
	meta *os.Root

	mu sync.Mutex // one change at a time: they are rare
}

// record is the requested limit of a storage and its project id.
type record struct {
	Limit    int64  `json:"limit_bytes"`
	Project  uint32 `json:"project"`
	Enforced bool   `json:"enforced"`
}

const firstProject = 1 << 20 // lower ids are left to the host's administrator

// New opens the two trees, makes them if need be, and removes leftovers of an unfinished write. Close closes them.
func New(deps Deps, cfg Config) (*Store, error) {
	if deps.Logger == nil || deps.UIDs == nil || cfg.Root == "" || cfg.MetaDir == "" {
		return nil, errors.New("make storage: logger, uid table, root or meta directory is missing")
	}
	path, err := filepath.Abs(cfg.Root)
	if err != nil {
		return nil, fmt.Errorf("make storage: %w", err)
	}
	if err := makeDir(path, 0o711); err != nil {
		return nil, err
	}
	if err := makeDir(cfg.MetaDir, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("open storage: %w", err)
	}
	meta, err := os.OpenRoot(cfg.MetaDir)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open storage: %w", err), root.Close())
	}
	s := &Store{deps: deps, path: path, root: root, meta: meta}
	if err := s.sweep(); err != nil {
		return nil, errors.Join(fmt.Errorf("open storage: %w", err), s.Close())
	}
	return s, nil
}

func makeDir(path string, mode os.FileMode) error {
	if err := os.MkdirAll(path, mode); err != nil {
		return fmt.Errorf("make directory of storage: %w", err)
	}
	if err := os.Chmod(path, mode); err != nil {
		return fmt.Errorf("close directory of storage: %w", err)
	}
	return nil
}

// Close closes the trees; nothing in them changes.
func (s *Store) Close() error { return errors.Join(s.root.Close(), s.meta.Close()) }

// Path returns where the storage of that name is, and false if there is none.
func (s *Store) Path(workspaceID, name string) (string, bool, error) {
	rel, err := relative(workspaceID, name)
	if err != nil {
		return "", false, err
	}
	info, err := s.root.Lstat(rel)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("find storage: %w", err)
	}
	return filepath.Join(s.path, rel), info.IsDir(), nil
}

// Allocate makes the storage, or adopts it with the new limit.
func (s *Store) Allocate(ctx context.Context, workspaceID, name string, limit int64) (*nodev1.StorageAllocateOutput,
	error,
) {
	rel, err := relative(workspaceID, name)
	if err != nil {
		return nil, err
	}
	if limit < 0 {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the size of storage is negative")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	owner, err := s.deps.UIDs.Of(workspaceID)
	if err != nil {
		return nil, failed(err)
	}
	adopted, err := s.make(workspaceID, rel, owner)
	if err != nil {
		return nil, failed(err)
	}
	rec, err := s.limit(rel, limit)
	if err != nil {
		return nil, failed(err)
	}
	used, err := s.measure(ctx, rel)
	if err != nil {
		return nil, failed(err)
	}
	return &nodev1.StorageAllocateOutput{
		// from a range of ids
		Path: filepath.Join(s.path, rel), Uid: int32(owner), Enforced: rec.Enforced, UsedBytes: used, Adopted: adopted,
	}, nil
}

func failed(err error) error {
	if room.IsFull(err) {
		return fault.New(commonv1.Reason_REASON_NODE_DISK_FULL, "", fault.Cause(err))
	}
	return fault.New(commonv1.Reason_REASON_STORAGE_FAILED, "the node could not provide the storage", fault.Cause(err))
}

func (s *Store) make(workspaceID, rel string, owner int) (bool, error) {
	if err := s.root.Mkdir(workspaceID, 0o710); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, fmt.Errorf("make directory of workspace: %w", err)
	}
	if s.deps.UIDs.Enabled() {
		if err := s.root.Lchown(workspaceID, os.Getuid(), owner); err != nil {
			return false, fmt.Errorf("let the workspace pass: %w", err)
		}
	}
	if err := s.root.Chmod(workspaceID, 0o710); err != nil {
		return false, fmt.Errorf("let the workspace pass: %w", err)
	}
	adopted := false
	if err := s.root.Mkdir(rel, 0o700); err != nil {
		if !errors.Is(err, fs.ErrExist) {
			return false, fmt.Errorf("make storage: %w", err)
		}
		// The workspace cannot have replaced the directory: the one above is not its own.
		info, err := s.root.Lstat(rel)
		if err != nil {
			return false, fmt.Errorf("find storage: %w", err)
		}
		if !info.IsDir() {
			return false, fmt.Errorf("storage %s is not a directory", rel)
		}
		adopted = true
	}
	if s.deps.UIDs.Enabled() {
		if err := s.root.Lchown(rel, owner, owner); err != nil {
			return false, fmt.Errorf("give storage to the workspace: %w", err)
		}
	}
	return adopted, syncDir(s.root, workspaceID)
}

// syncDir makes the entries of a directory durable.
func syncDir(root *os.Root, rel string) error {
	d, err := root.Open(rel)
	if err == nil {
		err = errors.Join(d.Sync(), d.Close())
	}
	if err != nil {
		return fmt.Errorf("sync storage: %w", err)
	}
	return nil
}

// limit records the requested limit and has it enforced where the host can.
func (s *Store) limit(rel string, limit int64) (record, error) {
	rec, found, err := s.read(rel)
	if errors.Is(err, errRecord) {
		s.deps.Logger.Warn("storage record is made again", slog.String("storage", rel), slog.Any("error", err))
		rec, found, err = record{Project: s.projectOf(rel)}, true, nil
	}
	if err != nil {
		return record{}, err
	}
	if rec.Project == 0 {
		if rec.Project, err = s.nextProject(); err != nil {
			return record{}, err
		}
	}
	rec.Limit, rec.Enforced = limit, false
	// The number is on disk before it is used, so that it is never given twice.
	if err := s.write(rel, rec); err != nil {
		return record{}, err
	}
	if s.deps.Quota == nil || limit == 0 && !found {
		return rec, nil
	}
	held, err := s.deps.Quota.Limit(filepath.Join(s.path, rel), rec.Project, limit)
	if err != nil {
		s.deps.Logger.Warn("storage limit is not enforced", slog.String("storage", rel), slog.Any("error", err))
	}
	rec.Enforced = held && err == nil && limit > 0
	return rec, s.write(rel, rec)
}

// Release removes the storage and everything in it, and returns whether there was any.
func (s *Store) Release(_ context.Context, workspaceID, name string) (bool, error) {
	rel, err := relative(workspaceID, name)
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err = s.root.Lstat(rel)
	existed := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, failed(err)
	}
	if err := s.root.RemoveAll(rel); err != nil {
		return existed, failed(fmt.Errorf("remove storage: %w", err))
	}
	// The record is removed last: after that the project id may be given again.
	for _, r := range []*os.Root{s.root, s.meta} {
		if r == s.meta {
			if err := errors.Join(r.RemoveAll(rel), r.RemoveAll(unfinished(rel))); err != nil {
				return existed, failed(fmt.Errorf("remove storage record: %w", err))
			}
		}
		if err := r.Remove(workspaceID); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTEMPTY) {
			return existed, failed(fmt.Errorf("remove directory of workspace: %w", err))
		}
	}
	return existed, nil
}
