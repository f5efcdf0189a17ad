package isolation

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// MakeDirectory makes a working directory that its owner alone may enter; an owner below zero is the agent itself. One
// that is there is kept.
func MakeDirectory(dir string, owner int) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil { // passed through, not read
		return fmt.Errorf("make working directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make working directory: %w", err)
	}
	if owner >= 0 {
		if err := os.Lchown(dir, owner, owner); err != nil {
			return fmt.Errorf("give working directory to the workspace: %w", err)
		}
	}
	return nil
}

// Reachable reports whether any user may execute path: it and every directory above it are open to others.
func Reachable(path string) bool {
	for {
		info, err := os.Stat(path)
		if err != nil || info.Mode()&0o001 == 0 {
			return false
		}
		if !info.IsDir() && info.Mode()&0o004 == 0 {
			return false
		}
		up := filepath.Dir(path)
		if up == path {
			return true
		}
		path = up
	}
}

// CheckReachable returns an error that names the directory above path which users other than its owner cannot traverse.
func CheckReachable(path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	for {
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		case info.Mode()&0o001 == 0:
			return fmt.Errorf("workspaces cannot pass through %s (mode %04o): choose a directory that other users may traverse",
				path, info.Mode().Perm())
		}
		up := filepath.Dir(path)
		if up == path {
			return nil
		}
		path = up
	}
}
