//go:build !release

package failpoint

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ErrInjected is what an armed point of action `error` returns.
var ErrInjected = errors.New("injected failure")

type action struct {
	kind string        // kill, error, errors, sleep
	skip int           // passes before it fires
	wait time.Duration // of sleep
	once bool
}

type set struct {
	mu     sync.Mutex
	points map[string]*action
	report string
	past   map[string]bool // points that a pattern has matched in this process: it does not arm them again
}

var armed = sync.OnceValue(func() *set {
	s := &set{points: parse(os.Getenv("GPUAAS_FAILPOINTS")), report: os.Getenv("GPUAAS_FAILPOINT_REPORT")}
	return s
})

// parse reads `name=kill`, `name=kill:3` (at the third pass), `name=error`, `name=error:2`, `name=errors`,
// `name=sleep:250ms`.
func parse(text string) map[string]*action {
	points := map[string]*action{}
	for part := range strings.SplitSeq(text, ",") {
		name, what, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			continue
		}
		kind, arg, _ := strings.Cut(what, ":")
		a := &action{kind: kind, once: true}
		switch kind {
		case "sleep":
			a.wait, _ = time.ParseDuration(arg)
			a.once = false
		case "errors":
			a.once = false
		default:
			if n, err := strconv.Atoi(arg); err == nil && n > 0 {
				a.skip = n - 1
			}
		}
		points[name] = a
	}
	return points
}

// Hit passes the point called name. An armed `kill` ends the process as SIGKILL would; `sleep` stalls it; `error` makes
// Hit return ErrInjected once, `errors` at each pass.
func Hit(name string) error { return armed().hit(name) }

func (s *set) hit(name string) error {
	if len(s.points) == 0 {
		return nil
	}
	s.mu.Lock()
	a := s.points[name]
	if a == nil {
		a = s.underPattern(name)
	}
	if a == nil {
		s.mu.Unlock()
		return nil
	}
	if a.skip > 0 {
		a.skip--
		s.mu.Unlock()
		return nil
	}
	if a.once {
		delete(s.points, name)
	}
	s.mu.Unlock()
	s.note(name)
	switch a.kind {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "sleep":
		time.Sleep(a.wait) //nolint:forbidigo // a stall that no context ends is what is asked for
		return nil
	case "error", "errors":
		return fmt.Errorf("failpoint %s: %w", name, ErrInjected)
	default:
		return nil
	}
}

// underPattern returns the action of a point that matches a pattern and that no process has reported yet.
func (s *set) underPattern(name string) *action {
	if s.past[name] {
		return nil
	}
	for pattern, a := range s.points {
		prefix, ok := strings.CutSuffix(pattern, "*")
		if !ok || !strings.HasPrefix(name, prefix) {
			continue
		}
		if s.past == nil {
			s.past = map[string]bool{}
		}
		s.past[name] = true
		reported, err := os.ReadFile(s.report)
		if err == nil && strings.Contains("\n"+string(reported), "\n"+name+" ") {
			return nil
		}
		own := *a
		s.points[name] = &own
		return &own
	}
	return nil
}

func (s *set) note(name string) {
	if s.report == "" {
		return
	}
	// a report of a test run, read by its harness
	f, err := os.OpenFile(s.report, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return
	}
	_, _ = fmt.Fprintf(f, "%s %d\n", name, os.Getpid())
	_ = f.Sync()
	_ = f.Close()
}
