package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// question is the question that a person must confirm before a command causes a permanent loss.
type question struct {
	name string   // of the object; the person types it to confirm
	lost []string // one or two lines about what will be lost
}

// asks prepares a command that asks before it acts: its handler calls session.confirmed before it changes anything.
// Without a terminal the command is refused, unless --yes or its own --dry-run is given, before anything is sent.
func asks(cmd *cobra.Command) *cobra.Command {
	var yes bool
	cmd.Flags().BoolVar(&yes, "yes", false, "go ahead without asking; needed where there is no terminal to ask on")
	next := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !yes && !dryRun(cmd) && terminalOf(cmd) == nil {
			text := cmd.CommandPath() + " asks before it acts, and there is no terminal to ask on: add --yes to go ahead"
			if cmd.Flags().Lookup("dry-run") != nil {
				text += ", or --dry-run to see what it would do"
			}
			return Usage(errors.New(text))
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
	if !ok || !Terminal(in) {
		return nil
	}
	if out, ok := cmd.ErrOrStderr().(*os.File); !ok || !Terminal(out) {
		return nil
	}
	return in
}

// confirmed asks the person to type the name of what will be lost, and returns an error unless they do: exit 1 for
// another answer or none, 130 for Ctrl-C. With --yes or --dry-run it does not ask and does not call ask, which may read
// from the mesh and return an error if the request is not possible now.
func (s *session) confirmed(ctx context.Context, ask func(context.Context) (question, error)) error {
	if s.sure {
		return nil
	}
	if s.in == nil {
		return Usage(errors.New("there is no terminal to ask on: add --yes to go ahead"))
	}
	q, err := ask(ctx)
	if err != nil {
		return err
	}
	for _, line := range q.lost {
		note(s.err, "%s", clean(line))
	}
	_, _ = fmt.Fprintf(s.err, "Type %s to go ahead: ", clean(q.name))
	answers := make(chan string, 1)
	go func() { // it ends with the process: a read of a terminal cannot be interrupted
		line, err := bufio.NewReader(s.in).ReadString('\n')
		if err != nil { // an unfinished line, such as after Ctrl-D, does not count as an answer
			line = ""
			note(s.err, "")
		}
		answers <- strings.TrimSpace(line)
	}()
	select {
	case <-ctx.Done():
		note(s.err, "")
		return interrupted("interrupted; nothing was changed")
	case answer := <-answers:
		if answer == q.name {
			return nil
		}
		return &exitError{
			code: ExitError, reason: commonv1.Reason_REASON_CANCELLED,
			message: "nothing was changed: the answer was not " + q.name,
			remedy:  "run it again and type the name as it is shown",
		}
	}
}

// Confirm asks the person to type name before the loss that lost describes, for a command outside this package. It does
// not ask if yes is set.
func Confirm(cmd *cobra.Command, yes bool, name string, lost ...string) error {
	s := &session{printer: &printer{sure: yes, in: terminalOf(cmd), err: cmd.ErrOrStderr()}}
	return s.confirmed(cmd.Context(),
		func(context.Context) (question, error) { return question{name: name, lost: lost}, nil })
}
