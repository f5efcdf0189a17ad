package kit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Question is the question that a person must confirm before a command causes a permanent loss.
type Question struct {
	Name string   // of the object; the person types it to confirm
	Lost []string // one or two lines about what will be lost
}

// Asks prepares a command that asks before it acts: its handler calls Session.Confirmed before it changes anything.
// Without a terminal the command is refused, unless --yes or its own --dry-run is given, before anything is sent.
func Asks(cmd *cobra.Command) *cobra.Command {
	var yes bool
	cmd.Flags().BoolVar(&yes, "yes", false, "go ahead without asking; needed where there is no terminal to ask on")
	next := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !yes && !dryRun(cmd) && terminalOf(cmd) == nil {
			text := cmd.CommandPath() + " asks before it acts, and there is no terminal to ask on: add --yes to go ahead"
			if cmd.Flags().Lookup("dry-run") != nil {
				text += ", or --dry-run to see what it would do"
			}
			return exit.Usage(errors.New(text))
		}
		return next(cmd, args)
	}
	return cmd
}

func dryRun(cmd *cobra.Command) bool { return set(cmd, "dry-run") }

// set reports whether a switch is on.
func set(cmd *cobra.Command, name string) bool {
	flag := cmd.Flags().Lookup(name)
	return flag != nil && flag.Value.String() == "true"
}

// terminalOf returns standard input if it is a terminal and the question is printed to one as well. Otherwise a person
// cannot be asked, and it returns nil.
func terminalOf(cmd *cobra.Command) io.Reader {
	in, ok := cmd.InOrStdin().(*os.File)
	if !ok || !output.Terminal(in) {
		return nil
	}
	if out, ok := cmd.ErrOrStderr().(*os.File); !ok || !output.Terminal(out) {
		return nil
	}
	return in
}

// Confirmed asks the person to type the name of what will be lost, and returns an error unless they do: exit 1 for
// another answer or none, 130 for Ctrl-C. With --yes or --dry-run it does not ask and does not call ask, which may read
// from the mesh and return an error if the request is not possible now.
func (s *Session) Confirmed(ctx context.Context, ask func(context.Context) (Question, error)) error {
	if s.Sure {
		return nil
	}
	if s.In == nil {
		return exit.Usage(errors.New("there is no terminal to ask on: add --yes to go ahead"))
	}
	q, err := ask(ctx)
	if err != nil {
		return err
	}
	for _, line := range q.Lost {
		human.Note(s.Err, "%s", human.Clean(line))
	}
	_, _ = fmt.Fprintf(s.Err, "Type %s to go ahead: ", human.Clean(q.Name))
	answers := make(chan string, 1)
	go func() { // it ends with the process: a read of a terminal cannot be interrupted
		line, err := bufio.NewReader(s.In).ReadString('\n')
		if err != nil { // an unfinished line, such as after Ctrl-D, does not count as an answer
			line = ""
			human.Note(s.Err, "")
		}
		answers <- strings.TrimSpace(line)
	}()
	select {
	case <-ctx.Done():
		human.Note(s.Err, "")
		return exit.Interrupt("interrupted; nothing was changed")
	case answer := <-answers:
		if answer == q.Name {
			return nil
		}
		return &exit.Error{
			Code: exit.CodeError, Reason: commonv1.Reason_REASON_CANCELLED,
			Message: "nothing was changed: the answer was not " + q.Name,
			Remedy:  "run it again and type the name as it is shown",
		}
	}
}

// Confirm asks the person to type name before the loss that lost describes, for a command outside this package. It does
// not ask if yes is set.
func Confirm(cmd *cobra.Command, yes bool, name string, lost ...string) error {
	s := &Session{Printer: &output.Printer{Sure: yes, In: terminalOf(cmd), Err: cmd.ErrOrStderr()}}
	return s.Confirmed(cmd.Context(),
		func(context.Context) (Question, error) { return Question{Name: name, Lost: lost}, nil })
}
