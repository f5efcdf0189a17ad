package workspaces

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/showable"
)

// logsEvery is the interval at which a followed output is read. The mesh allows no shorter one for a workload.
const logsEvery = 2 * time.Second

// logsTries is how often a read is tried that is refused because it comes too soon after another person's.
const logsTries = 5

func logsCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.ReadOutputRequest{}
	follow := false
	cmd := &cobra.Command{
		Use: "logs WS", Short: "Print the newest output of a workload (at most 64 KiB), or follow it",
		Long: `Print the newest output of a workload, at most 64 KiB of it, or follow it with -f.

The output is read from the workload's host each time and is kept nowhere else: it ends with its instance. The values of
the workload's environment are masked as **** by the agent, but for those shorter than four bytes, which would mask
ordinary text; escape sequences and control characters are left out (-o json has the bytes as they are, in base64). It
is for people of the workspace's tenant and for operators.`,
		Example: "  gpuaas workspaces logs acme/demo2\n" +
			"  gpuaas workspaces logs acme/demo2 -f --workload web\n" +
			"  gpuaas workspaces logs acme/demo2 --previous",
		Args: kit.Args("WS"), ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			if follow && req.GetPrevious() {
				return exit.Usage(errors.New("-f follows the present run: leave out --previous"))
			}
			if follow && s.Structured() {
				return exit.Usage(errors.New("-f prints text: leave out -o"))
			}
			var err error
			if req.Workspace, err = s.WorkspaceID(ctx, args[0]); err != nil {
				return err
			}
			if !follow {
				answer, err := readOutput(ctx, s, req)
				if err != nil {
					return err
				}
				return printOutput(s, answer, req.GetPrevious())
			}
			err = (&outputFollower{s: s, req: req}).run(ctx)
			if ctx.Err() != nil {
				return exit.Interrupt("interrupted")
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false,
		"go on with what is written, across restarts, until Ctrl-C or until the workload has ended for good")
	cmd.Flags().StringVar(&req.Workload, "workload", "", "the workload's name; it may be left out where there is only one")
	cmd.Flags().BoolVar(&req.Previous, "previous", false, "the run before the present one")
	return cmd
}

// readOutput reads a piece of output. A read that is refused because it comes too soon after another is repeated after
// the delay in the refusal.
func readOutput(ctx context.Context, s *kit.Session, req *readmodelv1.ReadOutputRequest,
) (*readmodelv1.ReadOutputResponse, error) {
	for try := 1; ; try++ {
		answer, err := s.Query.ReadOutput(ctx, req)
		if err == nil || try >= logsTries || !fault.Has(err, commonv1.Reason_REASON_RATE_LIMITED) {
			return answer, err
		}
		if !app.Sleep(ctx, min(max(fault.RetryAfterOf(err), 10*time.Millisecond), 2*logsEvery)) {
			return nil, context.Cause(ctx)
		}
	}
}

// printOutput prints one piece.
func printOutput(s *kit.Session, answer *readmodelv1.ReadOutputResponse, previous bool) error {
	out := answer.GetOutput()
	if s.Structured() {
		raw, err := names.MarshalJSON(answer)
		if err != nil {
			return fmt.Errorf("print output: %w", err)
		}
		return s.Document(raw)
	}
	if n := out.GetDroppedBytes(); n > 0 {
		human.Note(s.Err, "not shown: %s of this run", human.Counted(n, "earlier byte"))
	}
	text := showable.Clean(out.GetData())
	if err := printText(s, text); err != nil {
		return err
	}
	if text == "" {
		human.Note(s.Err, "%s has written nothing%s", human.Clean(answer.GetWorkload()),
			human.OnlyIf(!previous && out.GetRestarts() > 0,
				fmt.Sprintf(" since its restart; it was restarted %s: see --previous", human.Counted(out.GetRestarts(), "time"))))
	}
	if out.GetEnded() {
		human.Note(s.Err, "%s %s", human.Clean(answer.GetWorkload()), exited(out.GetExitCode()))
	}
	return nil
}

