package process

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/isolation"
)

// DemoCommand as the first element of a command means the built-in demo workload: a small HTTP server.
const DemoCommand = "@demo"

const demoSubcommand = "demo-workload"

// substituteDemo replaces DemoCommand by the agent's own binary: the binary itself where the workspace can reach it,
// else a copy.
func (r *Runtime) substituteDemo(s *spec) error {
	if s.Argv[0] != DemoCommand {
		return nil
	}
	path, err := filepath.EvalSymlinks(r.cfg.Executable) // of /proc/self/exe too, unless the file was replaced since
	if err != nil || (s.UID >= 0 && !isolation.Reachable(path)) {
		if path, err = r.copyBinary(path); err != nil {
			return err
		}
	}
	s.Argv = append([]string{path, demoSubcommand}, s.Argv[1:]...)
	return nil
}

const copyLeftover = ".copy-"

// copyBinary puts the running binary where workspaces can execute it, under a name that differs between versions, and
// returns its path. It makes a link where that is enough.
func (r *Runtime) copyBinary(from string) (string, error) {
	in, err := os.Open(r.cfg.Executable)
	if err != nil {
		return "", fmt.Errorf("open own binary: %w", err)
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return "", fmt.Errorf("open own binary: %w", err)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %d", programName, info.Size(), info.ModTime().UnixNano()))
	dir := filepath.Join(r.cfg.WorkDir, "bin")
	path := filepath.Join(dir, programName+"-"+hex.EncodeToString(sum[:6]))
	if have, err := os.Stat(path); err == nil && have.Size() == info.Size() {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { // workspaces execute from it
		return "", fmt.Errorf("make directory for own binary: %w", err)
	}
	if info.Mode()&0o005 == 0o005 && from != "" && os.Link(from, path) == nil {
		return path, nil
	}
	out, err := os.CreateTemp(dir, copyLeftover+"*")
	if err != nil {
		return "", fmt.Errorf("copy own binary: %w", err)
	}
	_, err = io.Copy(out, in)
	err = errors.Join(err, out.Chmod(0o755), out.Sync(), out.Close())
	if err == nil {
		err = os.Rename(out.Name(), path)
	}
	if err != nil {
		_ = os.Remove(out.Name())
		return "", fmt.Errorf("copy own binary: %w", err)
	}
	return path, nil
}

// DemoMain is the subcommand `demo-workload` of the agent's binary: it serves / and /healthz on $PORT of $HOST (default
// 127.0.0.1) until SIGTERM or SIGINT. It returns the exit code.
func DemoMain([]string) int {
	port := os.Getenv("PORT")
	if port == "" {
		fmt.Fprintln(os.Stderr, "demo workload: PORT is not set")
		return 64
	}
	host := cmp.Or(os.Getenv("HOST"), "127.0.0.1")
	//nolint:forbidigo // the main function of a subcommand
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := serveDemo(ctx, net.JoinHostPort(host, port), time.Now()); err != nil {
		fmt.Fprintln(os.Stderr, "demo workload:", err)
		return 1
	}
	return 0
}

func serveDemo(ctx context.Context, address string, started time.Time) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"workload": os.Getenv("GPUAAS_WORKLOAD"), "workspace_id": os.Getenv("GPUAAS_WORKSPACE_ID"),
			"epoch": os.Getenv("GPUAAS_EPOCH"), "pid": os.Getpid(), "uid": os.Getuid(),
			"gpus": os.Getenv("CUDA_VISIBLE_DEVICES"), "started_at": started.UTC(),
		})
	})
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	fmt.Fprintln(os.Stdout, "demo workload: serving on", listener.Addr())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	shutdown, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := server.Shutdown(shutdown); err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	return nil
}
