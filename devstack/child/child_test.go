package child_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/mesh/devstack/child"
)

// TestMain doubles as the parent that dies in TestDiesWithParent.
func TestMain(m *testing.M) {
	if os.Getenv("CHILD_TEST_PARENT") != "" {
		p, err := child.Start(child.Spec{Path: "/bin/sleep", Args: []string{"600"}})
		if err != nil {
			os.Exit(3)
		}
		_, _ = os.Stdout.WriteString(strconv.Itoa(p.PID()) + "\n")
		select {}
	}
	if os.Getenv("CHILD_TEST_ENDS") != "" {
		os.Exit(endsAll())
	}
	os.Exit(m.Run())
}

// endsAll runs as a process of its own that ends its children, and returns the exit status: if the test process ended
// its children, the other tests would lack theirs.
func endsAll() int {
	var live []*child.Process
	for range 3 { // none of which ends on SIGTERM
		p, err := child.Start(child.Spec{
			Path: "/bin/sh",
			Args: []string{"-c", "trap '' INT TERM; while :; do /bin/sleep 600; done"},
		})
		if err != nil {
			return 3
		}
		live = append(live, p)
	}
	if _, err := child.Start(child.Spec{Path: "/nonexistent"}); err == nil {
		return 4
	}
	if err := child.EndAll(context.Background()); err != nil {
		return 5
	}
	for _, p := range live {
		select {
		case <-p.Done():
		default:
			return 6
		}
	}
	if _, err := child.Start(child.Spec{Path: "/bin/true"}); !errors.Is(err, child.ErrEnding) {
		return 7
	}
	return 0
}

func TestEndAllEndsEveryChildAndStartsNoOther(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "CHILD_TEST_ENDS=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestStopClimbsToKill(t *testing.T) {
	if testing.Short() {
		t.SkipNow()
	}
	out, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	p, err := child.Start(child.Spec{
		Path: "/bin/sh", Args: []string{"-c", "trap '' INT; echo ready; while :; do sleep 0.05; done"},
		Env: []string{"PATH=/bin:/usr/bin"}, Output: out,
	})
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		if b, _ := os.ReadFile(out.Name()); strings.Contains(string(b), "ready") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the shell never came up")
		}
	}
	if err := p.Stop(t.Context(), child.Step{Signal: syscall.SIGINT, Wait: 100 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if !errors.As(p.Exit(), &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("ended by %v, want SIGKILL", p.Exit())
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatalf("signalling an ended process: %v", err)
	}
}

func TestStartReportsMissingBinary(t *testing.T) {
	t.Parallel()
	if _, err := child.Start(child.Spec{Path: "/nonexistent/binary"}); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
}

func TestDiesWithParent(t *testing.T) {
	if testing.Short() {
		t.SkipNow()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	parent := exec.CommandContext(ctx, os.Args[0])
	parent.Env = append(os.Environ(), "CHILD_TEST_PARENT=1")
	stdout, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 32)
	n, err := stdout.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil {
		t.Fatal(err)
	}
	// The child has to live on for a while under a live parent, even if the runtime ends threads meanwhile.
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the child is gone while its parent lives: %v", err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	for gone(pid) == false {
		if ctx.Err() != nil {
			t.Fatal("the child outlived its parent")
		}
	}
}

// gone reports whether a process has ended. A zombie counts as ended: in a container there may be no process that reaps
// it.
func gone(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, "Z")
}
