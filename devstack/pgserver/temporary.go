package pgserver

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// EnvShared names the variable with the administrator's URL of a Postgres that all packages of one test run share. The
// command sharedpg sets it, and tests that find it start no server.
const EnvShared = "GPUAAS_TEST_PG"

// temporaryPattern matches the directories of temporary servers; it finds leftovers of killed test runs.
const temporaryPattern = "gpuaas-testpg-*"

// Temporary is a server for tests, in a directory that is removed with it.
type Temporary struct {
	*Server

	dir string
}

// StartTemporary starts a server in a fresh temporary directory, for many short-lived databases that do not outlive
// this host. It removes the directories that killed runs have left. The caller ends the server by Remove.
func StartTemporary(ctx context.Context, log *slog.Logger) (*Temporary, error) {
	sweepTemporary()
	dir, err := os.MkdirTemp("", temporaryPattern)
	if err != nil {
		return nil, fmt.Errorf("make postgres directory: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // the server's uid must traverse it
		return nil, fmt.Errorf("open postgres directory: %w", err)
	}
	// Inside, so that it is swept up with the rest; unless the temporary directory has too long a name for a socket.
	sockets := filepath.Join(dir, "s")
	if len(sockets) > 80 {
		sockets = ""
	}
	s, err := Start(ctx, Config{
		Dir: dir, SocketDir: sockets, Logger: log,
		// Many short-lived databases: no checkpoint storms, and no vacuum racing a template clone. Each clone is a
		// checkpoint, after which pages would be logged whole, against a crash of the host that these databases do not
		// survive in any case.
		Settings: map[string]string{
			"max_connections": "400", "checkpoint_timeout": "15min", "log_min_messages": "fatal", "full_page_writes": "off",
		},
	})
	if err != nil {
		_ = os.RemoveAll(dir)
		return nil, fmt.Errorf("start test postgres: %w", err)
	}
	return &Temporary{Server: s, dir: dir}, nil
}

// Remove stops the server, also if ctx has ended, and removes its directory.
func (t *Temporary) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	if err := t.Stop(ctx); err != nil {
		return fmt.Errorf("stop test postgres: %w", err)
	}
	return os.RemoveAll(t.dir)
}

// sweepTemporary removes the directories of processes that were killed: those whose owner lock is free.
func sweepTemporary() {
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), temporaryPattern))
	if err != nil {
		return
	}
	for _, dir := range dirs {
		f, err := os.Open(filepath.Join(dir, "owner.lock")) // our own pattern
		if err != nil {
			continue // being made just now, or not ours
		}
		st, err := f.Stat()
		old := err == nil && time.Since(st.ModTime()) > 10*time.Minute
		if old && syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			_ = os.RemoveAll(dir)
		}
		_ = f.Close()
	}
}
