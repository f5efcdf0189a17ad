package client

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/spf13/cobra"
)

// endless is an output whose reader interrupts the command after its first line. It fails if far more is written.
type endless struct {
	interrupt context.CancelFunc
	after     int
}

var errWentOn = errors.New("it goes on after the interrupt")

func (e *endless) Write(p []byte) (int, error) {
	e.interrupt()
	if e.after += len(p); e.after > 1<<22 {
		return 0, errWentOn
	}
	return len(p), nil
}

// TestEndlessFilterIsInterrupted: Ctrl-C ends an expression of --jq that has no end, with the exit code and the one
// line of an interrupt.
func TestEndlessFilterIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var errOut bytes.Buffer
	program := New()
	root := &cobra.Command{Use: "gpuaas"}
	Attach(program, root)
	root.SetArgs([]string{"explain", "reason", "--jq", "repeat(.)"})
	root.SetOut(&endless{interrupt: cancel})
	root.SetErr(&errOut)
	err := root.ExecuteContext(ctx)
	Report(&errOut, err, false)
	if Exit(err) != ExitInterrupted || errOut.String() != "interrupted\n" {
		t.Errorf("exit %d, printed %q", Exit(err), errOut.String())
	}
}
