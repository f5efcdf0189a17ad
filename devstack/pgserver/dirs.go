package pgserver

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// maxSocketPath is what sockaddr_un holds on the smaller of our platforms (macOS), less the terminating zero.
const maxSocketPath = 103

// traversable reports the first directory on the way to path that uid may not enter. A negative uid means that this
// process keeps its own identity, so every path that it can reach is good.
func traversable(path string, uid int) error {
	if uid < 0 {
		return nil
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("resolve path: %w", err)
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		path = resolved
	}
	for dir := path; ; dir = filepath.Dir(dir) {
		st, err := os.Stat(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return fmt.Errorf("stat directory: %w", err)
		default:
			sys, ok := st.Sys().(*syscall.Stat_t)
			mine := ok && int(sys.Uid) == uid && st.Mode().Perm()&0o100 != 0
			if !mine && st.Mode().Perm()&0o001 == 0 {
				return fmt.Errorf("uid %d, which Postgres runs as, may not enter %s (mode %04o): choose a directory it may "+
					"traverse, such as one under /var/lib or /tmp, or run as an ordinary user", uid, dir, st.Mode().Perm())
			}
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

// socketDir makes the short private directory of the unix socket. Its name follows from the data's path, so that a
// start after a crash finds the leftovers instead of leaving one more directory behind.
func socketDir(configured, root string, uid, gid int) (string, error) {
	dir := configured
	if dir == "" {
		abs, err := filepath.Abs(root)
		if err != nil {
			return "", fmt.Errorf("resolve path: %w", err)
		}
		sum := sha256.Sum256([]byte(abs))
		dir = filepath.Join("/tmp", fmt.Sprintf("gpuaas-pg-%d-%s", max(uid, os.Getuid()), hex.EncodeToString(sum[:6])))
	}
	if full := filepath.Join(dir, ".s.PGSQL.65535.lock"); len(full) > maxSocketPath {
		return "", fmt.Errorf("socket directory %s is too long: %d characters, at most %d", dir, len(dir),
			maxSocketPath-len(full)+len(dir))
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil { // the server's uid must traverse it
		return "", fmt.Errorf("make socket directory: %w", err)
	}
	err := os.Mkdir(dir, 0o755) // services under other uids connect through it
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make socket directory: %w", err)
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("inspect socket directory: %w", err)
	}
	// The default name is predictable and every user may write to /tmp: a directory or link that another user put there is
	// refused.
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !st.IsDir() || !ok || (int(sys.Uid) != os.Getuid() && int(sys.Uid) != uid) || st.Mode().Perm()&0o022 != 0 {
		return "", fmt.Errorf("socket directory %s exists and is not ours alone (mode %s): remove it or set another", dir,
			st.Mode())
	}
	if uid >= 0 {
		if err := os.Lchown(dir, uid, gid); err != nil {
			return "", fmt.Errorf("hand socket directory to the server's uid: %w", err)
		}
	}
	return dir, traversable(dir, uid)
}

// lockDir keeps a second owner away from root for as long as the returned file is open; the kernel releases the lock
// when this process dies.
func lockDir(root string) (*os.File, error) {
	// root is the caller's
	f, err := os.OpenFile(filepath.Join(root, "owner.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open owner lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := os.ReadFile(f.Name()) // only decorates the error
		_ = f.Close()
		return nil, fmt.Errorf("%w: process %s runs a server on %s", ErrInUse, strings.TrimSpace(string(holder)), root)
	}
	if err := f.Truncate(0); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("write owner lock: %w", err)
	}
	if _, err := fmt.Fprintf(f, "%d\n", os.Getpid()); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("write owner lock: %w", err)
	}
	return f, nil
}

// ErrInUse is returned if another live process owns the directory.
var ErrInUse = errors.New("the Postgres directory is in use")

// loadPassword reads the superuser's password, or generates one before the cluster exists. The file is complete or
// absent.
func loadPassword(path string) (string, error) {
	b, err := os.ReadFile(path) // path is ours
	if err == nil {
		return strings.TrimSpace(string(b)), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read superuser password: %w", err)
	}
	password := rand.Text()
	if err := writeDurably(path, password+"\n"); err != nil {
		return "", fmt.Errorf("keep superuser password: %w", err)
	}
	return password, nil
}

func writeDurably(path, content string) error {
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600) // path is ours
	if err != nil {
		return err
	}
	if _, err = f.WriteString(content); err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}
