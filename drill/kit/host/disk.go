package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

const smallDisk = 160 << 20 // the agent keeps a copy of its own program there

// MayMount tries whether this process may mount the small file system of MoveOnto, and leaves nothing behind.
func MayMount() error {
	const needs = "the drill mounts a file system of its own, which this user or host does not allow (run it as root)"
	if os.Geteuid() != 0 {
		return errors.New(needs)
	}
	dir, err := os.MkdirTemp("", "gpuaas-drill-mount-*")
	if err != nil {
		return fmt.Errorf("make a directory to mount on: %w", err)
	}
	err = syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m")
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", needs, err), os.Remove(dir))
	}
	return errors.Join(syscall.Unmount(dir, 0), os.Remove(dir))
}

// MoveOnto moves a directory's content onto a small file system that is mounted there, or from it back.
func MoveOnto(ctx context.Context, dir string, small bool) error {
	aside := dir + ".aside"
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	if err := copyAll(ctx, dir, aside); err != nil {
		return err
	}
	if small {
		if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0711", smallDisk)); err != nil {
			return fmt.Errorf("mount a small disk: %w", err)
		}
	} else {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount the small disk: %w", err)
		}
		if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o711)); err != nil { // workspaces pass
			return err
		}
	}
	return errors.Join(copyAll(ctx, aside+"/.", dir), os.RemoveAll(aside))
}

// copyAll copies a directory with owners, modes and holes.
func copyAll(ctx context.Context, from, to string) error {
	// of our own mesh
	if out, err := exec.CommandContext(ctx, "cp", "-a", "--sparse=always", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}

// Fill takes all room of a file system, to the last block.
func Fill(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600) // of our own mesh
	if err != nil {
		return err
	}
	for _, piece := range []int{1 << 20, 4 << 10} {
		for err == nil {
			_, err = f.Write(make([]byte, piece))
		}
		if !errors.Is(err, syscall.ENOSPC) {
			return errors.Join(err, f.Close())
		}
		err = nil
	}
	return f.Close()
}

// RefusesWrites checks that the file system of a directory refuses writes.
func RefusesWrites(dir string) error {
	path := filepath.Join(dir, "drill-probe")
	const more = 128 << 10
	err := os.WriteFile(path, make([]byte, more), 0o600)
	if removeErr := os.Remove(path); removeErr != nil && !errors.Is(removeErr, os.ErrNotExist) {
		return removeErr
	}
	if !errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("a write of %d KiB was answered %w", more>>10, cmp.Or(err, errors.New("yes")))
	}
	return nil
}
