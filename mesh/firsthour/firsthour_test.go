package firsthour_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// page is repeated, and written anew with GPUAAS_UPDATE_GOLDEN=1.
const (
	page    = "../../docs/first-hour.md"
	columns = 80
)

// TestTheFirstHour runs the page from its first command to its last.
func TestTheFirstHour(t *testing.T) {
	testkit.IO(t)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	lines, blocks, err := parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	update := os.Getenv("GPUAAS_UPDATE_GOLDEN") == "1"
	s := newShell(t)
	outputs := make([][]string, len(blocks))
	for i, b := range blocks {
		outputs[i] = s.run(b)
		// On a busy machine a mesh may report for a while that Redis is slow, or that an agent is: a command that only reads
		// is repeated.
		for began := time.Now(); !update && b.reads() && compare(b.output, outputs[i], b.some) != nil &&
			time.Since(began) < 2*time.Minute; {
			outputs[i] = s.run(b)
		}
		for _, line := range tables(outputs[i]) {
			if n := utf8.RuneCountInString(line); n > columns {
				t.Errorf("%s prints a table that is %d columns wide: %s", b.command, n, line)
			}
		}
		if update {
			continue
		}
		if err := compare(b.output, outputs[i], b.some); err != nil {
			t.Errorf("%s: %v\nprinted:\n%s", b.command, err, strings.Join(outputs[i], "\n"))
		}
	}
	if update && !t.Failed() {
		if err := os.WriteFile(page, []byte(written(lines, blocks, outputs)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// shell runs commands on terminals of 80 columns, with a home of its own.
type shell struct {
	t     *testing.T
	ctx   context.Context
	dir   string
	env   []string
	stays *terminal
}

func newShell(t *testing.T) *shell {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	t.Cleanup(cancel)
	dir := meshtest.Dir(t)
	for _, sub := range []string{"home", "tmp"} {
		// workloads pass through the mesh's directory
		if err := os.Mkdir(filepath.Join(dir, sub), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	s := &shell{t: t, ctx: ctx, dir: dir}
	s.env = []string{
		"HOME=" + filepath.Join(dir, "home"), "XDG_CONFIG_HOME=" + filepath.Join(dir, "home", ".config"),
		"TMPDIR=" + filepath.Join(dir, "tmp"), "PATH=" + meshtest.Programs(t) + ":" + os.Getenv("PATH"), "TERM=xterm",
		"NO_COLOR=1", "LANG=C.UTF-8",
		"USER=" + os.Getenv("USER"),
	}
	t.Cleanup(func() {
		if s.stays != nil {
			s.stays.kill()
		}
	})
	return s
}

// terminal is a command on a terminal, and all that it has written.
type terminal struct {
	cmd  *exec.Cmd
	file *os.File

	mu      sync.Mutex
	written strings.Builder
	changed chan struct{}
	over    chan struct{}
	err     error
}

func (s *shell) start(command string) *terminal {
	s.t.Helper()
	cmd := exec.CommandContext(s.ctx, "bash", "-c", command) // the page's own
	cmd.Env, cmd.Dir = s.env, filepath.Join(s.dir, "home")
	file, program := testkit.Terminal(s.t)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = program, program, program
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true} // so that Ctrl-C reaches it
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	_ = program.Close() // the command has its own
	term := &terminal{cmd: cmd, file: file, changed: make(chan struct{}, 1), over: make(chan struct{})}
	go term.read()
	return term
}

// read keeps the output until the terminal is closed, which is when no process has it open.
func (term *terminal) read() {
	buf := make([]byte, 4096)
	for {
		n, err := term.file.Read(buf)
		term.mu.Lock()
		term.written.Write(buf[:n])
		term.mu.Unlock()
		select {
		case term.changed <- struct{}{}:
		default:
		}
		if err != nil {
			break
		}
	}
	term.err = term.cmd.Wait()
	_ = term.file.Close()
	close(term.over)
}

func (term *terminal) text() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.written.String()
}

func (term *terminal) kill() {
	_ = term.cmd.Process.Signal(os.Interrupt)
	select {
	case <-term.over:
	case <-time.After(time.Minute):
		_ = term.cmd.Process.Kill()
		<-term.over
	}
}

// until waits until the command has written a text after the first skip bytes, and returns false if it ends without it.
func (s *shell) until(term *terminal, text string, skip int) bool {
	s.t.Helper()
	for {
		if strings.Contains(term.text()[skip:], text) {
			return true
		}
		select {
		case <-term.changed:
		case <-term.over:
			return strings.Contains(term.text()[skip:], text)
		case <-s.ctx.Done():
			s.t.Fatalf("%q was not written: %s", text, term.text())
		}
	}
}

func (s *shell) press(term *terminal, keys string) {
	s.t.Helper()
	if _, err := term.file.WriteString(keys); err != nil {
		s.t.Fatal(err)
	}
}

// tidy is the package's, with the mesh's temporary directory by its variable.
func (s *shell) tidy(raw string) []string {
	return tidy(strings.ReplaceAll(raw, filepath.Join(s.dir, "tmp"), "$TMPDIR"))
}

const ctrlC = "\x03"

// run runs the command of a block and returns what it printed.
func (s *shell) run(b block) []string {
	s.t.Helper()
	if b.command == "^C" {
		if s.stays == nil {
			s.t.Fatal("nothing is left to be ended")
		}
		before := len(s.stays.text())
		s.press(s.stays, ctrlC)
		return s.end(s.stays, before)
	}
	term := s.start(b.command)
	switch b.how {
	case "stays":
		s.stays = term
		if !s.until(term, b.text, 0) {
			s.t.Fatalf("%s ended without %q: %s", b.command, b.text, term.text())
		}
		// The rest of the line, and no more: the later lines depend on the machine.
		at := strings.Index(term.text(), b.text) + len(b.text)
		s.until(term, "\n", at)
		text := term.text()
		return s.tidy(text[:at+strings.Index(text[at:], "\n")])
	case "types":
		if !s.until(term, "Type "+b.text+" to go ahead: ", 0) {
			s.t.Errorf("%s ended without asking for %q", b.command, b.text)
		} else {
			s.press(term, b.text+"\n")
		}
	case "interrupt":
		if !s.until(term, b.text, 0) {
			s.t.Errorf("%s ended without %q", b.command, b.text)
		} else {
			s.press(term, ctrlC)
		}
	}
	return s.end(term, 0)
}

// end waits for the end of a command and returns what it printed after the first skip bytes, with its exit status
// unless that is 0.
func (s *shell) end(term *terminal, skip int) []string {
	s.t.Helper()
	select {
	case <-term.over:
	case <-s.ctx.Done():
		s.t.Fatalf("the command does not end: %s", term.text())
	}
	if term == s.stays {
		s.stays = nil
	}
	out := s.tidy(term.text()[skip:])
	var exit *exec.ExitError
	switch {
	case errors.As(term.err, &exit):
		out = append(out, fmt.Sprintf("[exit status %d]", exit.ExitCode()))
	case term.err != nil:
		s.t.Error(term.err)
	}
	return out
}
