package kit

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
)

const (
	// helpWidth is the width of the help where there is no terminal.
	helpWidth = 80
	// leastHelp is the smallest width of the help.
	leastHelp = 60
	// flagSlop is how many columns a line of flags may exceed the width that pflag is given.
	flagSlop = 5
)

// Help prints the help of a command. It sends no query to the terminal: the answer could become input of the next
// program, and a terminal that does not answer would delay the help.
func (p *Program) Help(cmd *cobra.Command, _ []string) {
	out := cmd.OutOrStdout()
	h := &helper{out: out, width: helpWidth}
	if file, ok := out.(*os.File); ok {
		h.bold = output.Colors(file)
		if width, _, err := term.GetSize(int(file.Fd())); err == nil && width > 0 { // a descriptor fits an int
			h.width = max(width, leastHelp)
		}
	}
	if text := strings.TrimSpace(cmp.Or(cmd.Long, cmd.Short)); text != "" {
		h.print("%s\n\n", human.Wrap(text, h.width))
	}
	if cmd.Runnable() || cmd.HasSubCommands() {
		h.usage(cmd)
	}
	p.helpFailed = h.failed
}

// HelpError returns the error of writing the requested help, or nil.
func (p *Program) HelpError() error { return p.helpFailed }

// helper writes help.
type helper struct {
	out   io.Writer
	width int
	bold  bool

	failed error // the first of the writes that failed
}

func (h *helper) print(format string, values ...any) {
	if _, err := fmt.Fprintf(h.out, format, values...); err != nil && h.failed == nil {
		h.failed = fmt.Errorf("print help: %w", err)
	}
}

func (h *helper) title(text string) {
	if h.bold {
		text = "\x1b[1m" + text + "\x1b[0m"
	}
	h.print("%s\n", text)
}

func (h *helper) usage(cmd *cobra.Command) {
	h.title("Usage:")
	if cmd.HasAvailableSubCommands() {
		h.print("  %s COMMAND\n", cmd.CommandPath())
	} else {
		h.print("%s\n", human.WrapLine("  "+cmd.UseLine(), 6, h.width))
	}
	if len(cmd.Aliases) > 0 {
		h.print("\n")
		h.title("Aliases:")
		h.print("  %s\n", cmd.NameAndAliases())
	}
	if cmd.HasExample() {
		h.print("\n")
		h.title("Examples:")
		for line := range strings.SplitSeq(strings.TrimRight(cmd.Example, "\n"), "\n") {
			h.print("%s\n", human.WrapCommand(line, h.width))
		}
	}
	h.commands(cmd)
	h.flags("Flags:", cmd.LocalNonPersistentFlags())
	global := pflag.NewFlagSet("global", pflag.ContinueOnError)
	global.AddFlagSet(cmd.PersistentFlags())
	global.AddFlagSet(cmd.InheritedFlags())
	h.flags("Global flags:", global)
	if cmd.HasAvailableSubCommands() {
		more := fmt.Sprintf("`%s COMMAND --help` shows more about a command; `%s help exit-codes` what the exit codes mean.",
			cmd.CommandPath(), cmd.Root().Name())
		h.print("\n%s\n", human.Wrap(more, h.width))
	}
}

// commands lists the subcommands, by group where there are groups.
func (h *helper) commands(cmd *cobra.Command) {
	wide := 0
	for _, sub := range cmd.Commands() {
		wide = max(wide, len(sub.Name()))
	}
	listed := func(title string, which func(*cobra.Command) bool) {
		first := true
		for _, sub := range cmd.Commands() {
			if !which(sub) {
				continue
			}
			if first {
				h.print("\n")
				h.title(title)
				first = false
			}
			h.print("%s\n", human.WrapLine(fmt.Sprintf("  %-*s  %s", wide, sub.Name(), sub.Short), wide+4, h.width))
		}
	}
	for _, g := range cmd.Groups() {
		listed(g.Title+":", func(sub *cobra.Command) bool { return sub.GroupID == g.ID && sub.IsAvailableCommand() })
	}
	rest := "Commands:"
	if len(cmd.Groups()) > 0 {
		rest = "Other commands:"
	}
	listed(rest, func(sub *cobra.Command) bool { return sub.GroupID == "" && sub.IsAvailableCommand() })
	listed("Help topics:", func(sub *cobra.Command) bool { return sub.IsAdditionalHelpTopicCommand() })
}

func (h *helper) flags(title string, flags *pflag.FlagSet) {
	if !flags.HasAvailableFlags() {
		return
	}
	h.print("\n")
	h.title(title)
	h.print("%s\n", strings.TrimRight(flags.FlagUsagesWrapped(h.width-flagSlop), "\n"))
}
