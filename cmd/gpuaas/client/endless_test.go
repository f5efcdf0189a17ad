package client

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
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
	program := kit.New()
	root := &cobra.Command{Use: "gpuaas"}
	Attach(program, root)
	root.SetArgs([]string{"explain", "reason", "--jq", "repeat(.)"})
	root.SetOut(&endless{interrupt: cancel})
	root.SetErr(&errOut)
	err := root.ExecuteContext(ctx)
	exit.Report(&errOut, err, false)
	if exit.CodeOf(err) != exit.CodeInterrupted || errOut.String() != "interrupted\n" {
		t.Errorf("exit %d, printed %q", exit.CodeOf(err), errOut.String())
	}
}
