package pki

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// fileMode is the mode of everything this package writes: most of it is a key, and nothing needs to be read by another
// user.
const (
	fileMode fs.FileMode = 0o600
	dirMode  fs.FileMode = 0o700
)

// Names of the files of an identity directory.
const (
	// IdentityFile holds the private key and its chain in one file: two files cannot be replaced in one step, and a crash
	// between them would leave a key that does not match its certificate.
	IdentityFile = "identity.pem"
	// BundleFile holds the roots that this identity's owner trusts.
	BundleFile = "ca.pem"
)

// WriteFile replaces path with data: mode 0600, synced, and the directory synced after the rename. After it returns nil
// the new content survives a crash; before, the old content does. A file that root writes gets the owner of the
// directory, so that a service that runs as another user can read every file of its own.
func WriteFile(path string, data []byte) (err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*") // CreateTemp opens with 0600
	if err != nil {
		return fmt.Errorf("create temporary file: %w", err)
	}
	tmp := f.Name()
	defer func() {
		if err != nil {
			err = errors.Join(err, ignoreMissing(os.Remove(tmp)))
		}
	}()
	if err := giveToOwner(f, dir); err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), f.Close())
	}
	if _, err := f.Write(data); err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), f.Close())
	}
	if err := f.Sync(); err != nil {
		return errors.Join(fmt.Errorf("sync %s: %w", path, err), f.Close())
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("close %s: %w", path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return SyncDir(dir)
}

// giveToOwner gives a file that root has made to the owner of its directory.
func giveToOwner(f *os.File, dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	st, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("look at directory: %w", err)
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	if !ok || owner.Uid == 0 {
		return nil
	}
	if err := f.Chown(int(owner.Uid), int(owner.Gid)); err != nil {
		return fmt.Errorf("give it to the owner of the directory: %w", err)
	}
	return nil
}

// SyncDir makes the names in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open directory: %w", err)
	}
	if err := d.Sync(); err != nil {
		return errors.Join(fmt.Errorf("sync directory: %w", err), d.Close())
	}
	if err := d.Close(); err != nil {
		return fmt.Errorf("close directory: %w", err)
	}
	return nil
}

// WithLock runs fn while holding an exclusive advisory lock on path, which is created if missing. Replicas that share a
// directory use it so that only one of them creates a key. The lock goes with the process, so a crash never leaves it
// behind.
func WithLock(path string, fn func() error) (err error) {
	if err := os.MkdirAll(filepath.Dir(path), dirMode); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, fileMode)
	if err != nil {
		return fmt.Errorf("open lock: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EINTR) {
			return fmt.Errorf("lock %s: %w", path, err)
		}
	}
	return fn()
}

// Exists reports whether path exists; any failure other than its absence is an error.
func Exists(path string) (bool, error) {
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at file: %w", err)
	}
	return true, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