// printText prints a text that is clean already.
func printText(s *kit.Session, text string) error {
	if _, err := io.WriteString(s.Out, text); err != nil {
		return fmt.Errorf("print output: %w", err)
	}
	return nil
}

// exited returns a text for an exit code.
func exited(code int32) string {
	switch {
	case code < 0:
		return "ended; its exit status was lost"
	case code > 128:
		return fmt.Sprintf("was ended by signal %d", code-128)
	default:
		return fmt.Sprintf("exited with status %d", code)
	}
}

// outputFollower prints each byte of a workload's output once, and notes what it could not print.
type outputFollower struct {
	s       *kit.Session
	req     *readmodelv1.ReadOutputRequest
	carried []byte // of an escape sequence or a character that the next piece completes
	broken  bool   // a note that the output cannot be read was printed
	printed string // the run that was printed last
	ended   string // the run whose end was noted
}

func (f *outputFollower) run(ctx context.Context) error {
	for {
		answer, err := readOutput(ctx, f.s, f.req)
		switch {
		case err == nil:
			f.broken = false
			f.req.Workload = answer.GetWorkload()
			if over, err := f.print(answer); over || err != nil {
				return err
			}
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case f.req.GetFrom() == nil || !kit.Mends(err) && !fault.Has(err, commonv1.Reason_REASON_NODE_NOT_CONNECTED):
			return err
		case !f.broken:
			f.broken = true
			human.Note(f.s.Err, "the output cannot be read now (%s); asking again until it can", names.Of(fault.ReasonOf(err)))
		}
		if !app.Sleep(ctx, logsEvery) {
			return context.Cause(ctx)
		}
	}
}

// print prints a piece, and reports whether nothing follows it.
func (f *outputFollower) print(answer *readmodelv1.ReadOutputResponse) (bool, error) {
	out, from := answer.GetOutput(), f.req.GetFrom()
	restarted := from != nil && f.printed != out.GetRun()
	f.printed = out.GetRun()
	if n := out.GetDroppedBytes(); from == nil && n > 0 {
		human.Note(f.s.Err, "not shown: %s of this run", human.Counted(n, "earlier byte"))
	} else if n > 0 || out.GetRestarted() || restarted {
		if err := f.flush(); err != nil { // the carried bytes will not be completed
			return false, err
		}
	}
	switch {
	case out.GetRestarted():
		human.Note(f.s.Err, "%s was restarted, and the end of the run before is not kept", human.Clean(answer.GetWorkload()))
	case restarted:
		human.Note(f.s.Err, "%s was restarted", human.Clean(answer.GetWorkload()))
	}
	if n := out.GetDroppedBytes(); from != nil && n > 0 {
		human.Note(f.s.Err, "dropped: %s, written faster than they could be read", human.Counted(n, "byte"))
	}
	data := slices.Concat(f.carried, out.GetData())
	keep := showable.Unfinished(data)
	f.carried = append([]byte(nil), data[len(data)-keep:]...)
	if err := printText(f.s, showable.Clean(data[:len(data)-keep])); err != nil {
		return false, err
	}
	f.req.From = out.GetNext()
	if f.req.GetFrom() == nil {
		f.req.From = &nodev1.OutputCursor{Run: out.GetRun(), Offset: out.GetOffset() + int64(len(out.GetData()))}
	}
	if !out.GetEnded() {
		return false, nil
	}
	if err := f.flush(); err != nil {
		return false, err
	}
	if f.ended != out.GetRun() {
		f.ended = out.GetRun()
		human.Note(f.s.Err, "%s %s", human.Clean(answer.GetWorkload()), exited(out.GetExitCode()))
	}
	return !out.GetMore() && final(out.GetPhase()), nil
}

// flush prints the carried bytes.
func (f *outputFollower) flush() error {
	text := showable.Clean(f.carried)
	f.carried = nil
	return printText(f.s, text)
}

// final reports whether a workload in this phase starts again only if a person acts.
func final(phase nodev1.WorkloadPhase) bool {
	switch phase { //nolint:exhaustive // the others go on, or begin again
	case nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED, nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED,
		nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT:
		return true
	}
	return false
}
