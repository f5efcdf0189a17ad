// Package process owns the child processes of a bench: the measured program and its load, each in a process of its own.
//
// A child is the same binary with a hidden command. It reads requests as lines of JSON on its stdin and answers each
// with one on its stdout.
package process

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/internal/app"
)

type request[Args any] struct {
	Verb string `json:"verb"`
	Args Args   `json:"args"`
}

type answer struct {
	Result json.RawMessage `json:"result,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// Child is a running child process. It is used by one goroutine.
type Child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// Command makes the command of a child of a kind.
type Command func(kind string) *exec.Cmd

// Start starts a child. It dies with this process.
func Start(command Command, kind string) (*Child, error) {
	cmd := command(kind)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("open stdin of %s: %w", kind, err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("open stdout of %s: %w", kind, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", kind, err)
	}
	return &Child{cmd: cmd, in: in, out: bufio.NewReaderSize(out, 1<<20)}, nil
}

// PID returns the process id.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Ask sends the child a request and waits for its answer, for at most the given time. result may be nil.
func (c *Child) Ask(ctx context.Context, within time.Duration, verb string, args, result any) error {
	line, err := json.Marshal(request[any]{Verb: verb, Args: args})
	if err != nil {
		return fmt.Errorf("ask %s: %w", verb, err)
	}
	if _, err := c.in.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("ask %s: %w", verb, err)
	}
	// A child that does not answer is killed, which ends the read.
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = c.cmd.Process.Kill() })
	defer stop()
	text, err := c.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("ask %s: %w", verb, errors.Join(err, ctx.Err()))
	}
	var a answer
	if err := json.Unmarshal(text, &a); err != nil {
		return fmt.Errorf("read answer to %s: %w", verb, err)
	}
	if a.Error != "" {
		return fmt.Errorf("%s: %s", verb, a.Error)
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(a.Result, result); err != nil {
		return fmt.Errorf("read answer to %s: %w", verb, err)
	}
	return nil
}

// Await asks the child for a count until it is the given one, for at most the given time, and returns the last count.
func (c *Child) Await(ctx context.Context, within time.Duration, verb string, want int) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		var count int
		if err := c.Ask(ctx, time.Minute, verb, nil, &count); err != nil || count >= want {
			return count, err
		}
		if !app.Sleep(ctx, 5*time.Millisecond) {
			return count, fmt.Errorf("await %s: %d of %d: %w", verb, count, want, context.Cause(ctx))
		}
	}
}

// Stop ends the child: by the end of its stdin, or after a while by force.
func (c *Child) Stop() {
	_ = c.in.Close()
	timer := time.AfterFunc(10*time.Second, func() { _ = c.cmd.Process.Kill() })
	defer timer.Stop()
	_ = c.cmd.Wait()
}

// Kill ends the child by SIGKILL, at any point of its work, and returns when it is dead.
func (c *Child) Kill() error {
	if err := c.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	_ = c.cmd.Wait() // it says that it was killed
	return nil
}

// Verbs are the requests that a child can serve.
type Verbs map[string]Verb

// Verb returns the answer to a request.
type Verb func(ctx context.Context, args json.RawMessage) (any, error)

// With makes a verb of a function whose arguments are a T.
func With[T any](do func(ctx context.Context, args T) (any, error)) Verb {
	return func(ctx context.Context, raw json.RawMessage) (any, error) {
		var args T
		if err := json.Unmarshal(raw, &args); err != nil {
			return nil, fmt.Errorf("read arguments: %w", err)
		}
		return do(ctx, args)
	}
}

// Serve writes to out the results of the requests that it reads from in, until in ends.
func Serve(ctx context.Context, in io.Reader, out io.Writer, verbs Verbs) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 1<<20), 64<<20)
	for lines.Scan() {
		var req request[json.RawMessage]
		if err := json.Unmarshal(lines.Bytes(), &req); err != nil {
			return fmt.Errorf("read request: %w", err)
		}
		text, err := json.Marshal(handle(ctx, verbs, req))
		if err != nil {
			return fmt.Errorf("write answer: %w", err)
		}
		if _, err := out.Write(append(text, '\n')); err != nil {
			return fmt.Errorf("write answer: %w", err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read requests: %w", err)
	}
	return nil
}

func handle(ctx context.Context, verbs Verbs, req request[json.RawMessage]) answer {
	verb := verbs[req.Verb]
	if verb == nil {
		return answer{Error: "no such verb: " + req.Verb}
	}
	result, err := verb(ctx, req.Args)
	if err != nil {
		return answer{Error: err.Error()}
	}
	raw, err := json.Marshal(result)
	if err != nil {
		return answer{Error: err.Error()}
	}
	return answer{Result: raw}
}

// Memory is the memory of a process.
type Memory struct {
	RSS        int64 `json:"rss"`
	Heap       int64 `json:"heap"` // in use
	Stacks     int64 `json:"stacks"`
	Goroutines int   `json:"goroutines"`
}

// Measure returns the memory of this process after two garbage collections.
func Measure() (Memory, error) {
	debug.FreeOSMemory()
	debug.FreeOSMemory()
	return read()
}

// RSS reads the resident size of this process from the kernel.
func RSS() (int64, error) {
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, fmt.Errorf("read own status: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		rest, ok := strings.CutPrefix(line, "VmRSS:")
		if !ok {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read own status: %w", err)
		}
		return kib << 10, nil
	}
	return 0, errors.New("read own status: no VmRSS")
}
